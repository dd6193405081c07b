"""A step's global batch as one rank of the actor's layout sees it: its own rows, and who works on the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from spmd_rl.data.balance import Assignment
from spmd_rl.data.batch import Batch


@dataclass
class Shard:
    """`batch` holds this dp rank's rows in `row_id` order; `assignment` speaks of all N rows of the step."""

    batch: Batch
    assignment: Assignment
    dp_rank: int
    lengths: list[int]
    """[N] prompt + response tokens of every row of the step."""
    uids: torch.Tensor
    """int64 [N]"""
    metrics: dict[str, float] = field(default_factory=dict)
    """What was measured while the rows were made; of all ranks."""

    @property
    def mini_batches(self) -> int:
        """How many there are, over all epochs."""
        return len(self.assignment.micro)

    def micro_batches(self, mini: int) -> list[list[int]]:
        """This rank's micro-batches of mini-batch `mini`, as places in `batch`."""
        return [self._places(rows) for rows in self.assignment.micro[mini][self.dp_rank]]

    def all_micro_batches(self) -> list[list[int]]:
        """Micro-batches that hold each of this rank's rows once; as many on every dp rank."""
        out, seen = [], set[int]()
        for mini in range(self.mini_batches):
            rows = self.assignment.micro[mini]
            owned = {i for ranks in rows for micro in ranks for i in micro}
            if not owned <= seen:
                out += self.micro_batches(mini)
                seen |= owned
        return out

    def mini_rows(self, mini: int) -> list[int]:
        """Places in `batch` of this rank's rows of mini-batch `mini`."""
        return [place for rows in self.micro_batches(mini) for place in rows]

    def _places(self, row_ids: Sequence[int]) -> list[int]:
        if not hasattr(self, "_place"):
            self._place = {int(r): i for i, r in enumerate(self.batch["row_id"].tolist())}
        return [self._place[r] for r in row_ids]
