"""The plan: the whole run's topology as one immutable value, computed without torch.distributed and without a GPU."""

from dataclasses import dataclass, field

from spmd_rl.config import Config
from spmd_rl.topology.checks import check
from spmd_rl.topology.cluster import Cluster, Pool
from spmd_rl.topology.fold import demand, engine_layout, rollout_layout
from spmd_rl.topology.groups import ProcessGroups, process_groups
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.pools import place_pools
from spmd_rl.topology.roles import RoleSpec, role_specs


@dataclass(frozen=True)
class Plan:
    """Pools, layouts and process groups of one run. `Plan.from_config` is the only way to make one."""

    config: Config = field(repr=False)
    cluster: Cluster = field(repr=False)
    pools: dict[str, Pool]
    """By name, `global` first."""
    roles: dict[str, RoleLayout]
    """By role, the actor first."""
    process_groups: dict[str, ProcessGroups]
    """By name, in the order in which every rank registers them."""

    @classmethod
    def from_config(cls, config: Config, cluster: Cluster) -> "Plan":
        """Plan the run. Raises ConfigError with every mistake that is found, one a line."""
        demand(check(config, cluster, None))
        pools, _ = place_pools(config, cluster)
        roles = {spec.role: role_layout(config, spec, pools[spec.pool].size) for spec in role_specs(config).values()}
        return cls(config, cluster, pools, roles, process_groups(pools, roles))

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.cluster.size

    def pool_of(self, job_rank: int) -> Pool:
        """The pool that a job rank is in. Raises KeyError for a rank outside the job."""
        for pool in self.pools.values():
            if job_rank in pool:
                return pool
        raise KeyError(f"rank {job_rank} is outside the job's 0..{self.world_size - 1}")

    def groups(self, name: str) -> ProcessGroups:
        """The process groups of a name or an alias (`actor/fsdp`, `pool/global`). Raises KeyError for others."""
        for groups in self.process_groups.values():
            if name == groups.name or name in groups.aliases:
                return groups
        raise KeyError(f"no process groups {name!r} in the plan; there are {', '.join(self.process_groups)}")

    def roles_on(self, pool: str) -> list[str]:
        """The roles that live on a pool, in plan order."""
        return [role for role, layout in self.roles.items() if layout.pool == pool]


def role_layout(config: Config, spec: RoleSpec, size: int) -> RoleLayout:
    """The layout of one role on its pool of `size` ranks. Raises ConfigError with every mistake."""
    if spec.engine is None:
        return rollout_layout(spec.pool, size, config.rollout)
    return engine_layout(spec.role, spec.pool, size, spec.engine)
