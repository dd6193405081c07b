"""Who works and who waits: each pool's share of a step, from the lower bounds of its phases."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.config import Config
from spmd_rl.topology.phases import Phase
from spmd_rl.topology.traffic import Bound

PRODUCE = ("prompts", "generate", "reward")
"""The phases of the stage that one_step_off runs ahead."""
BESIDE = ("update", "critic update")
"""Phases that run at the same time when they are on different pools."""


@dataclass(frozen=True)
class PoolTime:
    """Seconds of a step. All are made of lower bounds: the ratio tells more than the size."""

    pool: str
    busy: float
    idle: float


def pool_times(
    config: Config, phases: Sequence[Phase], bounds: Sequence[Bound], pools: Sequence[str]
) -> list[PoolTime]:
    """One entry a pool, when bounds are known."""
    if not bounds:
        return []
    seconds = {bound.phase: bound.seconds for bound in bounds}
    active = [phase for phase in phases if not phase.why_skipped]
    stages = [_lasts([p for p in active if (p.name in PRODUCE) == ahead], seconds) for ahead in (True, False)]
    sync = seconds.get("weight sync", 0.0)
    step = sync + (max(stages) if config.trainer.schedule == "one_step_off" else sum(stages))
    syncing = {p.pool for p in active if p.name in ("generate", "update")}
    found = []
    for pool in pools:
        busy = sum(seconds.get(p.name, 0.0) for p in active if p.pool == pool) + (sync if pool in syncing else 0.0)
        found.append(PoolTime(pool, busy, max(step - busy, 0.0)))
    return found


def _lasts(phases: Sequence[Phase], seconds: dict[str, float]) -> float:
    """One after the other, but those that run beside each other."""
    beside = [p for p in phases if p.name in BESIDE]
    total = sum(seconds.get(p.name, 0.0) for p in phases if p not in beside)
    by_pool: dict[str, float] = {}
    for p in beside:
        by_pool[p.pool] = by_pool.get(p.pool, 0.0) + seconds.get(p.name, 0.0)
    return total + max(by_pool.values(), default=0.0)
