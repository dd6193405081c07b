"""What the pools tell each other at the borders of a step. Inside a pool all ranks know the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd_rl.roles.model import sum_over
from spmd_rl.runtime.bootstrap import Runtime


def together(mine: Mapping[str, Any], runtime: Runtime) -> dict[str, Any]:
    """JSON values of all pools by name, nested ones too; where several know a name, the actor's pool is believed.

    Each pool's first rank speaks for it. All ranks of the job call this.
    """
    pools = runtime.plan.pools
    if len(pools) == 1:
        return dict(mine)
    home = runtime.layout("actor").pool
    known: dict[str, Any] = {}
    order = sorted(pools.values(), key=lambda pool: pool.name != home)
    for said in runtime.job.hear(mine, [pool.ranks[0] for pool in order]):
        known = _join(known, said)
    return known


def _join(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(one.get(name), dict):
            one[name] = _join(one[name], value)
        else:
            one.setdefault(name, value)
    return one


def largest(mine: Mapping[str, float], runtime: Runtime) -> dict[str, float]:
    """The largest value of each name over the pools: a phase lasts as long as where it lasts longest."""
    return together_and_largest({}, [mine], runtime)[1][0]


def together_and_largest(
    known: Mapping[str, Any], measured: Sequence[Mapping[str, float]], runtime: Runtime
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """`together` of what is known and `largest` of each thing that was measured, in one meeting."""
    here = {runtime.pool.name: {str(i): dict(values) for i, values in enumerate(measured)}}
    said = together({"known": dict(known), "measured": here}, runtime)
    pools = list(said["measured"].values())
    return said["known"], [_largest([pool[str(i)] for pool in pools]) for i in range(len(measured))]


def _largest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name: None for values in found for name in values}  # in order, each once
    return {name: max(values[name] for values in found if name in values) for name in names}


class Idle:
    """`trainer/idle_s/<pool>`: how long a pool's ranks waited for others, on average; not with one pool."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self._before = runtime, 0.0

    def take(self) -> dict[str, float]:
        """Since the last call."""
        runtime = self.runtime
        if len(runtime.plan.pools) == 1:
            return {}
        since, self._before = runtime.waits.seconds - self._before, runtime.waits.seconds
        whole = sum_over(torch.tensor([since], dtype=torch.float64), runtime.everyone).item()
        return {f"trainer/idle_s/{runtime.pool.name}": whole / runtime.pool.size}
