"""NaN and inf are caught where they appear, before they reach a weight."""

from collections.abc import Sequence

import torch

from spmd_rl.algorithms.finite import first_nonfinite
from spmd_rl.algorithms.masked import row_of
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.runtime.bootstrap import Runtime


class NonFinite(RuntimeError):
    """A column of the batch holds nan or inf; says which, on which rank, for which prompt."""


def check_columns(batch: Batch, names: Sequence[str], runtime: Runtime) -> None:
    """Raise NonFinite for the first nan or inf among the columns that are there. What the mask hides is not looked at."""
    for name in names:
        if name not in batch:
            continue
        column = batch[name]
        message = _ragged(name, column, batch) if isinstance(column, Ragged) else first_nonfinite(name, column, batch["uid"])
        if message:
            raise NonFinite(f"pool {runtime.pool.name}, rank {runtime.env.rank}: {message}; no weight was changed")


def _ragged(name: str, column: Ragged, batch: Batch) -> str | None:
    counted = batch["response_mask"].values > 0
    values = torch.where(counted, column.values, torch.zeros_like(column.values))
    return first_nonfinite(name, values, batch["uid"], row_of(column.lengths))
