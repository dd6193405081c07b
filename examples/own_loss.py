"""A policy loss of one's own: PPO's clip made smooth.

    spmd-rl train experiment=tiny actor.policy_loss.loss_mode=examples/own_loss.py:soft_clip actor.clip_ratio=0.1

It gives the loss of each response token; aggregating it over micro-batches and ranks is not its business. Keyword
arguments are taken from the config: fields of actor.policy_loss, and actor.clip_ratio and its kin.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms import Metrics, TokenBatch


def soft_clip(batch: TokenBatch, *, clip_ratio: float = 0.2) -> tuple[Tensor, Metrics]:
    """-A · (1 + ε·tanh((r - 1)/ε)): near r = 1 the policy gradient, and no more than ε of change is rewarded."""
    ratio = (batch.log_prob - batch.old_log_prob).clamp(-20, 20).exp()
    gain = 1 + clip_ratio * torch.tanh((ratio - 1) / clip_ratio)
    return -batch.advantages * gain, {"actor/ratio": batch.mean_of(ratio)}
