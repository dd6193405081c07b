"""DAPO's dynamic sampling and over-long shaping. Clip-higher is `vanilla`'s clip_ratio_high, the token-level loss is
token-mean.

Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import group_count, group_max


def has_signal(metric: Tensor, group: Tensor) -> Tensor:
    """bool [N]: rows of groups whose `metric` [N] is not the same all over (equation 11), and groups of one.

    `group` int64 [N], 0..G-1. A group with equal scores has advantage 0 everywhere.
    """
    exact = metric.double()
    differs = group_max(exact, group) > -group_max(-exact, group)
    return differs | (group_count(group) == 1)


def refill(kept: int, wanted: int, rounds: int, max_rounds: int, exhausted: bool) -> str:
    """What to do after `rounds` rounds of generation that left `kept` groups with signal, of `wanted`:

    - "train": there are enough (the first `wanted` in prompt order are taken);
    - "sample": generate another round;
    - "stop": the data ran out, or max_rounds (0 = no bound) is reached: there will not be enough.
    """
    if kept >= wanted:
        return "train"
    bounded = 0 < max_rounds <= rounds
    return "stop" if exhausted or bounded else "sample"


def overlong_penalty(lengths: Tensor, max_response_length: int, buffer_len: int, penalty_factor: float = 1.0) -> Tensor:
    """Soft punishment [N], to be added to the score: 0 up to L_max - L_buffer tokens, then falling linearly to -factor
    at L_max (equation 13). `lengths` [N] in tokens. ValueError unless 0 < buffer_len <= max_response_length.
    """
    if not 0 < buffer_len <= max_response_length:
        raise ValueError(f"overlong_buffer_len={buffer_len} must be in 1..max_response_length={max_response_length}")
    exceeds = lengths.to(torch.float32) - (max_response_length - buffer_len)
    return (-exceeds / buffer_len * penalty_factor).clamp(max=0.0)
