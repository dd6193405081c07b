"""NaN and inf are caught where they appear, before they reach a weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.algorithms.finite import first_nonfinite
from spmd_rl.algorithms.masked import row_of
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.runtime.bootstrap import Runtime


class NonFinite(RuntimeError):
    """A column of the batch holds nan or inf; says in which phase, on which rank, for which prompt."""


class Guard:
    """Raises NonFinite for the first nan or inf that this rank sees. What the mask hides is not looked at."""

    def __init__(self, runtime: Runtime, phase: str) -> None:
        self.place = f"phase {phase}, pool {runtime.pool.name}, rank {runtime.env.rank}"

    def check(self, batch: Batch, names: Sequence[str]) -> None:
        """Look through those of the columns `names` that are there."""
        for name in names:
            if name not in batch:
                continue
            column = batch[name]
            if isinstance(column, Ragged):
                self.check_tokens(name, column.values, batch)
            else:
                self._refuse(first_nonfinite(name, column, batch["uid"]))

    def check_tokens(self, name: str, values_T: Tensor, batch: Batch) -> None:
        """Look through a value for each response token of the batch."""
        mask: Ragged = batch["response_mask"]
        values_T = values_T.detach()
        if bool(torch.isfinite(values_T).all()):
            return
        values_T = values_T.cpu()
        counted = torch.where(mask.values > 0, values_T, torch.zeros_like(values_T))
        self._refuse(first_nonfinite(name, counted, batch["uid"], row_of(mask.lengths)))

    def _refuse(self, message: str | None) -> None:
        if message is not None:
            raise NonFinite(f"{self.place}: {message}; no weight was changed by it")
