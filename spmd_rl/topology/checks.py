"""What is wrong with a config on a cluster, found without files, GPUs or torch.

Every mistake is one line with the failing equation, its values and the mend.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from spmd_rl.config import Config
from spmd_rl.config.choices import check_value
from spmd_rl.topology.batch_checks import batch_mistakes, engine_mistakes
from spmd_rl.topology.cluster import Cluster, Pool, cluster_mistakes, gpu_counts
from spmd_rl.topology.fold import fsdp_mistakes, megatron_mistakes, rollout_mistakes
from spmd_rl.topology.groups import ProcessGroups
from spmd_rl.topology.hardware import GIB, HARDWARE, LINKS, hardware
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.memory import PhaseMemory, card_bytes, role_shape
from spmd_rl.topology.model_checks import length_mistakes, model_mistakes
from spmd_rl.topology.pools import GLOBAL, place_pools
from spmd_rl.topology.replay import replay_mistakes
from spmd_rl.topology.roles import RoleSpec, config_path, role_specs
from spmd_rl.topology.shape import ModelShape
from spmd_rl.topology.vllm_memory import VllmMemory, cpu_mistakes, vllm_mistakes

INSIDE_A_NODE = ("tp", "etp", "infer_tp")
"""Axes whose traffic is too dense for the network between hosts."""


def check(config: Config, cluster: Cluster, shape: ModelShape | None = None) -> list[str]:
    """Every mistake that shows before layouts exist; empty when there is none. `shape` adds what the model forbids."""
    mistakes = [sentence for key, value in _leaves(config) for sentence in check_value(key, value)]
    if mistakes:
        return mistakes  # sizes cannot be reasoned about when one of them is out of range
    mistakes = cluster_mistakes(config) or _hardware_mistakes(config) + _launched_mistakes(config, cluster)
    pools, wrong = place_pools(config, cluster)
    mistakes += wrong + _unused_mistakes(config, pools)
    for spec in role_specs(config).values():
        if spec.pool in pools:
            mistakes += _fold_mistakes(config, spec, pools[spec.pool].size)
        elif spec.pool not in config.pools:
            mistakes.append(_no_pool(config, cluster, spec))
        mistakes += engine_mistakes(config, spec)
        if shape is not None:
            mistakes += model_mistakes(config, spec, role_shape(spec, shape))
    mistakes += batch_mistakes(config) + replay_mistakes(config, shape)
    return list(dict.fromkeys(mistakes + (length_mistakes(config, shape) if shape is not None else [])))


def locality_mistakes(cluster: Cluster, roles: dict[str, RoleLayout], groups: dict[str, ProcessGroups]) -> list[str]:
    """Axes that must stay inside a host and do not, with the first group that crosses and how its ranks lie."""
    mistakes = []
    for found in groups.values():
        for name in (found.name, *found.aliases):
            role, _, axis = name.partition("/")
            inside = axis in INSIDE_A_NODE and role in roles and found.group_size > 1
            if inside and (axis != "etp" or _own_etp(roles[role])):
                mistakes += _crossing(cluster, roles[role], axis, found)
    return mistakes


def _own_etp(role: RoleLayout) -> bool:
    """Whether experts are cut otherwise than tp, which is checked already."""
    return role.expert is None or role.expert.axis_size("etp") != role.mesh.axis_size("tp")


def memory_mistakes(config: Config, estimate: list[PhaseMemory]) -> list[str]:
    """Phases whose peak exceeds what a rank may use of its card, the largest of each pool; not on the CPU."""
    if config.trainer.device == "cpu" or not estimate:
        return []
    limit, card = card_bytes(config), hardware(config)
    mistakes = []
    for pool in dict.fromkeys(found.pool for found in estimate):
        worst = max((found for found in estimate if found.pool == pool), key=lambda found: found.peak)
        if worst.peak > limit:
            biggest = sorted(worst.items.items(), key=lambda item: -item[1])[:3]
            parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in biggest)
            mistakes.append(
                f"memory: {worst.phase} on pool {pool!r} needs {worst.peak / GIB:.1f} GiB a rank, but "
                f"{limit / GIB:.1f} of {card.name}'s {card.memory / GIB:.1f} GiB are usable (largest: {parts}); "
                f"{_memory_mend(config, worst)}"
            )
    return mistakes


def rollout_memory_mistakes(
    config: Config, roles: dict[str, RoleLayout], estimate: list[PhaseMemory], shape: ModelShape
) -> list[str]:
    """A vLLM engine whose share of the card leaves its KV cache too little, or that a CPU does not have."""
    if config.rollout.name != "vllm" or "rollout" not in roles:
        return []
    if config.trainer.device == "cpu":
        return cpu_mistakes(config, shape) or vllm_mistakes(VllmMemory.of(config, roles["rollout"], shape), 0)
    (generate,) = (found for found in estimate if found.phase == "generate")
    others = sum(size for what, size in generate.items.items() if not what.startswith("rollout: "))
    return vllm_mistakes(VllmMemory.of(config, roles["rollout"], shape), card_bytes(config) - others)


def host_mistakes(config: Config, cluster: Cluster, pools: dict[str, Pool], offloaded: dict[str, int]) -> list[str]:
    """Hosts whose memory cannot hold what their ranks move there; `offloaded` is bytes a rank by pool."""
    if config.trainer.device == "cpu":
        return []
    nodes, limit = len(cluster.nodes), hardware(config).host_memory
    ranks = {name: np.bincount(cluster.node_of[pool.array], minlength=nodes) for name, pool in pools.items()}
    total = np.sum([ranks[name] * offloaded.get(name, 0) for name in pools], axis=0)
    fullest = int(np.argmax(total))
    if total[fullest] <= limit:
        return []
    parts = [
        f"{ranks[n][fullest]} ranks × {offloaded[n] / GIB:.1f}" for n in pools if offloaded.get(n) and ranks[n][fullest]
    ]
    needs = f"{' + '.join(parts)} = {total[fullest] / GIB:.1f} GiB on {cluster.nodes[fullest].address}"
    has = f"a host has {limit / GIB:.1f} GiB (cluster.host_memory_gib); shard over more ranks or offload less"
    return [f"memory: what is offloaded pins {needs}, but {has}"]


def _memory_mend(config: Config, worst: PhaseMemory) -> str:
    """What helps most against the largest item."""
    what = max(worst.items, key=lambda item: worst.items[item])
    role, _, item = what.partition(": ")
    engine = f"{'reward.model' if role == 'reward' else role}.engine"
    kv_cache = "lower rollout.max_batch_rows or data.max_response_length"
    if config.rollout.name == "vllm":
        kv_cache = "lower rollout.gpu_memory_utilization, or offload more of the roles beside it"
    mends = {
        "KV cache": kv_cache,
        "sampling": "lower rollout.max_batch_rows or data.max_prompt_length",
        "weights": "raise rollout.infer_tp" + (" with rollout.name=vllm" if config.rollout.name != "vllm" else ""),
        "activations": f"lower {engine}.max_tokens_per_micro_batch or set {engine}.gradient_checkpointing=true",
        "logits": f"lower {engine}.logprob_chunk_tokens",
        "optimizer": f"shard over more ranks or set {engine}.offload_optimizer=true",
        "parameters": f"shard over more ranks or set {engine}.offload_params=true",
    }
    return mends.get(item, "shard over more ranks")


def _crossing(cluster: Cluster, role: RoleLayout, axis: str, groups: ProcessGroups) -> list[str]:
    members = groups.members()
    nodes = cluster.node_of[members]
    crossing = np.flatnonzero(nodes.min(axis=1) != nodes.max(axis=1))
    if not len(crossing):
        return []
    where = ", ".join(
        f"{cluster.nodes[node].address}: {int(count)}"
        for node, count in zip(*np.unique(nodes[crossing[0]], return_counts=True), strict=True)
    )
    path = f"rollout.{axis}" if role.role == "rollout" else f"{role.role}.engine.megatron.{axis}"
    per_node = np.bincount(cluster.node_of[groups.pools[0].array], minlength=len(cluster.nodes))
    fits = int(np.gcd.reduce(per_node[per_node > 0]))
    first = f"the first has ranks {members[crossing[0]].tolist()} ({where})"
    mend = f"pool {role.pool!r} has ranks in lots of {fits}, use a size that divides {fits}"
    return [f"{path}={groups.group_size} crosses hosts: {len(crossing)} of {groups.count} groups do, {first}; {mend}"]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(value):
        inner, key = getattr(value, field.name), f"{prefix}{field.name}"
        if is_dataclass(inner):
            yield from _leaves(inner, f"{key}.")
        elif key == "pools":
            for name, pool in inner.items():
                yield from _leaves(pool, f"pools.{name}.")
        else:
            yield key, inner


def _hardware_mistakes(config: Config) -> list[str]:
    c, mistakes = config.cluster, []
    if c.gpu not in HARDWARE:
        mistakes.append(f"cluster.gpu={c.gpu!r} is unknown; cards: {', '.join(HARDWARE)}")
    unknown = [link for link in c.bandwidth if link not in LINKS]
    mistakes += [f"cluster.bandwidth.{link} is unknown; links: {', '.join(LINKS)}" for link in unknown]
    slow = {link: rate for link, rate in c.bandwidth.items() if rate <= 0}
    mistakes += [f"cluster.bandwidth.{link}={rate:g} must be above 0 GB/s" for link, rate in slow.items()]
    for name, size in (("gpu_memory_gib", c.gpu_memory_gib), ("host_memory_gib", c.host_memory_gib)):
        if size is not None and size <= 0:
            mistakes.append(f"cluster.{name}={size:g} must be above 0")
    return mistakes


def _launched_mistakes(config: Config, cluster: Cluster) -> list[str]:
    """The config's sizes against what really started."""
    c, found = config.cluster, cluster.counts.tolist()
    if c.nodes is not None and c.nodes != len(found):
        return [f"cluster.nodes={c.nodes}, but {len(found)} host(s) started; start {c.nodes} or drop cluster.nodes"]
    if c.gpus_per_node is not None:
        wanted = [gpus * c.ranks_per_gpu for gpus in gpu_counts(config)]
        if c.nodes is None and isinstance(c.gpus_per_node, int):
            wanted = wanted * len(found)
        tags = [node.tag for node in cluster.nodes]
        if any(tags) and len(c.node_tags) == len(wanted):  # hosts of a class may have come in any order
            if sorted(zip(c.node_tags, wanted, strict=True)) == sorted(zip(tags, found, strict=True)):
                return []
            return [_wrong_hosts(list(c.node_tags), wanted, tags, found)]
        if wanted != found:
            shown = c.gpus_per_node if isinstance(c.gpus_per_node, int) else list(c.gpus_per_node)
            asked = f"cluster.gpus_per_node={shown} · ranks_per_gpu={c.ranks_per_gpu} asks for {_lots(wanted)}"
            return [f"{asked} ranks a host, but {_lots(found)} started"]
    uneven = [count for count in found if count % c.ranks_per_gpu]
    if uneven:
        return [f"cluster.ranks_per_gpu={c.ranks_per_gpu} does not divide the {uneven[0]} ranks of a host"]
    return []


