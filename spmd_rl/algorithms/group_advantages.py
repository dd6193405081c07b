"""Scalar estimators: a row's score against those of its group.

Shapes: N rows; `scores` [N], `group` int64 [N] with values 0..G-1; all return [N] in the dtype of `scores`. Scores
have the unit of the reward. Group statistics are taken in float64, so that equal scores give exactly equal advantages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import group_count, group_max, group_mean_std, group_sum, masked_whiten


def grpo(scores: Tensor, group: Tensor, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Group relative: A = (s - mean_g) / (std_g + epsilon), std unbiased; a group of one keeps its score.

    Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1. Without the division it is Dr. GRPO: Liu et al.,
    Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    mean, std = group_mean_std(scores.double(), group)
    centred = scores.double() - mean
    return (centred / (std + epsilon) if norm_adv_by_std_in_grpo else centred).to(scores.dtype)


def grpo_vectorized(
    scores: Tensor, group: Tensor, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """`grpo` with the group's variance held at or above epsilon: A = (s - mean_g) / (sqrt(max(var_g, epsilon)) +
    epsilon).
    """
    mean, std = group_mean_std(scores.double(), group)
    centred = scores.double() - mean
    return (centred / (std.clamp(min=epsilon**0.5) + epsilon) if norm_adv_by_std_in_grpo else centred).to(scores.dtype)


def grpo_multi_trajectory(
    scores: Tensor,
    group: Tensor,
    trajectory: Tensor,
    turn: Tensor,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """`grpo` over trajectories that span several rows: A of a row = grpo's A of its trajectory.

    `trajectory` int64 [N] numbers the trajectories over the whole batch, `turn` int64 [N] orders the rows of one. A
    trajectory's score is that of its last row; all its rows get the trajectory's advantage.
    """
    number, member = torch.unique(trajectory, return_inverse=True)
    last_row = turn == group_max(turn, member)
    at = torch.zeros(len(number), dtype=torch.int64, device=scores.device)
    at[member[last_row]] = torch.nonzero(last_row)[:, 0]
    per_trajectory = grpo(scores[at], group[at], norm_adv_by_std_in_grpo, epsilon)
    return per_trajectory[member]


def grpo_passk(scores: Tensor, group: Tensor, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Pass@k: only the best reply of a group has an advantage, A = (s_best - s_second) / (std_g + epsilon).

    Tang et al., Optimizing Language Models for Inference Time Objectives using Reinforcement Learning, arXiv
    2503.19595. ValueError for a group of one, which has no second.
    """
    count = group_count(group)
    if bool((count < 2).any()):
        raise ValueError(f"grpo_passk needs at least 2 replies a prompt, group {int(group[count < 2][0])} has 1")
    exact = scores.double()
    best = group_max(exact, group)
    is_best = exact == best
    second = group_max(exact.masked_fill(is_best, -torch.inf), group)
    tied = group_sum(is_best.double(), group) > 1
    lead = torch.where(is_best & ~tied, best - second, 0.0)
    if norm_adv_by_std_in_grpo:
        lead = lead / (group_mean_std(exact, group)[1] + epsilon)
    return lead.to(scores.dtype)


def rloo(scores: Tensor, group: Tensor) -> Tensor:
    """Leave one out: A = s - mean of the group's others; a group of one keeps its score.

    Ahmadian et al., Back to Basics, arXiv 2402.14740.
    """
    count = group_count(group)
    others = (group_sum(scores.double(), group) - scores) / (count - 1).clamp(min=1)
    return torch.where(count > 1, scores - others, scores.double()).to(scores.dtype)


def rloo_vectorized(scores: Tensor, group: Tensor) -> Tensor:
    """`rloo`, but a group of one has no baseline and so no advantage: A = 0."""
    return torch.where(group_count(group) > 1, rloo(scores, group), torch.zeros_like(scores))


def reinforce_plus_plus_baseline(scores: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """REINFORCE++ with the group's mean as baseline, whitened over all tokens of the batch: A = whiten(s - mean_g).

    Hu, REINFORCE++, arXiv 2501.03262. `lengths` [N]: a row weighs as many tokens as it has. ValueError below 2 tokens.
    """
    mean, _ = group_mean_std(scores.double(), group)
    return masked_whiten(scores - mean, lengths.double()).to(scores.dtype)


def opo(scores: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """Length-weighted baseline: A = s - sum_g(length * s) / sum_g(length); a group of one keeps its score.

    Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
    """
    tokens = group_sum(lengths.double(), group)
    baseline = group_sum(lengths * scores.double(), group) / tokens.clamp(min=1)
    return torch.where(group_count(group) > 1, scores - baseline, scores.double()).to(scores.dtype)


def gpg(scores: Tensor, group: Tensor, f_norm: float = 1.0) -> Tensor:
    """A = alpha * (s - mean_g) / f_norm with alpha = N / (number of non-zero scores in the batch, at least 1).

    Chu et al., GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv 2504.02546.
    """
    mean, _ = group_mean_std(scores.double(), group)
    alpha = len(scores) / torch.count_nonzero(scores).clamp(min=1).double()
    return (alpha * (scores - mean) / f_norm).to(scores.dtype)


def gdpo(
    scores: Tensor,
    group: Tensor,
    lengths: Tensor,
    rewards: Tensor | None = None,
    weights: Sequence[float] | Tensor | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """Each reward function normalised in its group by itself, then summed and whitened over all tokens of the batch.

    A = whiten(sum_k weights_k * grpo(rewards_k)). Liu et al., GDPO: Group reward-Decoupled Normalization Policy
    Optimization, arXiv 2601.05242. `rewards` [N, K]; unset means the one column `scores`. `weights` of length K; unset
    or empty means all 1. ValueError when there are not K weights, or below 2 tokens.
    """
    columns = (scores[:, None] if rewards is None else rewards).double()
    given = weights is not None and len(weights) > 0
    share = torch.as_tensor(weights if given else [1.0] * columns.shape[1], dtype=torch.float64, device=scores.device)
    if len(share) != columns.shape[1]:
        raise ValueError(f"gdpo: {len(share)} weights for {columns.shape[1]} reward functions; give one weight each")
    parts = [grpo(column, group, norm_adv_by_std_in_grpo, epsilon) for column in columns.unbind(1)]
    summed = torch.stack(parts, 1) @ share
    return masked_whiten(summed, lengths.double()).to(scores.dtype)
