"""PPO's critic: its loss on one micro-batch, its optimizer steps, and how well its values explain the returns.

Shapes: R response tokens of a micro-batch's rows, packed.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algorithms.aggregation import BatchTotals, aggregate
from spmd_rl.algorithms.masked import masked_sum, row_of
from spmd_rl.algorithms.value_loss import value_loss
from spmd_rl.config import Config
from spmd_rl.data.balance import consecutive
from spmd_rl.data.batch import Batch
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import Outputs, StepResult
from spmd_rl.observe.metrics import Partial, explained_variance, mean, moments, total
from spmd_rl.roles.model import ModelRole, sum_over
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.remote import Remote, local
from spmd_rl.trainer.finite import Guard
from spmd_rl.trainer.objective import loss_scale, mini_batch_totals
from spmd_rl.trainer.reshard import INPUTS, lend_shard


def update_critic(
    config: Config, critic: ModelRole | Remote, shard: Shard | Remote, runtime: Runtime, guard: Guard
) -> list[StepResult]:
    """The critic's passes over the step's batch, one optimizer step a mini-batch of its own size."""
    prompts, epochs = critic_updates(config)

    def mini_batches(rows: int) -> list[list[int]]:
        return consecutive(rows, prompts * config.rollout.n) * epochs

    lent = lend_shard(shard, "critic", [*INPUTS, "values", "returns"], mini_batches, config, runtime)
    done = local(
        lambda part, model: [_update(config, model, part, m, guard) for m in range(part.mini_batches)], lent, critic
    )
    return [] if isinstance(done, Remote) else done


def _update(config: Config, critic: ModelRole, lent: Shard, mini: int, guard: Guard) -> StepResult:
    totals = mini_batch_totals(lent.batch.select(lent.mini_rows(mini)), critic.dp_group)
    return critic.update(lent, mini, ValueObjective(config, totals, guard))


def critic_updates(config: Config) -> tuple[int, int]:
    """(prompts of a mini-batch, passes over a step's batch)."""
    critic, actor = config.critic, config.actor
    return critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs


class ValueObjective:
    """An engine's `Objective`: the clipped value loss over one mini-batch."""

    def __init__(self, config: Config, totals: BatchTotals, guard: Guard) -> None:
        self.config, self.totals, self.guard = config, totals, guard

    def __call__(self, rows: Batch, outputs: Outputs) -> tuple[Tensor, Partial]:
        vpreds, critic = outputs["values"], self.config.critic
        self.guard.check_tokens("values", vpreds, rows)
        old, returns, mask = (rows[name].values.to(vpreds.device) for name in ("values", "returns", "response_mask"))
        row = row_of(rows["responses"].lengths).to(vpreds.device)
        loss_T, metrics = value_loss(vpreds, old, returns, mask, cliprange_value=critic.cliprange_value)
        scale = loss_scale(self.config)
        loss = aggregate(loss_T, mask, row, len(rows), critic.loss_agg_mode, self.totals, scale)
        partial = {name: mean(float(s), float(w)) for name, (s, w) in metrics.items()}
        partial["critic/vpred_mean"] = mean(float(masked_sum(vpreds.detach(), mask)), float(mask.sum()))
        partial["critic/vf_loss"] = total(loss.item())
        return loss, partial


def value_metrics(batch: Batch, group: ProcessGroup) -> dict[str, float]:
    """`critic/vf_explained_var` over the counted tokens of all dp ranks."""
    counted = batch["response_mask"].values > 0
    mine = moments(batch["returns"].values[counted], batch["values"].values[counted])
    return {"critic/vf_explained_var": explained_variance(sum_over(torch.from_numpy(mine), group).numpy())}
