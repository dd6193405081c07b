"""Sums and means over masked tokens, rows and groups.

Shapes: N rows, L token places in the padded form; T tokens in the packed form, where `row` int64 [T] says whose token
it is. `group` int64 [N] numbers the prompts 0..G-1. A mask is 1 where a token counts, 0 elsewhere; what stands under a
0 is never read, not even when it is nan.
"""

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to token counts, so that an empty row has mean 0. The published figures carry it, hence it is here too."""


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where mask is 1, over all places or over one dim."""
    kept = torch.where(mask > 0, values, torch.zeros_like(values)) * mask
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where mask is 1; 0 where nothing counts."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / (count + EPSILON)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of `values` where mask is 1. ValueError when fewer than two places count."""
    count = mask.sum()
    if count <= 1:
        raise ValueError(f"a variance needs at least 2 tokens, the mask holds {int(count)}")
    return masked_mean((values - masked_mean(values, mask)).square(), mask) * count / (count - 1)


def masked_whiten(values: Tensor, weights: Tensor) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8), mean and variance over the weighted entries; same shape.

    `weights` is a mask, or, when one value stands for several tokens, how many tokens it stands for. ValueError when
    fewer than two tokens count, since they have no variance.
    """
    return (values - masked_mean(values, weights)) * torch.rsqrt(masked_var(values, weights) + EPSILON)


def row_sum(values_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Sum of each row's tokens: [rows]. A row without tokens sums to 0."""
    return values_T.new_zeros(rows).index_add(0, row_T, values_T)


def row_mean(values_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Mean over each row's counted tokens: [rows]; 0 for an empty row."""
    kept = torch.where(mask_T > 0, values_T, torch.zeros_like(values_T)) * mask_T
    return row_sum(kept, row_T, rows) / (row_sum(mask_T.to(values_T.dtype), row_T, rows) + EPSILON)


def row_of(lengths: Tensor) -> Tensor:
    """`row` [T] of a packed batch whose rows have these lengths [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def group_index(uid: Tensor) -> Tensor:
    """Number the prompts 0..G-1: int64 [N] from any integer uid [N]."""
    return torch.unique(uid, return_inverse=True)[1]


def group_count(group_N: Tensor) -> Tensor:
    """Rows in the group of each row: int64 [N]."""
    return torch.bincount(group_N)[group_N]


def group_sum(values: Tensor, group_N: Tensor) -> Tensor:
    """Sum over each row's group, for every row: same shape as `values` [N, ...]."""
    groups = int(group_N.max()) + 1 if len(group_N) else 0
    return values.new_zeros(groups, *values.shape[1:]).index_add(0, group_N, values)[group_N]


def group_max(values_N: Tensor, group_N: Tensor) -> Tensor:
    """Largest value of each row's group, for every row [N]."""
    groups = int(group_N.max()) + 1 if len(group_N) else 0
    lowest = values_N.new_full((groups,), _lowest(values_N.dtype))
    return lowest.scatter_reduce(0, group_N, values_N, reduce="amax")[group_N]


def group_mean_std(values_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each row's group, for every row: two tensors [N].

    A group of one has mean 0 and deviation 1, so that centring and scaling leave its value as it is.
    """
    count = group_count(group_N)
    mean = group_sum(values_N, group_N) / count
    variance = group_sum((values_N - mean).square(), group_N) / (count - 1).clamp(min=1)
    alone = count == 1
    return mean.masked_fill(alone, 0.0), variance.sqrt().masked_fill(alone, 1.0)


def _lowest(dtype: torch.dtype) -> float:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