def _wrong_hosts(tags: list[str], wanted: list[int], found_tags: list[str], found: list[int]) -> str:
    asked = ", ".join(f"{tag}: {count}" for tag, count in zip(tags, wanted, strict=True))
    started = ", ".join(f"{tag or 'untagged'}: {count}" for tag, count in zip(found_tags, found, strict=True))
    return f"cluster.node_tags and gpus_per_node ask for hosts with ranks {asked}; started were {started}"


def _lots(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else str(counts)


def _unused_mistakes(config: Config, pools: dict[str, Pool]) -> list[str]:
    """Pools that no role lives on."""
    lived = {spec.pool for spec in role_specs(config).values()}
    mistakes = [
        f"pools.{name} has no role; drop it, or set some role's pool={name}"
        for name in config.pools
        if name not in lived
    ]
    if GLOBAL in pools and GLOBAL not in lived and GLOBAL not in config.pools:
        mistakes.append(
            f"{pools[GLOBAL].size} ranks are in no pool of a role (pool 'global' gets the rest); enlarge a pool, put a "
            "role on 'global', or start fewer ranks"
        )
    return mistakes


def _no_pool(config: Config, cluster: Cluster, spec: RoleSpec) -> str:
    if spec.pool == GLOBAL:
        return f"{config_path(spec)}.pool='global' has no rank left: the other pools take all {cluster.size}"
    return f"{config_path(spec)}.pool={spec.pool!r} is unknown; pools: {', '.join([GLOBAL, *config.pools])}"


def _fold_mistakes(config: Config, spec: RoleSpec, size: int) -> list[str]:
    if spec.engine is None:
        return rollout_mistakes(spec.pool, size, config.rollout)
    if spec.engine.name == "megatron":
        return megatron_mistakes(config_path(spec), spec.pool, size, spec.engine.megatron)
    return fsdp_mistakes(config_path(spec), spec.pool, size, spec.engine.fsdp)
