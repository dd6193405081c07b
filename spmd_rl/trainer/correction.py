"""Rollout correction over the whole step's batch: importance weights and rejection, the same on every rank.

In bypass mode it is the loss that corrects, against the policy of the moment: see algorithms/bypass_loss.py.
"""

from spmd_rl.algorithms.correction import rollout_correction
from spmd_rl.algorithms.masked import row_of
from spmd_rl.algorithms.signature import offered
from spmd_rl.config import Config
from spmd_rl.config.run import RolloutCorrectionConfig
from spmd_rl.data.batch import Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.roles.model import ModelRole
from spmd_rl.runtime.exchange import gather


def bypasses(config: Config) -> bool:
    """Whether the sampler's log-probs stand for the old ones."""
    return config.algorithm.rollout_correction.bypass_mode or config.actor.policy_loss.loss_mode == "bypass_mode"


def correction_of(config: Config) -> RolloutCorrectionConfig:
    """The settings under the run's schedule."""
    return config.algorithm.rollout_correction.under(config.trainer.schedule, config.rollout.partial)


def corrects(config: Config) -> bool:
    """Whether weights or rejection are to be made here, from the old log-probs."""
    correction = correction_of(config)
    return not bypasses(config) and bool(correction.rollout_is or correction.rollout_rs)


def add_correction(shard: Shard, config: Config, actor: ModelRole) -> dict[str, float]:
    """Write `rollout_is_weights`, take rejected tokens out of `response_mask`; gives `rollout_corr/*` of all ranks."""
    if not corrects(config):
        return {}
    batch = shard.batch
    whole = gather(batch, ["old_log_probs", "rollout_log_probs", "response_mask"], actor.dp_group)
    mask: Ragged = whole["response_mask"]
    found = rollout_correction(
        whole["old_log_probs"].values,
        whole["rollout_log_probs"].values,
        mask.values,
        row_of(mask.lengths),
        len(whole),
        **offered(rollout_correction, vars(correction_of(config))),
    )
    rows = batch["row_id"]  # the whole batch is in row_id order, and row ids are 0..N-1
    batch["response_mask"] = Ragged(found.response_mask, mask.lengths).select(rows)
    if found.weights is not None:
        batch["rollout_is_weights"] = Ragged(found.weights, mask.lengths).select(rows)
    return found.metrics
