"""Policy losses: `POLICY_LOSSES`, and how an engine calls one.

A loss sees packed tokens: `TokenBatch` holds T response tokens of R whole rows. For one optimizer step over a
mini-batch that is spread over dp ranks and cut into micro-batches:

1. `loss = policy_loss(loss_mode)`; `settings` is a dict of all knobs the config has, a loss takes those it names.
2. If `loss.needs_statistics(**settings)`: run the mini-batch forward without gradient, gather its TokenBatch over the
   dp ranks (log_prob, old_log_prob, advantages, response_mask, row, and uid, sample a row), and on every rank call
   `stats = loss.statistics(whole, **settings)`. Cut each `stats.columns[name]` ([T] in the order of `whole`) back to
   the micro-batches and put it in with `batch.with_columns(...)`; `stats.metrics` are whole already. The result does
   not depend on the order of rows in `whole`. It holds for this optimizer step: the next one that sees these rows
   starts from their own mask again, not from the one that rejection changed.
3. `totals` = sum over ranks and micro-batches of `BatchTotals.of(batch.response_mask, batch.row, batch.rows)`, after
   step 2, which may have changed the mask. Two numbers to all-reduce: `totals.tensor()`.
4. For each micro-batch: `value, metrics = loss.share(batch, totals=totals, mode=loss_agg_mode, **settings)`;
   `value.backward()`. Values and gradients of all micro-batches and ranks *sum* to those of the mini-batch; an engine
   that averages gradients over dp ranks multiplies by their number. A micro-batch may be empty (T = 0): its value is 0
   and has a gradient of 0.
   Entropy bonus and KL loss join it as `aggregate(entropy_T or kl_penalty(...), mask, row, rows, loss_agg_mode,
   totals)`.
5. Add up `metrics`, (sum, weight) by name, over micro-batches and ranks; sum / weight is the metric.

`share` is `aggregate(loss(batch, **settings)[0], ...)`. A loss with an `agg_mode` of its own (gspo, sapo, geo_mean)
ignores `mode`. Rows are never cut in two, since gspo and geo_mean need whole ones. Tokens with mask 0 are not looked
at.

Your own is a function in a file, `actor.policy_loss.loss_mode=my_rl/losses.py:soft`, where
`def soft(batch: TokenBatch, *, clip_ratio: float = 0.2): ...; return loss_T, {"actor/ppo_kl": batch.mean_of(kl_T)}`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spmd_rl.algorithms.aggregation import BatchTotals, aggregate
from spmd_rl.algorithms.bypass_loss import bypass_mode, bypass_statistics, bypass_wants_statistics
from spmd_rl.algorithms.covariance_losses import clip_cov, clip_cov_statistics, kl_cov, kl_cov_statistics
from spmd_rl.algorithms.registry import resolve
from spmd_rl.algorithms.sequence_losses import geo_mean, gspo
from spmd_rl.algorithms.signature import offered
from spmd_rl.algorithms.token_batch import LossFunction, Metrics, Statistics, TokenBatch
from spmd_rl.algorithms.token_losses import cispo, dppo_kl, dppo_tv, dro, gpg, reinforce, sapo, vanilla

__all__ = ["POLICY_LOSSES", "BatchTotals", "Metrics", "PolicyLoss", "Statistics", "TokenBatch", "policy_loss"]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss and what it asks of its caller."""

    fn: LossFunction
    """The function itself."""
    agg_mode: str | None = None
    """The one aggregation it is defined with; unset means the configured one."""
    statistics_fn: Callable[..., Statistics] | None = None
    """What has to be computed over the whole mini-batch first."""
    wants_statistics: Callable[..., bool] | None = None
    """Settings -> whether it has to be; unset means always."""

    def __call__(self, batch: TokenBatch, **settings: Any) -> tuple[Tensor, Metrics]:
        """The loss of each token [T] and metrics."""
        return self.fn(batch.masked(), **offered(self.fn, settings))

    def needs_statistics(self, **settings: Any) -> bool:
        """Whether `statistics` has to run with these settings."""
        if self.statistics_fn is None or self.wants_statistics is None:
            return self.statistics_fn is not None
        return self.wants_statistics(**offered(self.wants_statistics, settings))

    def statistics(self, whole: TokenBatch, **settings: Any) -> Statistics:
        """Over all tokens of the mini-batch; no gradient."""
        assert self.statistics_fn is not None, "this loss has no statistics; ask needs_statistics first"
        whole = whole.with_columns(log_prob=whole.log_prob.detach())
        return self.statistics_fn(whole.masked(), **offered(self.statistics_fn, settings))

    def share(
        self,
        batch: TokenBatch,
        *,
        totals: BatchTotals,
        mode: str = "token-mean",
        loss_scale_factor: float | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the mini-batch's loss (a scalar to call backward on), and metrics."""
        loss_T, metrics = self(batch, **settings)
        chosen = self.agg_mode or mode
        value = aggregate(
            loss_T, batch.response_mask, batch.row, batch.rows, chosen, totals, loss_scale_factor=loss_scale_factor
        )
        return value, metrics


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(vanilla),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "gspo": PolicyLoss(gspo, agg_mode="seq-mean-token-mean"),
    "sapo": PolicyLoss(sapo, agg_mode="seq-mean-token-mean"),
    "cispo": PolicyLoss(cispo),
    "gpg": PolicyLoss(gpg),
    "geo_mean": PolicyLoss(geo_mean, agg_mode="seq-mean-token-sum"),
    "clip_cov": PolicyLoss(clip_cov, statistics_fn=clip_cov_statistics),
    "kl_cov": PolicyLoss(kl_cov, statistics_fn=kl_cov_statistics),
    "dro": PolicyLoss(dro),
    "reinforce": PolicyLoss(reinforce),
    "bypass_mode": PolicyLoss(bypass_mode, statistics_fn=bypass_statistics, wants_statistics=bypass_wants_statistics),
}


def policy_loss(name: str) -> PolicyLoss:
    """The loss called `name`, or the user's function at `file.py:function`. ConfigError when there is none."""
    found = resolve(name, POLICY_LOSSES, "policy loss")
    return found if isinstance(found, PolicyLoss) else PolicyLoss(found)
