"""What a policy loss sees and gives: the packed tokens of some rows, per-token losses, metrics that add up.

Shapes: T response tokens of R rows, packed row after row; `row` int64 [T] says whose token it is. Log-probs in nats.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import masked_sum

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, weight), detached scalars. Summed over micro-batches and ranks, sum / weight is the metric of the
whole.
"""


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of R rows. A row is never divided between two TokenBatches."""

    log_prob: Tensor
    """[T] of the policy that is trained; carries the gradient."""
    old_log_prob: Tensor
    """[T] of the policy that the ratio is taken against (in bypass mode: the one that sampled)."""
    advantages: Tensor
    """[T]"""
    response_mask: Tensor
    """[T], 1 where the token counts."""
    row: Tensor
    """int64 [T], 0..rows-1, never falling."""
    rows: int
    """R, rows without any token included."""
    rollout_is_weights: Tensor | None = None
    """[T] importance weights of the rollout correction, without gradient."""
    selected: Tensor | None = None
    """bool [T], what a loss's `statistics` picked (clip_cov, kl_cov)."""
    uid: Tensor | None = None
    """int64 [R]: the prompt. Only `statistics` reads it and the next."""
    sample: Tensor | None = None
    """int64 [R]: which of the prompt's samples."""

    @classmethod
    def from_padded(cls, *, response_mask: Tensor, **columns: Tensor | None) -> "TokenBatch":
        """From [R, L] tensors, `uid` and `sample` [R]: every place becomes a token, padding one with mask 0."""
        rows, length = response_mask.shape
        row = torch.arange(rows, device=response_mask.device).repeat_interleave(length)
        packed: Any = {name: None if c is None else c.flatten() for name, c in columns.items()}
        return cls(response_mask=response_mask.flatten(), row=row, rows=rows, **packed)

    def with_columns(self, **columns: Tensor | None) -> "TokenBatch":
        """A copy with some columns put in, e.g. what `statistics` returned for these tokens."""
        return replace(self, **columns)  # type: ignore[arg-type]

    def masked(self) -> "TokenBatch":
        """A copy with 0 in place of whatever stands at tokens with mask 0 (even nan), so that nothing comes of it."""
        keep = self.response_mask > 0
        names = ("log_prob", "old_log_prob", "advantages", "rollout_is_weights")
        columns = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return self.with_columns(**{n: torch.where(keep, c, torch.zeros_like(c)) for n, c in columns.items()})

    def mean_of(self, values_T: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, weight) of a token mean."""
        return masked_sum(values_T.detach(), self.response_mask), self.response_mask.sum().to(values_T.dtype)


@dataclass(frozen=True)
class Statistics:
    """What a loss has to know of the whole mini-batch before its first micro-batch."""

    columns: dict[str, Tensor]
    """Columns [T] of the whole mini-batch in the order given, named as in TokenBatch: each micro-batch takes its
    tokens'.
    """
    metrics: dict[str, float]
    """Of the whole mini-batch; the same on every rank."""


LossFunction = Callable[..., tuple[Tensor, Metrics]]
"""(batch: TokenBatch, **settings) -> (loss of each token [T], metrics)."""
