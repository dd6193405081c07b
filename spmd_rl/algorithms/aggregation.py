"""From per-token losses to one number, normalised over the whole mini-batch.

Shapes: T packed response tokens of R rows; `row` int64 [T]. A micro-batch divides by the counts of the *whole*
mini-batch over all ranks (`BatchTotals`), so the numbers of all micro-batches and ranks simply add up, and any split
gives the same loss and the same gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import EPSILON, row_sum

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""The modes of `aggregate`."""


@dataclass(frozen=True)
class BatchTotals:
    """What a whole mini-batch holds, over all ranks and micro-batches. Two of them add up."""

    tokens: float
    """Counted tokens: the sum of the mask, after rejection."""
    sequences: float
    """Rows with at least one counted token: empty, rejected and padding rows are not among them."""

    @classmethod
    def of(cls, mask_T: Tensor, row_T: Tensor, rows: int) -> "BatchTotals":
        """Count one part of the mini-batch: mask [T], row [T], number of rows."""
        per_row = row_sum(mask_T.double(), row_T, rows)
        return cls(float(per_row.sum()), float((per_row > 0).sum()))

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        return BatchTotals(self.tokens + other.tokens, self.sequences + other.sequences)

    def tensor(self) -> Tensor:
        """float64 [2], to be summed over ranks; `BatchTotals(*t.tolist())` turns it back."""
        return torch.tensor([self.tokens, self.sequences], dtype=torch.float64)


def aggregate(
    loss_T: Tensor,
    mask_T: Tensor,
    row_T: Tensor,
    rows: int,
    mode: str,
    totals: BatchTotals,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This part's share of the mini-batch's loss, a scalar; the shares of all parts sum to the loss.

    With l_it the loss of token t of row i, |o_i| the counted tokens of row i, and totals N_tok, N_seq:

    - token-mean: sum_it l_it / N_tok (DAPO, arXiv 2503.14476, equation 12)
    - token-sum: sum_it l_it
    - seq-mean-token-sum: sum_i sum_t l_it / N_seq
    - seq-mean-token-mean: sum_i (sum_t l_it / |o_i|) / N_seq (GRPO, arXiv 2402.03300, equation 3)
    - seq-mean-token-sum-norm: as seq-mean-token-sum, divided by `loss_scale_factor`, a constant such as the longest
      reply allowed (Dr. GRPO, arXiv 2503.20783)

    ValueError for another mode, or when the last one has no `loss_scale_factor`.
    """
    loss_T = torch.where(mask_T > 0, loss_T, torch.zeros_like(loss_T)) * mask_T
    if mode == "token-sum":
        return loss_T.sum()
    if mode == "token-mean":
        return loss_T.sum() / max(totals.tokens, 1)
    sequences = max(totals.sequences, 1)
    if mode == "seq-mean-token-sum":
        return loss_T.sum() / sequences
    if mode == "seq-mean-token-mean":
        per_row = row_sum(mask_T.to(loss_T.dtype), row_T, rows) + EPSILON
        return (row_sum(loss_T, row_T, rows) / per_row).sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        if not loss_scale_factor:
            raise ValueError("seq-mean-token-sum-norm needs loss_scale_factor, e.g. the longest reply allowed")
        return loss_T.sum() / sequences / loss_scale_factor
    raise ValueError(f"unknown loss_agg_mode '{mode}'; use one of {', '.join(AGGREGATIONS)}")
