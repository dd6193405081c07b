"""Who sends what to whom between layouts: batches (exchange) and weights (weight sync).

Edges are symbolic; `sources` makes one concrete for one rank, so 100,000 ranks cost nothing until they are asked about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_rl.config import Config
from spmd_rl.topology.cluster import Pool
from spmd_rl.topology.layout import Layout, RoleLayout, split_rows
from spmd_rl.topology.routes import Route, route


@dataclass(frozen=True)
class ExchangeEdge:
    """Columns of a batch move from one role's collecting ranks to all ranks of another role."""

    what: str
    source: RoleLayout
    target: RoleLayout
    pools: tuple[Pool, Pool]

    @property
    def crosses(self) -> bool:
        """Whether it goes from one pool to another."""
        return self.source.pool != self.target.pool

    def route(self, parts: Sequence[Sequence[int]]) -> Route:
        """How rows travel when part d of the target's layout wants `parts[d]`, in that order.

        Inside a pool every rank gets its rows from their holders. From another pool each row comes once for a part, to
        one of the ranks that hold it (evenly dealt out among them), which hands it on to the others inside the pool.
        """
        return route(parts, self.target, self.pools[1], fan_out=self.crosses)

    def sources(self, job_rank: int, rows: int) -> list[tuple[int, int, int]]:
        """(sending job rank, first row, end row) of a batch of `rows` rows for one target rank, in row order."""
        part = self.target.dp_rank(self.pools[1].pool_rank(job_rank))
        first, end = split_rows(rows, self.target.dp_size)[part : part + 2]
        offsets = split_rows(rows, self.source.dp_size)
        senders = self.pools[0].array[self.source.collectors]
        touched = np.flatnonzero((offsets[:-1] < end) & (offsets[1:] > first))
        return [(int(senders[i]), int(max(offsets[i], first)), int(min(offsets[i + 1], end))) for i in touched]


@dataclass(frozen=True)
class SyncEdge:
    """The actor's weights reach the rollout engine."""

    source: RoleLayout
    target: RoleLayout
    pools: tuple[Pool, Pool]

    def sources(self, job_rank: int) -> list[tuple[int, float]]:
        """(sending job rank, share of the weights it holds) whose shards together make up one target rank's weights.

        On one pool they are the rank's own copy of the model (its fsdp, or tp and pp, process group); from another pool
        they are the first copy there.
        """
        axes = ("fsdp",) if self.source.engine == "fsdp" else ("pp", "tp")
        return self._holders(self.source.mesh, job_rank, axes)

    def expert_sources(self, job_rank: int) -> list[tuple[int, float]]:
        """The same for routed experts, which Megatron cuts along etp, ep and pp; empty without expert parallelism."""
        expert = self.source.expert
        if expert is None or expert.axis_size("ep") == 1:
            return []
        return self._holders(expert, job_rank, ("pp", "ep", "etp"))

    def slice_of(self, job_rank: int) -> str:
        """Which part of every tensor the rank keeps."""
        coords, mesh = self.target.mesh.coords(self.pools[1].pool_rank(job_rank)), self.target.mesh
        tp, pp = mesh.axis_size("infer_tp"), mesh.axis_size("infer_pp")
        parts = [f"slice {coords['infer_tp'] + 1} of {tp} of each matrix"] if tp > 1 else []
        parts += [f"layers of stage {coords['infer_pp'] + 1} of {pp}"] if pp > 1 else []
        return ", ".join(parts) or "all weights"

    def _holders(self, layout: Layout, job_rank: int, axes: tuple[str, ...]) -> list[tuple[int, float]]:
        at = self.pools[1].pool_rank(job_rank) if self.source.pool == self.target.pool else 0
        holders = layout.group_of(at, *axes)
        return [(int(self.pools[0].array[rank]), 1 / len(holders)) for rank in holders]


def exchange_edges(config: Config, pools: dict[str, Pool], roles: dict[str, RoleLayout]) -> list[ExchangeEdge]:
    """The exchanges of a step in program order: replies are scored, go to the actor's pool, which is the batch's home,
    and from there out to other roles and back."""
    found = []

    def there_and_back(home: str, what: str, role: str, column: str) -> None:
        found.append(exchange_edge(what, roles[home], roles[role], pools))
        found.append(exchange_edge(column, roles[role], roles[home], pools))

    if "reward" in roles:
        there_and_back("rollout", "replies", "reward", "scores")
    if "rollout" in roles:
        found.append(exchange_edge("replies", roles["rollout"], roles["actor"], pools))
    for role, column in {"ref": "ref log-probs", "teacher": "teacher log-probs", "critic": "values"}.items():
        if role in roles:
            there_and_back("actor", "tokens", role, column)
    return [e for e in found if _folds_differ(e.source, e.target)]


def exchange_edge(what: str, source: RoleLayout, target: RoleLayout, pools: dict[str, Pool]) -> ExchangeEdge:
    """The edge from one role's layout to another's."""
    return ExchangeEdge(what, source, target, (pools[source.pool], pools[target.pool]))


def sync_edge(pools: dict[str, Pool], roles: dict[str, RoleLayout]) -> SyncEdge | None:
    """The weight sync; None without a rollout."""
    if "rollout" not in roles:
        return None
    actor, rollout = roles["actor"], roles["rollout"]
    return SyncEdge(actor, rollout, (pools[actor.pool], pools[rollout.pool]))


def _folds_differ(one: RoleLayout, other: RoleLayout) -> bool:
    """Whether rows really move: another pool, or other rows on some rank."""
    same: Layout = one.batch
    return one.pool != other.pool or (same != other.batch and not np.array_equal(one.dp_ranks, other.dp_ranks))
