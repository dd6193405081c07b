"""Policy losses that treat tokens apart whose log-prob goes with their advantage most. Contract: `policy_loss`.

Which tokens those are is decided over the whole mini-batch (`*_statistics`), never over a micro-batch, and a draw among
them is keyed by (uid, sample, position), so the choice does not depend on ranks, micro-batches or row order.

Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.token_batch import Metrics, Statistics, TokenBatch
from spmd_rl.algorithms.token_losses import clip_range, weighted


def covariance(advantages: Tensor, log_prob: Tensor) -> Tensor:
    """(A - mean A)(log pi - mean log pi) of each token: the summand of the covariance that drives the entropy."""
    return (advantages - advantages.mean()) * (log_prob - log_prob.mean())


def clip_cov_statistics(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Statistics:
    """`selected` [T]: the tokens whose gradient is cut. ValueError unless clip_cov_ratio > 0.

    Of the counted, unclipped tokens with lb < covariance < ub, max(1, int(ratio * tokens)) are drawn by their hash.
    """
    _positive("clip_cov_ratio", clip_cov_ratio)
    counted = _in_hash_order(batch)
    value = covariance(batch.advantages[counted], batch.log_prob[counted])
    plain, clipped = _ppo_terms(batch, clip_range(clip_ratio, clip_ratio_low, clip_ratio_high))
    candidate = (value > clip_cov_lb) & (value < clip_cov_ub) & ~(clipped > plain)[counted]
    wanted = max(int(clip_cov_ratio * len(counted)), 1)
    return Statistics({"selected": _mark(batch, counted[candidate][:wanted])}, {})


def clip_cov(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """l = max(-r A, -clip(r, 1 - low, 1 + high) A), 0 at the selected tokens. `actor/pg_clipfrac` is their share."""
    selected = _selected(batch, "clip_cov")
    plain, clipped = _ppo_terms(batch, clip_range(clip_ratio, clip_ratio_low, clip_ratio_high))
    loss = torch.maximum(plain, clipped) * ~selected
    return weighted(loss, batch), {
        "actor/pg_clipfrac": batch.mean_of(selected.to(loss.dtype)),
        "actor/ppo_kl": batch.mean_of(batch.old_log_prob - batch.log_prob),
    }


def kl_cov_statistics(batch: TokenBatch, *, kl_cov_ratio: float = 0.0002) -> Statistics:
    """`selected` [T]: the tokens that get the penalty, the max(1, int(ratio * tokens)) with the largest covariance.

    Equal covariances are ordered by the tokens' hash. ValueError unless kl_cov_ratio > 0.
    """
    _positive("kl_cov_ratio", kl_cov_ratio)
    counted = _in_hash_order(batch)
    value = covariance(batch.advantages[counted], batch.log_prob[counted])
    wanted = max(int(len(counted) * kl_cov_ratio), 1)
    top = value.argsort(stable=True, descending=True)[:wanted]
    return Statistics({"selected": _mark(batch, counted[top])}, {})


def kl_cov(batch: TokenBatch, *, ppo_kl_coef: float = 1.0) -> tuple[Tensor, Metrics]:
    """l = -r A, plus coef |log r| at the selected tokens; no clip. `actor/ppo_kl` is the mean of |log
    r|.
    """
    selected = _selected(batch, "kl_cov")
    log_ratio = batch.log_prob - batch.old_log_prob
    loss = -batch.advantages * log_ratio.exp()
    loss = torch.where(selected, loss + ppo_kl_coef * log_ratio.abs(), loss)
    return weighted(loss, batch), {"actor/ppo_kl": batch.mean_of(log_ratio.abs())}


def token_hash(batch: TokenBatch) -> Tensor:
    """A number for each token that depends on (uid, sample, position in the row) alone: int64 [T], >= 0.

    A batch without uid uses the row's number. The mixing is that of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    start = torch.zeros(batch.rows + 1, dtype=torch.int64, device=batch.row.device)
    start[1:] = torch.bincount(batch.row, minlength=batch.rows).cumsum(0)
    position = torch.arange(len(batch.row), device=batch.row.device) - start[batch.row]
    uid = batch.row if batch.uid is None else batch.uid[batch.row]
    sample = torch.zeros_like(uid) if batch.sample is None else batch.sample[batch.row]
    return _mix(_mix(_mix(uid) + sample) + position) & 0x7FFFFFFFFFFFFFFF


def _in_hash_order(batch: TokenBatch) -> Tensor:
    """Places of the counted tokens, by their hash: the same tokens in the same order however the rows are ordered."""
    at = torch.nonzero(batch.response_mask > 0)[:, 0]
    return at[token_hash(batch)[at].argsort()]


def _mark(batch: TokenBatch, at: Tensor) -> Tensor:
    return torch.zeros_like(batch.row, dtype=torch.bool).index_fill(0, at, True)


def _mix(x: Tensor) -> Tensor:
    x = x - 0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _ppo_terms(batch: TokenBatch, epsilon: tuple[float, float]) -> tuple[Tensor, Tensor]:
    ratio = (batch.log_prob - batch.old_log_prob).exp()
    return -batch.advantages * ratio, -batch.advantages * ratio.clamp(1 - epsilon[0], 1 + epsilon[1])


def _selected(batch: TokenBatch, name: str) -> Tensor:
    if batch.selected is None:
        raise ValueError(f"{name} needs batch.selected: run its statistics over the whole mini-batch first")
    return batch.selected


def _positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name}={value}: the share of tokens must be above 0")
