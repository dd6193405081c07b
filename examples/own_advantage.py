"""An advantage estimator of one's own: only a group's best reply is learnt from.

    spmd-rl train experiment=tiny algorithm.adv_estimator=examples/own_advantage.py:best_of_group

A function that names `scores` gives one advantage a row; one that names `token_level_rewards` gives one a token. See
docs/algorithms.md for the columns that it may name.
"""

import torch
from torch import Tensor


def best_of_group(scores: Tensor, group: Tensor) -> Tensor:
    """How far the best reply is above its group's mean; 0 for the others. `scores` [N], `group` int64 [N] -> [N]."""
    groups = int(group.max()) + 1
    best = torch.full((groups,), -torch.inf).scatter_reduce_(0, group, scores, "amax")
    mean = torch.zeros(groups).index_add_(0, group, scores) / torch.bincount(group)
    return torch.where(scores == best[group], scores - mean[group], torch.zeros_like(scores))
