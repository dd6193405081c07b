"""Rewards: named functions, the user's own, and the worker processes that run them."""

from spmd_rl.rewards.completion import Completion, Scored
from spmd_rl.rewards.functions import REWARDS
from spmd_rl.rewards.scorer import Scorer

__all__ = ["REWARDS", "Completion", "Scored", "Scorer"]
