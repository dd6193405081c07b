"""What is wrong with a config on a cluster, found without files, GPUs or torch."""

from spmd_rl.config import Config
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.fold import fsdp_mistakes, megatron_mistakes, rollout_mistakes
from spmd_rl.topology.pools import place_pools
from spmd_rl.topology.roles import RoleSpec, config_path, role_specs


def check(config: Config, cluster: Cluster, shape: object | None = None) -> list[str]:
    """Every mistake as one line with the failing equation, its values and the mend; empty when there is none."""
    pools, mistakes = place_pools(config, cluster)
    for spec in role_specs(config).values():
        if spec.pool in pools:
            mistakes += _fold_mistakes(config, spec, pools[spec.pool].size)
        elif spec.pool not in config.pools and spec.pool != "global":
            known = ", ".join(["global", *config.pools])
            mistakes.append(f"{config_path(spec)}.pool={spec.pool!r} is unknown; pools: {known}")
        elif spec.pool == "global" and "global" not in config.pools:
            mistakes.append(
                f"{config_path(spec)}.pool='global' has no rank left: the other pools take all {cluster.size}"
            )
    return mistakes


def _fold_mistakes(config: Config, spec: RoleSpec, size: int) -> list[str]:
    if spec.engine is None:
        return rollout_mistakes(spec.pool, size, config.rollout)
    if spec.engine.name == "megatron":
        return megatron_mistakes(config_path(spec), spec.pool, size, spec.engine.megatron)
    return fsdp_mistakes(config_path(spec), spec.pool, size, spec.engine.fsdp)
