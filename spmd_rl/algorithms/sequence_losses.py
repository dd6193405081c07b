"""Policy losses with one ratio a sequence. Contract: `policy_loss`. Rows are whole, so nothing beyond the micro-batch
is needed; both fix their own aggregation.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import row_mean, row_sum
from spmd_rl.algorithms.token_batch import Metrics, TokenBatch
from spmd_rl.algorithms.token_losses import clip_metrics, clip_range, weighted


def gspo(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clip on the sequence's ratio s = (pi / pi_old)^(1/|o|): l = max(-s_t A, -clip(s_t, 1 - low, 1 + high) A).

    s_t = sg(s) pi_t / sg(pi_t) gives each token the sequence's value and its own gradient (GSPO-token); s <= exp(10).
    Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, equations 5, 7 and 14. Averaged a sequence, then
    over sequences.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = batch.log_prob - batch.old_log_prob
    lengths = row_sum(batch.response_mask.to(log_ratio.dtype), batch.row, batch.rows).clamp(min=1)
    of_row = row_sum(log_ratio.detach() * batch.response_mask, batch.row, batch.rows) / lengths
    ratio = (batch.log_prob - batch.log_prob.detach() + of_row[batch.row]).clamp(max=10.0).exp()
    plain = -batch.advantages * ratio
    clipped = -batch.advantages * ratio.clamp(1 - low, 1 + high)
    never = torch.zeros_like(log_ratio, dtype=torch.bool)
    metrics = clip_metrics(batch, log_ratio, clipped > plain, never)
    return weighted(torch.maximum(plain, clipped), batch), metrics


def geo_mean(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """GMPO: l_i = -A_i exp(mean_t of the clipped log-ratios of row i), A_i the row's mean advantage; the mean over
    rows.

    A token's log-ratio is clipped to [-low, high] on the side that its advantage pushes to; the epsilons are in log
    space. Importance weights of the rollout correction enter as their geometric mean. Zhao et al., Geometric-Mean
    Policy Optimization, arXiv 2507.20673. Each token carries l_i / |o_i|, so that a row sums to l_i; the
    mean is over rows with tokens.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = batch.log_prob - batch.old_log_prob
    bounded = log_ratio.clamp(-low, high)
    sign = batch.advantages.sign()
    worse = sign * torch.minimum(sign * log_ratio, sign * bounded)
    mask, row, rows = batch.response_mask, batch.row, batch.rows
    loss_R = -row_mean(batch.advantages, mask, row, rows) * row_mean(worse, mask, row, rows).exp()
    if batch.rollout_is_weights is not None:
        loss_R = loss_R * row_mean((batch.rollout_is_weights + 1e-10).log(), mask, row, rows).exp()
    lengths = row_sum(mask.to(loss_R.dtype), row, rows).clamp(min=1)
    moved = log_ratio != bounded
    metrics = clip_metrics(batch, log_ratio, moved & (sign > 0), moved & (sign < 0))
    return (loss_R / lengths)[row], metrics
