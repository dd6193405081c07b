"""The actor's loss on one micro-batch: policy loss, KL to the reference, entropy bonus, all over the mini-batch's totals.

Shapes: R response tokens of a micro-batch's rows, packed; N rows of this rank's mini-batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algorithms.aggregation import aggregate
from spmd_rl.algorithms.kl import kl_penalty
from spmd_rl.algorithms.masked import row_of
from spmd_rl.algorithms.policy_loss import BatchTotals, PolicyLoss, TokenBatch, policy_loss
from spmd_rl.config import Config
from spmd_rl.config.roles import ActorConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import Outputs
from spmd_rl.observe.metrics import Partial, mean, total
from spmd_rl.roles.model import ModelRole, sum_over
from spmd_rl.runtime.exchange import gather


def loss_settings(config: Config) -> dict[str, Any]:
    """Every knob that some policy loss may name, as keyword arguments."""
    actor = config.actor
    settings = dict(vars(actor.policy_loss))
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        settings[name] = getattr(actor, name)
    return settings | vars(config.algorithm.rollout_correction)


class PolicyObjective:
    """An engine's `Objective` for one mini-batch. Where the batch has no `old_log_probs`, the new ones stand for them."""

    def __init__(self, config: Config, totals: BatchTotals, loss: PolicyLoss, selected: "Ragged | None" = None) -> None:
        self.config, self.totals, self.loss, self.selected = config, totals, loss, selected
        self.settings = loss_settings(config)

    def __call__(self, rows: Batch, outputs: Outputs) -> tuple[Tensor, Partial]:
        actor = self.config.actor
        tokens = token_batch(rows, outputs["log_probs"])
        scale = actor.loss_scale_factor or float(self.config.data.max_response_length)
        loss, metrics = self.loss.share(
            tokens, totals=self.totals, mode=actor.loss_agg_mode, loss_scale_factor=scale, **self.settings
        )
        partial = {name: mean(float(s), float(w)) for name, (s, w) in metrics.items()}
        partial["actor/pg_loss"] = total(loss.item())
        partial["actor/entropy"] = _token_mean(outputs["entropy"], tokens)
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * self._aggregate(outputs["entropy"], tokens, scale)
        if actor.use_kl_loss:
            reference = rows["ref_log_probs"].values.to(tokens.log_prob.device)
            kl = self._aggregate(kl_penalty(tokens.log_prob, reference, actor.kl_loss_type), tokens, scale)
            loss = loss + actor.kl_loss_coef * kl
            partial["actor/kl_loss"] = total(kl.item())
        if "rollout_log_probs" in rows:
            gap = (tokens.log_prob.detach() - rows["rollout_log_probs"].values.to(tokens.log_prob.device)).abs()
            partial["training/rollout_log_prob_diff"] = _token_mean(gap, tokens)
        return loss, partial

    def _aggregate(self, values_T: Tensor, tokens: TokenBatch, scale: float) -> Tensor:
        mode = self.config.actor.loss_agg_mode
        return aggregate(values_T, tokens.response_mask, tokens.row, tokens.rows, mode, self.totals, scale)


def token_batch(rows: Batch, log_probs_T: Tensor) -> TokenBatch:
    """The loss's view of some rows, on the device of `log_probs_T` [T]."""
    device = log_probs_T.device

    def column(name: str) -> Tensor | None:
        return rows[name].values.to(device) if name in rows else None

    old, advantages, mask = column("old_log_probs"), column("advantages"), column("response_mask")
    assert advantages is not None and mask is not None, "the trainer writes advantages before the update"
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


def _token_mean(values_T: Tensor, tokens: TokenBatch) -> Any:
    value, weight = tokens.mean_of(values_T)
    return mean(float(value), float(weight))


def mini_batch_totals(rows: Batch, group: ProcessGroup) -> BatchTotals:
    """Counted tokens and sequences of a mini-batch over all dp ranks; `rows` are this rank's."""
    mask: Ragged = rows["response_mask"]
    mine = BatchTotals.of(mask.values, row_of(mask.lengths), len(rows))
    return BatchTotals(*sum_over(mine.tensor(), group).tolist())


def policy_objective(config: Config, actor: ModelRole, shard: Shard, mini: int) -> PolicyObjective:
    """The objective of one mini-batch, with the statistics of the whole of it where the loss needs them."""
    loss = policy_loss(config.actor.policy_loss.loss_mode)
    if loss.needs_statistics(**loss_settings(config)):
        _add_statistics(config, actor, shard, mini, loss)
    rows = shard.batch.select(shard.mini_rows(mini))
    return PolicyObjective(config, mini_batch_totals(rows, actor.dp_group), loss)


def _add_statistics(config: Config, actor: ModelRole, shard: Shard, mini: int, loss: PolicyLoss) -> None:
    """One more forward without gradient; what the loss picks over the whole mini-batch goes into the shard's columns."""
    batch = shard.batch
    log_probs = actor.engine.forward(batch, shard.micro_batches(mini), ["log_probs"])["log_probs"]
    places = shard.mini_rows(mini)
    part = batch.select(sorted(places))
    part["log_probs"] = log_probs
    names = ["uid", "sample", "log_probs", "old_log_probs", "advantages", "response_mask", "rollout_log_probs"]
    whole = gather(part, [*[n for n in names if n in part], "responses"], actor.dp_group)
    statistics = loss.statistics(token_batch(whole, whole["log_probs"].values), **loss_settings(config))
    for name, column_T in statistics.columns.items():
        _scatter(batch, name, whole, Ragged(column_T, whole["responses"].lengths), places)


def _scatter(batch: Batch, name: str, whole: Batch, column: Ragged, places: Sequence[int]) -> None:
    """Write this rank's part of a column of the whole mini-batch into `batch`; other rows keep what they had."""
    of_row = dict(zip(whole["row_id"].tolist(), column.rows(), strict=True))
    lengths = batch["responses"].lengths
    before = batch[name].rows() if name in batch else [torch.zeros(int(n), dtype=column.values.dtype) for n in lengths]
    for place in places:
        before[place] = of_row[int(batch["row_id"][place])]
    batch[name] = Ragged.from_rows(before, column.values.dtype)
