"""The learning rate as a pure function of the optimizer step."""

import math

from spmd_rl.config.roles import OptimConfig


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`: linear warm-up, then constant or cosine to min_lr_ratio.

    Cosine: Loshchilov and Hutter 2016, "SGDR", arXiv:1608.03983, eq. 5 with one period.
    """
    warmup = config.warmup_steps or int(config.warmup_ratio * total)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))
