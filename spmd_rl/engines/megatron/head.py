"""The head over a vocabulary that is cut over tp ranks: log-probs, entropy, sum of squared probabilities, no gathering.

As in `models.logprobs`, logits exist for one chunk of tokens and are computed again in the backward. A chunk costs two
all-reduces of one (then up to four) numbers a token in the forward, and none in the backward. megatron-core's own
`vocab_parallel_cross_entropy` overwrites float32 logits, knows no entropy and finds its group in a global.

Shapes: R tokens, C of a chunk, H hidden size, W = vocabulary / tp of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from spmd_rl.models.logprobs import TokenStats, token_logprobs


def parallel_logprobs(
    hidden_RH: Tensor,
    weight_WH: Tensor,
    targets_R: Tensor,
    group: ProcessGroup,
    temperature: float = 1.0,
    *,
    chunk: int = 1024,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenStats:
    """`token_logprobs` of the whole vocabulary, equal on every rank of `group`; rank r holds entries r·W..(r+1)·W.

    The gradient of `hidden_RH` is this rank's share, to be summed over the group; that of the weight is complete.
    """
    if group.size() == 1:
        return token_logprobs(
            hidden_RH, weight_WH, targets_R, temperature, chunk=chunk, entropy=entropy, sum_pi_squared=sum_pi_squared
        )
    logprobs, entropies, squares = _ParallelHead.apply(
        hidden_RH, weight_WH, targets_R, group, float(temperature), chunk
    )
    return TokenStats(logprobs, entropies if entropy else None, squares if sum_pi_squared else None)


class _ParallelHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_WH: Tensor,
        targets_R: Tensor,
        group: ProcessGroup,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            _chunk_stats(hidden_RH[part], weight_WH, targets_R[part], group, temperature)
            for part in _chunks(len(hidden_RH), chunk)
        ]
        empty = hidden_RH.new_empty(4, 0, dtype=torch.float32)
        lse_R, logprobs_R, entropy_R, squares_R = torch.cat([empty, *found], 1)
        ctx.save_for_backward(hidden_RH, weight_WH, targets_R, lse_R, entropy_R, squares_R)
        ctx.group, ctx.temperature, ctx.chunk = group, temperature, chunk
        return logprobs_R, entropy_R, squares_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_WH, targets_R, lse_R, entropy_R, squares_R = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden_RH)
        d_weight = torch.zeros_like(weight_WH, dtype=torch.float32)
        columns = (targets_R, lse_R, entropy_R, squares_R, *grads)
        for part in _chunks(len(hidden_RH), ctx.chunk):
            logits_CW = hidden_RH[part] @ weight_WH.T
            d_CW = _chunk_gradient(logits_CW, ctx.group.rank(), ctx.temperature, *(c[part] for c in columns))
            d_CW = d_CW.to(weight_WH.dtype)
            d_hidden[part] = d_CW @ weight_WH
            d_weight += d_CW.T @ hidden_RH[part]
        return d_hidden, d_weight.to(weight_WH.dtype), None, None, None, None


def _chunk_stats(hidden_CH: Tensor, weight_WH: Tensor, targets_C: Tensor, group: ProcessGroup, t: float) -> Tensor:
    """(logsumexp, log-prob of the target, entropy, sum of p^2) of softmax(logits / t), float32 [4, C]."""
    z_CW = (hidden_CH @ weight_WH.T).float().div_(t)
    most_C = z_CW.amax(-1)
    dist.all_reduce(most_C, op=ReduceOp.MAX, group=group)
    z_CW -= most_C[:, None]
    inside_C, at_C = _own_targets(targets_C, z_CW.shape[-1], group.rank())
    target_C = torch.where(inside_C, z_CW.gather(-1, at_C[:, None])[:, 0], 0.0)
    e_CW = z_CW.exp()
    sums = torch.stack([e_CW.sum(-1), torch.linalg.vecdot(e_CW, z_CW), torch.linalg.vecdot(e_CW, e_CW), target_C])
    dist.all_reduce(sums, group=group)
    total_C, weighted_C, squared_C, target_C = sums
    log_total_C = total_C.log()
    return torch.stack(
        [log_total_C + most_C, target_C - log_total_C, log_total_C - weighted_C / total_C, squared_C / total_C**2]
    )


def _chunk_gradient(
    logits_CW: Tensor,
    rank: int,
    temperature: float,
    targets_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    squares_C: Tensor,
    of_logprob_C: Tensor,
    of_entropy_C: Tensor,
    of_squares_C: Tensor,
) -> Tensor:
    """With respect to this rank's logits; the formulas are those of `models.logprobs`."""
    logp_CW = logits_CW.float().div_(temperature).sub_(lse_C[:, None])
    p_CW = logp_CW.exp()
    factor_CW = (logp_CW + entropy_C[:, None]) * -of_entropy_C[:, None]
    factor_CW += (p_CW - squares_C[:, None]) * (2 * of_squares_C[:, None])
    d_CW = p_CW.mul_(factor_CW - of_logprob_C[:, None])
    inside_C, at_C = _own_targets(targets_C, d_CW.shape[-1], rank)
    d_CW.scatter_add_(1, at_C[:, None], torch.where(inside_C, of_logprob_C, 0.0)[:, None])
    return d_CW.div_(temperature)


def _own_targets(targets_C: Tensor, width: int, rank: int) -> tuple[Tensor, Tensor]:
    """(whether this rank holds the target's logit, its place among this rank's, 0 if not)."""
    at_C = targets_C - rank * width
    inside_C = (at_C >= 0) & (at_C < width)
    return inside_C, torch.where(inside_C, at_C, 0)


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
