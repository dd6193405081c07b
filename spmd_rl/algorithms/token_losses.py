"""Policy losses that look at one token at a time. Contract: `policy_loss`.

Each takes a TokenBatch and settings, and returns the loss of each token [T] (to be minimised, in the unit of the
advantage) with its metrics. A log-ratio is log pi - log pi_old, held in [-20, 20] where it is exponentiated.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.token_batch import Metrics, TokenBatch

LOG_RATIO_BOUND = 20.0
"""exp(20) = 4.9e8 is the largest ratio worked with."""


def clip_range(clip_ratio: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Lower and upper epsilon; either one falls back on `clip_ratio`."""
    return (clip_ratio if low is None else low), (clip_ratio if high is None else high)


def bounded_log_ratio(batch: TokenBatch) -> Tensor:
    return torch.clamp(batch.log_prob - batch.old_log_prob, min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)


def weighted(loss_T: Tensor, batch: TokenBatch) -> Tensor:
    """Times the rollout correction's importance weights, when there are any."""
    return loss_T if batch.rollout_is_weights is None else loss_T * batch.rollout_is_weights


def clip_metrics(batch: TokenBatch, log_ratio: Tensor, clipped: Tensor, clipped_low: Tensor) -> Metrics:
    """verl's three: share of clipped tokens, mean of -log ratio, share clipped by the lower or dual bound."""
    return {
        "actor/pg_clipfrac": batch.mean_of(clipped.to(log_ratio.dtype)),
        "actor/ppo_kl": batch.mean_of(-log_ratio),
        "actor/pg_clipfrac_lower": batch.mean_of(clipped_low.to(log_ratio.dtype)),
    }


def vanilla(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, Metrics]:
    """PPO: l = max(-r A, -clip(r, 1 - low, 1 + high) A), and at most -c A where A < 0, with r = pi / pi_old.

    Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, equation 7; the dual clip c: Ye et al.,
    Mastering Complex Control in MOBA Games, arXiv 1912.09729; clip-higher: Yu et al., DAPO, arXiv
    2503.14476. ValueError unless clip_ratio_c > 1.
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} would clip unchanged policies; use a value above 1, e.g. 3")
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = bounded_log_ratio(batch)
    ratio = log_ratio.exp()
    plain = -batch.advantages * ratio
    clipped = -batch.advantages * ratio.clamp(1 - low, 1 + high)
    upper = torch.maximum(plain, clipped)
    dual = -batch.advantages * clip_ratio_c
    negative = batch.advantages < 0
    loss = torch.where(negative, torch.minimum(dual, upper), upper)
    return weighted(loss, batch), clip_metrics(batch, log_ratio, clipped > plain, (upper > dual) & negative)


def dppo_tv(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """DPPO, total variation: l = -sg(min(r, c)) A log pi, 0 for a token whose probability moved too far already.

    Too far: pi - pi_old > high where A > 0, pi - pi_old < -low elsewhere. The epsilons bound a divergence here, not a
    ratio. Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv 2602.04879.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    moved = batch.log_prob.detach().exp() - batch.old_log_prob.exp()
    valid = torch.where(batch.advantages > 0, moved <= high, moved >= -low)
    return _divergence_bound(batch, valid, clip_ratio_c)


def dppo_kl(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """DPPO, binary KL: l = -sg(min(r, c)) A log pi as in `dppo_tv`, but far means KL(Bernoulli(pi_old) ||
    Bernoulli(pi)) above high (A > 0) or low, and only for a token that moved in the direction its advantage pushes.

    Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_prob = batch.log_prob.detach()
    new, old = log_prob.exp(), batch.old_log_prob.exp()
    rest = torch.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
    divergence = old * (batch.old_log_prob - log_prob) + (1 - old) * rest
    valid_up = (divergence <= high) | (new <= old)
    valid_down = (divergence <= low) | (new >= old)
    return _divergence_bound(batch, torch.where(batch.advantages > 0, valid_up, valid_down), clip_ratio_c)


def _divergence_bound(batch: TokenBatch, valid: Tensor, clip_ratio_c: float) -> tuple[Tensor, Metrics]:
    log_ratio = bounded_log_ratio(batch).detach()
    ratio = log_ratio.exp()
    loss = -batch.advantages * ratio.clamp(max=clip_ratio_c) * batch.log_prob * valid
    return weighted(loss, batch), clip_metrics(batch, log_ratio, ~valid, (ratio > clip_ratio_c) & valid)


def sapo(batch: TokenBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Tensor, Metrics]:
    """A soft gate in place of the clip: l = -A sigmoid(tau (r - 1)) 4 / tau, tau = tau_pos where A > 0, else tau_neg.

    Gao et al., Soft Adaptive Policy Optimization, arXiv 2511.20347, equation 6. Averaged a sequence, then over
    sequences.
    """
    log_ratio = bounded_log_ratio(batch)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(batch.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    never = torch.zeros_like(log_ratio, dtype=torch.bool)
    return weighted(-gate * batch.advantages, batch), clip_metrics(batch, log_ratio, never, never)


def cispo(
    batch: TokenBatch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The ratio is clipped as a weight and every token keeps its gradient: l = -sg(clip(r, 1 - low, 1 + high)) A log
    pi.

    MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = bounded_log_ratio(batch).detach()
    ratio = log_ratio.exp()
    kept = ratio.clamp(1 - low, 1 + high)
    never = torch.zeros_like(log_ratio, dtype=torch.bool)
    loss = -kept * batch.advantages * batch.log_prob
    return weighted(loss, batch), clip_metrics(batch, log_ratio, ratio != kept, never)


def gpg(batch: TokenBatch) -> tuple[Tensor, Metrics]:
    """Plain policy gradient: l = -A log pi; GPG's alpha is in the advantage (estimator `gpg`).

    Chu et al., GPG, arXiv 2504.02546.
    """
    return weighted(-batch.advantages * batch.log_prob, batch), {}


def reinforce(batch: TokenBatch) -> tuple[Tensor, Metrics]:
    """REINFORCE: l = -w A log pi, w the importance weights of the rollout correction (1 without).

    Williams, Simple statistical gradient-following algorithms, Machine Learning 8 (1992).
    """
    kl = batch.mean_of(batch.old_log_prob - batch.log_prob)
    return weighted(-batch.advantages * batch.log_prob, batch), {"actor/ppo_kl": kl}


def dro(batch: TokenBatch, *, dro_beta: float | None = None) -> tuple[Tensor, Metrics]:
    """Direct reward optimisation: l = -A log pi + beta / 2 (log r)^2, the log-ratio not bounded.

    Richemond et al., Offline Regularised Reinforcement Learning for LLM Alignment, arXiv 2405.19107.
    ValueError unless dro_beta > 0.
    """
    if not dro_beta or dro_beta <= 0:
        raise ValueError(f"dro_beta={dro_beta}: dro needs a positive weight of its squared log-ratio, e.g. 0.1")
    log_ratio = batch.log_prob - batch.old_log_prob
    loss = -batch.advantages * batch.log_prob + 0.5 * dro_beta * log_ratio.square()
    return weighted(loss, batch), {"actor/ppo_kl": batch.mean_of(-log_ratio)}
