"""The plan: the whole run's topology as one immutable value, computed without torch.distributed and without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from spmd_rl.config import Config, ConfigError
from spmd_rl.topology.batch_checks import batch_warnings, schedule_warnings
from spmd_rl.topology.checks import check, host_mistakes, locality_mistakes, memory_mistakes, rollout_memory_mistakes
from spmd_rl.topology.cluster import Cluster, Pool
from spmd_rl.topology.edges import ExchangeEdge, SyncEdge, exchange_edge, exchange_edges, sync_edge
from spmd_rl.topology.fold import demand, engine_layout, rollout_layout
from spmd_rl.topology.groups import ProcessGroups, process_groups
from spmd_rl.topology.idle_keys import idle_warnings
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.memory import PhaseMemory, early_pieces, memory, offloaded_bytes, overlaps
from spmd_rl.topology.phases import TIMED, Phase, step_phases
from spmd_rl.topology.pool_times import PoolTime, pool_times
from spmd_rl.topology.pools import place_pools
from spmd_rl.topology.roles import RoleSpec, role_specs
from spmd_rl.topology.shape import ModelShape, config_shape
from spmd_rl.topology.traffic import Bound, Traffic, TrafficModel
from spmd_rl.topology.vllm_memory import VllmMemory, facts, sleep_level, vllm_warnings


@dataclass(frozen=True)
class Plan:
    """Everything about a run that is known before it starts. `Plan.from_config` is the only way to make one."""

    config: Config = field(repr=False)
    cluster: Cluster = field(repr=False)
    shape: ModelShape | None
    """The actor's; None when neither model.path nor model.shape is at hand (then there is no memory estimate)."""
    pools: dict[str, Pool]
    """By name, `global` first."""
    roles: dict[str, RoleLayout]
    """By role, the actor first."""
    process_groups: dict[str, ProcessGroups]
    """By name, in the order in which every rank registers them."""
    phases: list[Phase]
    """The step, in program order; skipped phases say why."""
    memory: list[PhaseMemory]
    """Bytes on a rank's GPU in every phase that runs."""

    @classmethod
    def from_config(cls, config: Config, cluster: Cluster) -> "Plan":
        """Plan the run. Raises ConfigError with every mistake that is found, one a line."""
        shape, mistakes = _shape(config)
        demand(check(config, cluster, shape) + mistakes)
        pools, _ = place_pools(config, cluster)
        roles = {spec.role: role_layout(config, spec, pools[spec.pool].size) for spec in role_specs(config).values()}
        groups = process_groups(pools, roles)
        estimate = memory(config, pools, roles, shape)
        demand(
            locality_mistakes(cluster, roles, groups) + _memory_mistakes(config, cluster, pools, roles, estimate, shape)
        )
        return cls(config, cluster, shape, pools, roles, groups, step_phases(config, roles), estimate)

    def with_shape(self, hf_config: Mapping[str, Any]) -> "Plan":
        """The plan with memory and bounds, also where its model's shape is known only now that it has been found.

        Raises ConfigError with what that shows to be a mistake.
        """
        if self.shape is not None:
            return self
        try:
            shape = ModelShape.from_hf(hf_config, self.config.model.path.rstrip("/").rpartition("/")[2])
        except ConfigError:  # not a decoder: it may run, unplanned
            return self
        demand(check(self.config, self.cluster, shape))
        estimate = memory(self.config, self.pools, self.roles, shape)
        demand(_memory_mistakes(self.config, self.cluster, self.pools, self.roles, estimate, shape))
        return replace(self, shape=shape, memory=estimate)

    @cached_property
    def early(self) -> dict[str, frozenset[str]]:
        """Phase, as the loop calls it -> what a hot swap brings to the device there before it is needed."""
        return early_pieces(self.config, self.memory)

    @cached_property
    def overlaps(self) -> bool:
        """Whether what leaves for the generation may still be here during the weight sync; not without a shape."""
        return self.shape is not None and overlaps(self.config, self.roles, self.shape)

    @cached_property
    def vllm_facts(self) -> dict[str, str]:
        """What is estimated of the rollout engine on one rank, in words; empty where `vllm` is None."""
        return facts(self.vllm, sleep_level(self.config, self.roles)) if self.vllm else {}

    @cached_property
    def timed_peaks(self) -> dict[str, int]:
        """Phase, as the loop calls it -> bytes on the rank that has most."""
        peaks: dict[str, int] = {}
        for found in self.memory:
            if found.phase in TIMED:
                peaks[TIMED[found.phase]] = max(found.peak, peaks.get(TIMED[found.phase], 0))
        return peaks

    @property
    def warnings(self) -> list[str]:
        """What can run but hardly does what is wanted, a sentence each."""
        engine = self.vllm if self.config.trainer.device != "cpu" else None
        found = batch_warnings(self.config) + schedule_warnings(self.config) + idle_warnings(self.config)
        return found + (vllm_warnings(engine) if engine else [])

    @cached_property
    def vllm(self) -> VllmMemory | None:
        """What a rank's rollout engine takes; None without one, or without a shape."""
        if self.shape is None or "rollout" not in self.roles or self.config.rollout.name != "vllm":
            return None
        return VllmMemory.of(self.config, self.roles["rollout"], self.shape)

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

    def memory_of(self, job_rank: int) -> list[PhaseMemory]:
        """One rank's estimate, a phase an entry, for its own pipeline stages."""
        pool = self.pool_of(job_rank)
        found = []
        for entry in (entry for entry in self.memory if entry.pool == pool.name):
            role = next(phase.role for phase in self.phases if phase.name == entry.phase)
            place = self.roles[role].mesh.coords(pool.pool_rank(job_rank)) if role else {}
            if entry.stage == place.get("pp", 0):
                found.append(entry)
        return found

    @cached_property
    def exchanges(self) -> list[ExchangeEdge]:
        """Batches that change their layout or pool, in program order."""
        return exchange_edges(self.config, self.pools, self.roles)

    def exchange(self, source: str, target: str) -> ExchangeEdge:
        """The edge between two roles, also where no row has to move."""
        return exchange_edge(f"{source} to {target}", self.roles[source], self.roles[target], self.pools)

    @cached_property
    def weight_sync(self) -> SyncEdge | None:
        """From the actor to the rollout engine; None without a rollout."""
        return sync_edge(self.pools, self.roles)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Bytes a rank takes in over each set of process groups; empty when the shape is unknown."""
        return self._prices.traffic() if self.shape else []

    @cached_property
    def bounds(self) -> list[Bound]:
        """The least seconds of every phase and of the weight sync; empty when the shape is unknown."""
        return self._prices.bounds(self.traffic) if self.shape else []

    @property
    def pool_times(self) -> list[PoolTime]:
        """How long each pool works and waits in a step, by the bounds; empty when the shape is unknown."""
        return pool_times(self.config, self.phases, self.bounds, list(self.pools))

    @cached_property
    def _prices(self) -> TrafficModel:
        assert self.shape is not None, "priced with a shape only"
        return TrafficModel(self.config, self.cluster, self.roles, self.process_groups, self.shape)


def _shape(config: Config) -> tuple[ModelShape | None, list[str]]:
    try:
        return config_shape(config), []
    except ConfigError as error:
        return None, [str(error)]


def _memory_mistakes(
    config: Config,
    cluster: Cluster,
    pools: dict[str, Pool],
    roles: dict[str, RoleLayout],
    estimate: list[PhaseMemory],
    shape: ModelShape | None,
) -> list[str]:
    """What does not fit on the cards and on the hosts; nothing is known without a shape."""
    if shape is None:
        return []
    on_hosts = host_mistakes(config, cluster, pools, offloaded_bytes(config, roles, shape))
    return rollout_memory_mistakes(config, roles, estimate, shape) + memory_mistakes(config, estimate) + on_hosts


def role_layout(config: Config, spec: RoleSpec, size: int) -> RoleLayout:
    """The layout of one role on its pool of `size` ranks. Raises ConfigError with every mistake."""
    if spec.engine is None:
        return rollout_layout(spec.pool, size, config.rollout)
    return engine_layout(spec.role, spec.pool, size, spec.engine)
