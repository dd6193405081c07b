"""Which rank is sent which rows when a batch goes from one layout to another: pure, the same on every rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spmd_rl.topology.cluster import Pool
from spmd_rl.topology.layout import RoleLayout, split_rows


@dataclass(frozen=True)
class Route:
    """Two hops at most: from a row's holder to a rank that wants it, and from there to those that want the same."""

    arrive: dict[int, list[int]]
    """Job rank -> rows that their holders send it, in order."""
    want: dict[int, list[int]]
    """Job rank -> rows that it has in the end, in order."""
    peers: dict[int, tuple[int, ...]]
    """Job rank -> the ranks to which it hands on what has arrived; empty where everything comes from the holders."""

    def links(self, holder: Mapping[int, int], size: Mapping[int, int]) -> Counter[tuple[int, int]]:
        """Bytes over each (sending, receiving) pair of job ranks, given each row's holder and its bytes."""
        found: Counter[tuple[int, int]] = Counter()
        for rank, rows in self.arrive.items():
            for row in rows:
                found[holder[row], rank] += size[row]
            for peer in self.peers[rank]:
                found[rank, peer] += sum(size[row] for row in rows)
        return Counter({link: count for link, count in found.items() if link[0] != link[1] and count})


def route(parts: Sequence[Sequence[int]], target: RoleLayout, pool: Pool, fan_out: bool) -> Route:
    """Part d of the target's layout wants the rows `parts[d]`; with `fan_out` each of them arrives at one rank only."""
    want = {pool.ranks[r]: list(parts[target.dp_rank(r)]) for r in range(pool.size)}
    if not fan_out:
        return Route(want, want, dict.fromkeys(want, ()))
    arrive: dict[int, list[int]] = {}
    peers: dict[int, tuple[int, ...]] = {}
    for part, rows in enumerate(parts):
        replicas = [pool.ranks[int(r)] for r in (target.dp_ranks == part).nonzero()[0]]
        cuts = split_rows(len(rows), len(replicas))
        for place, rank in enumerate(replicas):
            arrive[rank] = list(rows[cuts[place] : cuts[place + 1]])
            peers[rank] = tuple(other for other in replicas if other != rank)
    return Route(arrive, want, peers)
