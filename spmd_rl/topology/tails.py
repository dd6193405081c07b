"""How a step's sampling may end before every reply has (docs/tails.md): what asks for it, what contradicts itself."""

import math
from fractions import Fraction

from spmd_rl.config import Config
from spmd_rl.config.roles import RolloutConfig


def in_flight(config: Config) -> int:
    """Groups that are under way at the start of a step, carried ones among them."""
    return math.ceil(config.data.train_batch_size * Fraction(str(config.rollout.over_sampling)))  # 10 × 1.1 is 11


def has_limit(rollout: RolloutConfig) -> bool:
    """Whether a step's sampling may end with replies that are not done."""
    return rollout.over_sampling > 1 or rollout.max_new_tokens_per_step > 0 or rollout.time_limit_s > 0


def continues(rollout: RolloutConfig) -> bool:
    """Whether replies are drawn in pieces."""
    return rollout.segment_tokens > 0 or rollout.max_new_tokens_per_step > 0


def in_rounds(rollout: RolloutConfig) -> bool:
    """Whether a step's groups are sampled in rounds and chosen from."""
    return continues(rollout) or rollout.truncated == "drop_group"


def tail_mistakes(config: Config) -> list[str]:
    """All of them."""
    r, filtering = config.rollout, config.algorithm.filter_groups.enable
    mistakes = []
    for name, value, off in (("over_sampling", r.over_sampling, 1), ("time_limit_s", r.time_limit_s, 0)):
        if value > off and not r.segment_tokens:
            mistakes.append(
                f"rollout.{name}={value:g} stops between rounds, but rollout.segment_tokens=0 makes one round of the "
                f"whole; set rollout.segment_tokens={max(1, config.data.max_response_length // 8)} or so"
            )
    if r.partial and not has_limit(r):
        mistakes.append(
            "rollout.partial=true, but nothing ends a step before its replies: set rollout.over_sampling above 1, "
            "rollout.max_new_tokens_per_step or rollout.time_limit_s"
        )
    if r.partial and not r.calculate_log_probs:
        mistakes.append(
            "rollout.partial=true needs the log-probs that tokens were drawn with; set rollout.calculate_log_probs=true"
        )
    if r.ignore_eos and r.truncated != "keep":
        mistakes.append(
            f"rollout.truncated={r.truncated} leaves nothing to train on: with rollout.ignore_eos=true every reply is "
            "truncated"
        )
    if in_rounds(r) and config.algorithm.adv_estimator == "remax":  # of your own: found when it is loaded
        mistakes.append(
            "algorithm.adv_estimator=remax needs a greedy reply beside each sampled one; with "
            f"rollout.{_first_of(r)} it is not supported: switch one of them off"
        )
    if in_rounds(r) and filtering:
        mistakes.append(
            f"algorithm.filter_groups.enable=true samples whole replies until enough groups have a signal; with "
            f"rollout.{_first_of(r)} it is not supported: switch one of them off"
        )
    return mistakes


def tail_warnings(config: Config) -> list[str]:
    """What can run but is not what it seems."""
    r, t = config.rollout, config.trainer
    correction = config.algorithm.rollout_correction.under(t.schedule, r.partial)
    warnings = []
    bypasses = correction.bypass_mode or config.actor.policy_loss.loss_mode == "bypass_mode"
    if r.partial and not (correction.rollout_is or correction.rollout_rs or bypasses):
        warnings.append(
            "rollout.partial=true continues replies under newer weights, and algorithm.rollout_correction is off: "
            "tokens drawn under older ones count as the actor's own; set algorithm.rollout_correction.rollout_is=auto"
        )
    if r.time_limit_s:
        warnings.append(
            f"rollout.time_limit_s={r.time_limit_s:g}: the clock decides which replies a step trains on, so another "
            "run or world size gives other results (rollout/rounds says what it decided)"
        )
    return warnings


def _first_of(r: RolloutConfig) -> str:
    """The setting that asks for rounds, as a user wrote it."""
    for name in ("segment_tokens", "max_new_tokens_per_step"):
        if value := getattr(r, name):
            return f"{name}={value}"
    return f"truncated={r.truncated}"
