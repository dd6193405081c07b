"""Bypass mode: `old_log_prob` is the sampling engine's own, and the correction is made against the policy of the
moment.

Contract: `policy_loss`. Rejection changes the mask and batch normalisation the weights, both over the whole mini-batch,
hence `bypass_statistics`.
"""

from torch import Tensor

from spmd_rl.algorithms.correction import rollout_correction
from spmd_rl.algorithms.token_batch import Metrics, Statistics, TokenBatch
from spmd_rl.algorithms.token_losses import reinforce, vanilla

LOSS_TYPES = ("ppo_clip", "reinforce")
"""What bypass_mode may stand for."""


def bypass_wants_statistics(
    *, loss_type: str = "ppo_clip", rollout_is: str | None = None, rollout_rs: str | None = None
) -> bool:
    """Only rejection, or weights that the loss uses, need the extra forward."""
    return rollout_rs is not None or (loss_type == "reinforce" and rollout_is is not None)


def bypass_statistics(
    batch: TokenBatch,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Statistics:
    """`response_mask` after rejection, `rollout_is_weights` when asked for, and the mismatch metrics."""
    result = rollout_correction(
        batch.log_prob,
        batch.old_log_prob,
        batch.response_mask,
        batch.row,
        batch.rows,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    columns = {"response_mask": result.response_mask}
    if result.weights is not None:
        columns["rollout_is_weights"] = result.weights
    return Statistics(columns, result.metrics)


def bypass_mode(
    batch: TokenBatch,
    *,
    loss_type: str = "ppo_clip",
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, Metrics]:
    """`ppo_clip`: `vanilla` without weights, since its ratio is against the sampling policy already. `reinforce`: l =
    -w A log pi.

    ValueError for another loss_type.
    """
    if loss_type == "reinforce":
        return reinforce(batch)
    if loss_type == "ppo_clip":
        return vanilla(
            batch.with_columns(rollout_is_weights=None),
            clip_ratio=clip_ratio,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            clip_ratio_c=clip_ratio_c,
        )
    raise ValueError(f"unknown loss_type '{loss_type}'; use one of {', '.join(LOSS_TYPES)}")
