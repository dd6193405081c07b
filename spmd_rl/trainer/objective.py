"""The actor's loss on one micro-batch: policy loss, KL to the reference, entropy bonus, over the mini-batch's totals.

Shapes: R response tokens of a micro-batch's rows, packed; N rows of this rank's mini-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algorithms.aggregation import aggregate
from spmd_rl.algorithms.kl import kl_penalty
from spmd_rl.algorithms.masked import row_of
from spmd_rl.algorithms.policy_loss import BatchTotals, PolicyLoss, TokenBatch, policy_loss
from spmd_rl.config import Config
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import Outputs, StepResult
from spmd_rl.observe.metrics import Partial, Stat, mean, total
from spmd_rl.roles.model import ModelRole, sum_over
from spmd_rl.runtime.exchange import gather
from spmd_rl.trainer.correction import bypasses, correction_of
from spmd_rl.trainer.finite import Guard


def configured_loss(config: Config) -> PolicyLoss:
    """`actor.policy_loss.loss_mode`'s, or the bypass mode's. ConfigError when there is none of that name."""
    return policy_loss("bypass_mode" if bypasses(config) else config.actor.policy_loss.loss_mode)


def loss_settings(config: Config) -> dict[str, Any]:
    """Every knob that some policy loss may name, as keyword arguments."""
    actor = config.actor
    settings = dict(vars(actor.policy_loss))
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        settings[name] = getattr(actor, name)
    return settings | vars(correction_of(config))


def update_actor(config: Config, actor: ModelRole, shard: Shard, mini: int, guard: Guard) -> StepResult:
    """One optimizer step over mini-batch `mini`, after the statistics of the whole of it where the loss needs them."""
    loss, metrics = configured_loss(config), dict[str, float]()
    if loss.needs_statistics(**loss_settings(config)):
        shard, metrics = with_statistics(config, actor, shard, mini, loss, guard)
    totals = mini_batch_totals(shard.batch.select(shard.mini_rows(mini)), actor.dp_group)
    result = actor.update(shard, mini, PolicyObjective(config, totals, loss, guard))
    result.partial |= {name: mean(value, 1) for name, value in metrics.items()}
    return result


class PolicyObjective:
    """An engine's `Objective` for one mini-batch. Where the batch has no `old_log_probs`, the new ones stand in."""

    def __init__(self, config: Config, totals: BatchTotals, loss: PolicyLoss, guard: Guard | None = None) -> None:
        self.config, self.totals, self.loss, self.guard = config, totals, loss, guard
        self.settings = loss_settings(config)
        self.scale = loss_scale(config)

    def __call__(self, rows: Batch, outputs: Outputs) -> tuple[Tensor, Partial]:
        actor = self.config.actor
        if self.guard is not None:
            self.guard.check_tokens("log_probs", outputs["log_probs"], rows)
        tokens = token_batch(rows, outputs["log_probs"])
        loss, metrics = self.loss.share(
            tokens, totals=self.totals, mode=actor.loss_agg_mode, loss_scale_factor=self.scale, **self.settings
        )
        partial = {name: mean(float(s), float(w)) for name, (s, w) in metrics.items()}
        partial["actor/pg_loss"] = total(loss.item())
        partial["actor/entropy"] = token_mean(outputs["entropy"], tokens)
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * self._aggregate(outputs["entropy"], tokens)
        if actor.use_kl_loss:
            reference = rows["ref_log_probs"].values.to(tokens.log_prob.device)
            kl = self._aggregate(kl_penalty(tokens.log_prob, reference, actor.kl_loss_type), tokens)
            loss = loss + actor.kl_loss_coef * kl
            partial["actor/kl_loss"] = total(kl.item())
        if "teacher_kl" in outputs:
            kl = self._aggregate(outputs["teacher_kl"], tokens)
            loss = loss + self.config.teacher.coef * kl
            partial["actor/teacher_kl_loss"] = total(kl.item())
        elif "teacher_ids" in rows:
            partial["actor/teacher_kl_loss"] = total(0.0)  # a rank without rows names the same metrics
        if "rollout_log_probs" in rows:
            gap = (tokens.log_prob.detach() - rows["rollout_log_probs"].values.to(tokens.log_prob.device)).abs()
            partial["training/rollout_log_prob_diff"] = token_mean(gap, tokens)
        return loss, partial

    def _aggregate(self, values_T: Tensor, tokens: TokenBatch) -> Tensor:
        mode = self.config.actor.loss_agg_mode
        return aggregate(values_T, tokens.response_mask, tokens.row, tokens.rows, mode, self.totals, self.scale)


