"""On-policy distillation in the step: which columns the teacher makes, and what becomes of them."""

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.observe.metrics import Partial, mean


def teacher_columns(config: Config) -> dict[str, str]:
    """What the teacher's model makes -> its name in the batch."""
    if config.teacher.top_k:
        return {"top_ids": "teacher_ids", "top_log_probs": "teacher_top_log_probs"}
    return {"log_probs": "teacher_log_probs"}


def distils_tokens(config: Config) -> bool:
    """Whether the sampled tokens' log-probs are compared, for which the actor's own are needed before the update."""
    return config.teacher.enable and config.teacher.top_k == 0


def distil(batch: Batch, config: Config) -> Partial:
    """Weigh the rewards' advantages, and take the sampled tokens' reverse KL, log student - log teacher, off them.

    The gradient of -A log student is then that of the KL on the student's own samples. Gives `actor/teacher_kl`.
    """
    teacher = config.teacher
    if not teacher.enable:
        return {}
    advantages: Ragged = batch["advantages"]
    found = teacher.reward_weight * advantages.values
    if teacher.top_k:
        batch["advantages"] = Ragged(found, advantages.lengths)
        return {}
    mask = batch["response_mask"].values
    kl = (batch["old_log_probs"].values - batch["teacher_log_probs"].values) * mask
    batch["advantages"] = Ragged(found - teacher.coef * kl, advantages.lengths)
    return {"actor/teacher_kl": mean(float(kl.sum()), float(mask.sum()))}
