"""Estimators that look at every token: returns, and advantages made of them.

Shapes: N rows, L token places, right-padded; all tensors [N, L] unless said otherwise. Rewards and values share one
unit.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import masked_whiten


def gae(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened over the batch: `(advantages, returns)`.

    delta_t = r_t + gamma * V_(t+1) - V_t;  A_t = delta_t + gamma * lam * A_(t+1);  returns = A + V before whitening.
    Schulman et al., High-Dimensional Continuous Control Using GAE, arXiv 1506.02438, equations 11 and 16. A token with
    mask 0 (a tool's output) is stepped over: the next counted token's value and advantage are carried across it.
    ValueError when fewer than 2 tokens count.
    """
    next_value = torch.zeros_like(values[:, 0])
    carried = torch.zeros_like(next_value)
    backwards = []
    for t in reversed(range(values.shape[1])):
        counts = response_mask[:, t] > 0
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(counts, delta + gamma * lam * carried, carried)
        next_value = torch.where(counts, values[:, t], next_value)
        backwards.append(carried)
    advantages = torch.stack(backwards[::-1], dim=1)
    return masked_whiten(advantages, response_mask), advantages + values


def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Discounted return of each token, whitened over the batch: `(advantages, returns)`.

    G_t = r_t + gamma * G_(t+1), starting anew before a token with mask 0;  A = whiten(G) * mask.
    Hu, REINFORCE++, arXiv 2501.03262. ValueError when fewer than 2 tokens count.
    """
    running = torch.zeros_like(token_level_rewards[:, 0])
    backwards = []
    for t in reversed(range(token_level_rewards.shape[1])):
        running = token_level_rewards[:, t] + gamma * running
        backwards.append(running)
        running = running * response_mask[:, t]
    returns = torch.stack(backwards[::-1], dim=1)
    return masked_whiten(returns, response_mask) * response_mask, returns


def remax(token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """Reward to go minus the greedy reply's score: `(advantages, returns)`.

    A_t = sum_(j>=t) r_j - b with `reward_baselines` b [N]. Li et al., ReMax, arXiv 2310.10505.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    return returns - reward_baselines[:, None] * response_mask, returns


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """sum_(j>=t) r_j * mask_j at each t: [N, L]."""
    return (token_level_rewards * response_mask).flip(-1).cumsum(-1).flip(-1)