def loss_scale(config: Config) -> float:
    """The divisor of seq-mean-token-sum-norm."""
    return config.actor.loss_scale_factor or float(config.data.max_response_length)


def token_batch(rows: Batch, log_probs_T: Tensor) -> TokenBatch:
    """The loss's view of some rows, on the device of `log_probs_T` [T]."""
    device = log_probs_T.device

    def column(name: str) -> Tensor | None:
        return rows[name].values.to(device) if name in rows else None

    old, advantages, mask = column("old_log_probs"), column("advantages"), column("response_mask")
    assert advantages is not None, "the trainer writes advantages before the update"
    assert mask is not None, "the rollout writes the response mask"
    return TokenBatch(
        log_prob=log_probs_T,
        old_log_prob=log_probs_T.detach() if old is None else old,
        advantages=advantages,
        response_mask=mask,
        row=row_of(rows["responses"].lengths).to(device),
        rows=len(rows),
        rollout_is_weights=column("rollout_is_weights"),
        selected=column("selected"),
        uid=rows["uid"].to(device),
        sample=rows["sample"].to(device),
    )


def token_mean(values_T: Tensor, tokens: TokenBatch) -> Stat:
    """The mean over counted tokens, to be merged over micro-batches and ranks."""
    value, weight = tokens.mean_of(values_T)
    return mean(float(value), float(weight))


def mini_batch_totals(rows: Batch, group: ProcessGroup) -> BatchTotals:
    """Counted tokens and sequences of a mini-batch over all dp ranks; `rows` are this rank's."""
    mask: Ragged = rows["response_mask"]
    mine = BatchTotals.of(mask.values, row_of(mask.lengths), len(rows))
    return BatchTotals(*sum_over(mine.tensor(), group).tolist())


def with_statistics(
    config: Config, actor: ModelRole, shard: Shard, mini: int, loss: PolicyLoss, guard: Guard
) -> tuple[Shard, dict[str, float]]:
    """One more forward without gradient: the shard with what the loss found over the whole mini-batch as columns.

    The columns hold for one optimizer step, so the shard given stays as it is. Metrics are of the whole mini-batch.
    """
    batch, places = shard.batch, sorted(shard.mini_rows(mini))
    part = batch.select(places)
    part["log_probs"] = actor.engine.forward(batch, shard.micro_batches(mini), ["log_probs"])["log_probs"]
    guard.check(part, ["log_probs"])
    names = ["uid", "sample", "log_probs", "old_log_probs", "advantages", "response_mask", "responses"]
    whole = gather(part, [n for n in names if n in part], actor.dp_group)
    statistics = loss.statistics(token_batch(whole, whole["log_probs"].values), **loss_settings(config))
    fresh = Batch(batch.rows, dict(batch.ragged))
    for name, column_T in statistics.columns.items():
        fresh[name] = _own_part(batch, name, whole, column_T, places)
    return replace(shard, batch=fresh), statistics.metrics


def _own_part(batch: Batch, name: str, whole: Batch, column_T: Tensor, places: Sequence[int]) -> Ragged:
    """This rank's rows of a column of the whole mini-batch; the rows of other mini-batches keep what they have."""
    column = Ragged(column_T, whole["responses"].lengths)
    of_row = dict(zip(whole["row_id"].tolist(), column.rows(), strict=True))
    lengths = batch["responses"].lengths.tolist()
    rows = batch[name].rows() if name in batch else [torch.zeros(n, dtype=column_T.dtype) for n in lengths]
    for place in places:
        rows[place] = of_row[int(batch["row_id"][place])]
    return Ragged.from_rows(rows, column_T.dtype)
