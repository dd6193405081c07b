"""How long replies are expected to be: what prompts are dealt out to replicas by (`rollout.balance`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.order import Rows
from spmd_rl.data.prompts import Prompt
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import gather, with_columns
from spmd_rl.runtime.messages import read, whole
from spmd_rl.runtime.remote import Remote, here, on

FILE = "lengths.rows"
"""In a checkpoint."""


class Lengths:
    """Tokens and number of the earlier replies to each prompt of the data; the same on all ranks of the rollout.

    Knows nothing and asks nobody unless `rollout.balance=expected_length`.
    """

    def __init__(self, config: Config, runtime: Runtime, prompts: Rows[Prompt]) -> None:
        self.runtime, self.wanted = runtime, config.rollout.balance == "expected_length"
        names = [prompts.at(i).row.data_source for i in range(len(prompts))] if self.wanted else []
        self.source_P = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)[1]
        self.tokens_P = np.zeros(len(names), dtype=np.int64)
        self.replies_P = np.zeros(len(names), dtype=np.int64)

    def expected(self, uids: Sequence[int]) -> list[int] | None:
        """Tokens of a reply to each prompt, at least 1: the mean of those before it, of its data source's where it had
        none, of all where that had none. None where nobody wants to know."""
        if not self.wanted:
            return None
        at = np.asarray(uids, dtype=np.int64) % len(self.tokens_P)
        by_source = _means(np.bincount(self.source_P, self.tokens_P), np.bincount(self.source_P, self.replies_P))
        every = _means(self.tokens_P.sum(keepdims=True), self.replies_P.sum(keepdims=True))
        found = _means(self.tokens_P[at], self.replies_P[at])
        found = np.where(np.isnan(found), by_source[self.source_P[at]], found)
        found = np.where(np.isnan(found), every, found)
        return [max(1, int(n)) for n in np.nan_to_num(np.ceil(found), nan=1.0).tolist()]

    @on("rollout")
    def note(self, batch: Batch | Remote) -> None:
        """Remember a step's replies, of all ranks."""
        if not self.wanted:
            return
        mine = with_columns(here(batch), ["row_id", "uid"])
        mine["tokens"] = here(batch)["responses"].lengths
        every = gather(mine, ["uid", "tokens"], self.runtime.everyone)
        at = every["uid"].numpy() % len(self.tokens_P)
        np.add.at(self.tokens_P, at, every["tokens"].numpy())
        np.add.at(self.replies_P, at, 1)

    def files(self) -> dict[str, Tensor]:
        """A checkpoint's files of this rank: the rollout's first one writes what is known."""
        if not (self.wanted and self.runtime.plays("rollout") and self.runtime.pool_rank == 0):
            return {}
        (at,) = self.replies_P.nonzero()
        known = Batch.empty_like(len(at))
        for name, column in (("row_id", at), ("tokens", self.tokens_P[at]), ("replies", self.replies_P[at])):
            known[name] = torch.from_numpy(column)
        return {FILE: whole(known)}

    def load(self, folder: Path) -> None:
        """Take what a checkpoint knew; one that was saved without balancing knows nothing."""
        file = folder / FILE
        if self.wanted and file.is_file():
            known = read(torch.from_numpy(np.fromfile(file, dtype=np.uint8)))
            at = known["row_id"].numpy()
            self.tokens_P[at], self.replies_P[at] = known["tokens"].numpy(), known["replies"].numpy()


def _means(totals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """nan where nothing is counted."""
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
