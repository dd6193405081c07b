"""Cut the cluster into pools: which job ranks each pool gets, and why a pool does not fit.

Pools of the config are taken from the end of the cluster, so that `global`, which gets the rest, starts at rank 0.
Legend: H = hosts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_rl.config import Config, PoolConfig
from spmd_rl.topology.cluster import Cluster, Pool, is_counts

GLOBAL = "global"
PLACEMENTS = ("pack", "spread")


@dataclass
class _Free:
    """The ranks of each host that no pool took yet: local ranks low..high-1, int64 [H] each."""

    low: np.ndarray
    high: np.ndarray

    @property
    def ranks(self) -> np.ndarray:
        return self.high - self.low


def place_pools(config: Config, cluster: Cluster) -> tuple[dict[str, Pool], list[str]]:
    """All pools in config order, `global` first, and what is wrong with them.

    A pool that cannot be placed is left out; its ranks stay free, so that one mistake does not hide the next.
    """
    free = _Free(np.zeros(len(cluster.nodes), dtype=np.int64), cluster.counts.copy())
    pools: dict[str, Pool] = {}
    mistakes: list[str] = []
    for name in sorted(config.pools, key=lambda n: n != GLOBAL):
        wrong = _pool_mistakes(name, config.pools[name])
        if not wrong:
            placed, wrong = _place(name, config.pools[name], cluster, free)
            pools |= placed
        mistakes += wrong
    if GLOBAL not in config.pools:
        pools = _rest(cluster, free) | pools
    elif not mistakes and free.ranks.any():
        left = f"{int(free.ranks.sum())} of the {cluster.size} ranks are in no pool ({_free_text(cluster, free.ranks)})"
        mistakes.append(
            f"pools: {left}; enlarge a pool, drop pools.{GLOBAL} (it then gets the rest), or start fewer ranks"
        )
    return pools, mistakes


def requested_counts(pool: PoolConfig) -> list[int]:
    """Ranks that the pool asks for on each of its hosts."""
    wanted = pool.n_gpus_per_node
    return [wanted] * pool.nnodes if isinstance(wanted, int) else list(wanted)


def _pool_mistakes(name: str, pool: PoolConfig) -> list[str]:
    prefix = f"pools.{name}"
    if pool.nnodes < 1:
        return [f"{prefix}.nnodes={pool.nnodes} must be at least 1"]
    if not is_counts(pool.n_gpus_per_node):
        return [f"{prefix}.n_gpus_per_node={pool.n_gpus_per_node} must be a whole number, or a list with one a host"]
    mistakes, counts = [], requested_counts(pool)
    if not counts or min(counts) < 1:
        mistakes.append(f"{prefix}.n_gpus_per_node={_shown(pool)} must be at least 1 on every host")
    if len(counts) != pool.nnodes:
        mistakes.append(f"{prefix}.n_gpus_per_node={counts} lists {len(counts)} hosts, but nnodes={pool.nnodes}")
    if pool.placement not in PLACEMENTS:
        mistakes.append(f"{prefix}.placement={pool.placement!r} is unknown; use pack or spread")
    return mistakes


def _place(name: str, pool: PoolConfig, cluster: Cluster, free: _Free) -> tuple[dict[str, Pool], list[str]]:
    """Take the pool's ranks out of `free`, or say why they are not there."""
    fits = np.array([pool.node_tag in (None, node.tag) for node in cluster.nodes])
    if not fits.any():
        tags = sorted({node.tag for node in cluster.nodes if node.tag})
        return {}, [
            f"pools.{name}.node_tag={pool.node_tag!r} is the class of no host; classes: {', '.join(tags) or 'none'}"
        ]
    taken = _choose(requested_counts(pool), pool.placement, fits, free.ranks, from_front=name == GLOBAL)
    if taken is None:
        return {}, [_no_room(name, pool, cluster, fits, free.ranks)]
    hosts = np.flatnonzero(taken)
    if name == GLOBAL:
        starts = free.low[hosts].copy()
        free.low[hosts] += taken[hosts]
    else:
        free.high[hosts] -= taken[hosts]
        starts = free.high[hosts]
    return {name: _pool(name, cluster.first_ranks[hosts] + starts, taken[hosts])}, []


def _choose(
    counts: Sequence[int], placement: str, fits: np.ndarray, free: np.ndarray, from_front: bool
) -> np.ndarray | None:
    """Ranks to take from each host, int64 [H]; None if there is no room. The largest requests choose first."""
    taken = np.zeros_like(free)
    order = np.arange(len(free)) if from_front else np.arange(len(free))[::-1]
    for count in sorted(set(counts), reverse=True):
        able = order[(fits & (free >= count) & (taken == 0))[order]]
        able = able[np.argsort(free[able] if placement == "pack" else -free[able], kind="stable")]
        needed = list(counts).count(count)
        if len(able) < needed:
            return None
        taken[able[:needed]] = count
    return taken


def _pool(name: str, starts: np.ndarray, counts: np.ndarray) -> Pool:
    """The pool of `counts` consecutive job ranks from each of `starts`, hosts in order."""
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.repeat(starts, counts) + offsets
    return Pool(name, tuple(ranks.tolist()), tuple(counts.tolist()))


def _rest(cluster: Cluster, free: _Free) -> dict[str, Pool]:
    hosts = np.flatnonzero(free.ranks)
    if not len(hosts):
        return {}
    return {GLOBAL: _pool(GLOBAL, cluster.first_ranks[hosts] + free.low[hosts], free.ranks[hosts])}


def _no_room(name: str, pool: PoolConfig, cluster: Cluster, fits: np.ndarray, free: np.ndarray) -> str:
    """Say whether ranks are missing or only lie in the wrong places."""
    counts = requested_counts(pool)
    where = f" of class {pool.node_tag!r}" if pool.node_tag else ""
    head = f"pools.{name} asks for {_shown(pool)} ranks on {pool.nnodes} host(s){where} = {sum(counts)} ranks"
    total = int(free[fits].sum())
    if sum(counts) > total:
        return f"{head}, but only {total} of the cluster's {cluster.size} are free; make the pools smaller or add hosts"
    usable = int((free[fits] >= max(counts)).sum())
    scattered = f"only {usable} host(s) have {max(counts)} free ({_free_text(cluster, free)})"
    return f"{head}: enough are free ({total}), but {scattered}; ask for fewer a host on more hosts"


def _free_text(cluster: Cluster, free: np.ndarray, most: int = 6) -> str:
    hosts = [f"{node.address}: {int(n)}" for node, n in zip(cluster.nodes[:most], free[:most], strict=True)]
    return ", ".join(hosts) + (f" … {len(free) - most} more hosts" if len(free) > most else "")


def _shown(pool: PoolConfig) -> str:
    counts = requested_counts(pool)
    return str(counts[0]) if len(set(counts)) == 1 and counts else str(counts)
