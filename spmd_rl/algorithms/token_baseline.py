"""Optimal token baseline: another baseline at each token, weighted by how much the path so far moves the gradient.

Li et al., The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL, arXiv 2602.07078.

Shapes: N rows, L token places, right-padded; all tensors [N, L] unless said otherwise; `group` int64 [N].
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import EPSILON, group_count, group_max, group_sum
from spmd_rl.algorithms.returns import reward_to_go


def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """`(advantages, returns)` with A_t = G_t - B_t, B_t = sum_g(G_t W_t) / sum_g(W_t), W_t = sum_(j<=t) w_j.

    w = 1 - 2 pi + sum_v pi_v^2, the squared norm of a token's score function in logit space, times rho^2 when truncated
    importance weights rho are in use. G is the reward to go. A group of one has no baseline. With `handle_zero_tail`
    the one longest reply of a group has none past the end of the second longest, where it would be compared with
    itself.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = _path_energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    baseline = _weighted_baseline(returns, energy * response_mask, group)
    alone = group_count(group) == 1
    hidden = alone[:, None] | (_tail(response_mask, group) if handle_zero_tail else torch.zeros_like(alone)[:, None])
    return (returns - baseline.masked_fill(hidden, 0.0)) * response_mask, returns


def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` for replies with tool output in them (mask 0): B_t = the baseline of the
    group's k-th own tokens, where t is row i's k-th.

    Rows without a counted token leave the group.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = _path_energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    own = response_mask > 0
    place = (own.long().cumsum(-1) - 1).clamp(min=0)
    packed_returns = torch.zeros_like(returns).scatter_add(1, place, torch.where(own, returns, 0.0))
    packed_energy = torch.zeros_like(energy).scatter_add(1, place, torch.where(own, energy, 0.0))
    baseline = _weighted_baseline(packed_returns, packed_energy, group)
    filled = own.any(-1)
    alone = group_sum(filled.double(), group) <= 1
    packed_mask = torch.arange(own.shape[1], device=own.device) < own.sum(-1, keepdim=True)
    tail = _tail(packed_mask.to(returns.dtype), group) if handle_zero_tail else torch.zeros_like(alone)[:, None]
    baseline = baseline.masked_fill(alone[:, None] | tail, 0.0).gather(1, place)
    return torch.where(own, returns - baseline, 0.0) * response_mask, returns


def _path_energy(
    response_mask: Tensor, old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None
) -> Tensor:
    """W_t = sum_(j<=t) of 1 - 2 pi_j + sum_v pi_v^2, over counted tokens."""
    energy = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.square()
    return (energy * response_mask).cumsum(-1)


def _weighted_baseline(returns: Tensor, energy: Tensor, group: Tensor) -> Tensor:
    """sum_g(G_t W_t) / (sum_g W_t + 1e-8) at every place."""
    return group_sum(returns * energy, group) / (group_sum(energy, group) + EPSILON)


def _tail(response_mask: Tensor, group: Tensor) -> Tensor:
    """True where a row is its group's one longest (by counted tokens) and the place is past the second longest's
    count.
    """
    tokens = response_mask.sum(-1).long()
    longest = tokens == group_max(tokens, group)
    only = longest & (group_sum(longest.long(), group) == 1)
    second = group_max(tokens.masked_fill(only, 0), group)
    place = torch.arange(response_mask.shape[1], device=group.device)
    return only[:, None] & (place[None] >= second[:, None])
