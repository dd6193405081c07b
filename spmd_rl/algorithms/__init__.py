"""Pure tensor functions: advantages, policy losses, KL, aggregation, correction. See docs/algorithms.md.

No torch.distributed and no config object: what an algorithm must know of other ranks, the caller passes in.
"""

from spmd_rl.algorithms.advantages import ADVANTAGES, Estimator, advantage_estimator, spread
from spmd_rl.algorithms.aggregation import AGGREGATIONS, BatchTotals, aggregate
from spmd_rl.algorithms.correction import REJECTION_RULES, Correction, rollout_correction
from spmd_rl.algorithms.dapo import has_signal, overlong_penalty, refill
from spmd_rl.algorithms.distribution import entropy_from_logits, logprobs_from_logits, sum_pi_squared_from_logits
from spmd_rl.algorithms.finite import first_nonfinite
from spmd_rl.algorithms.kl import KL_ALIASES, KlController, kl_controller, kl_in_reward, kl_penalty
from spmd_rl.algorithms.masked import group_index, masked_mean, masked_whiten, row_of
from spmd_rl.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, policy_loss
from spmd_rl.algorithms.registry import resolve
from spmd_rl.algorithms.token_batch import Metrics, Statistics, TokenBatch
from spmd_rl.algorithms.value_loss import explained_variance, value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ALIASES",
    "POLICY_LOSSES",
    "REJECTION_RULES",
    "BatchTotals",
    "Correction",
    "Estimator",
    "KlController",
    "Metrics",
    "PolicyLoss",
    "Statistics",
    "TokenBatch",
    "advantage_estimator",
    "aggregate",
    "entropy_from_logits",
    "explained_variance",
    "first_nonfinite",
    "group_index",
    "has_signal",
    "kl_controller",
    "kl_in_reward",
    "kl_penalty",
    "logprobs_from_logits",
    "masked_mean",
    "masked_whiten",
    "overlong_penalty",
    "policy_loss",
    "refill",
    "resolve",
    "rollout_correction",
    "row_of",
    "spread",
    "sum_pi_squared_from_logits",
    "value_loss",
]
