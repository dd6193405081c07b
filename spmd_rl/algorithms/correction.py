"""Rollout correction: samples came from another policy (another engine, precision or step) than the one they train.

Importance weights rho = pi_train / pi_rollout, truncated (TIS) or zeroed outside a band (IcePop), and rejection of
tokens or sequences whose divergence is too large. Everything is over the whole batch.

Shapes: T packed tokens of R rows; `row` int64 [T]. A padded [N, L] batch is packed by `.flatten()` and
`row = arange(N).repeat_interleave(L)`. Log-probs in nats.

Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025
(fengyao.notion.site/off-policy-rl); Liu et al., When Speed Kills Stability, 2025 (richardli.xyz/rl-collapse); IcePop:
Ling Team, Every Step Evolves, arXiv 2510.18855.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import masked_mean, row_mean, row_sum
from spmd_rl.algorithms.mismatch import mismatch_metrics, rejection_metrics, row_max, weight_metrics

LOG_BOUND = 20.0
"""Log-ratios are held in [-20, 20] before exp."""

LEVELS = ("token", "sequence")
"""Importance weights: each token's own ratio, or the product over its sequence."""

REJECTION_RULES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3", "binary_kl"),
)
"""Level (a token, or the sum, mean or largest of a sequence) and divergence (k1 = -log rho, k2 = (log rho)^2 / 2,
k3 = rho - 1 - log rho); binary_kl judges a token by the larger KL, of the two directions, between Bernoulli(pi_train)
and Bernoulli(pi_rollout)."""


@dataclass(frozen=True)
class Correction:
    """What `rollout_correction` found."""

    weights: Tensor | None
    """[T] without gradient, 0 outside the given mask; None when no weights were asked for."""
    response_mask: Tensor
    """[T], rejected tokens taken out."""
    metrics: dict[str, float]
    """rollout_corr/…, over the whole batch."""


def rollout_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    row: Tensor,
    rows: int,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Correction:
    """Weights and rejection for a whole batch; `old_log_prob` [T] is the training policy's, `rollout_log_prob` the
    sampler's.

    `rollout_is`: token | sequence | None. `rollout_rs`: rules from REJECTION_RULES, comma-separated; a token stays if
    all let it. Thresholds: see `is_band` and `rejection_bands`. ValueError on unknown names, bad thresholds, an empty
    mask.
    """
    if not bool((response_mask > 0).any()):
        raise ValueError("rollout correction: no token counts, the whole response_mask is 0")
    keep = response_mask > 0
    old, sampled = (torch.where(keep, x.detach(), torch.zeros_like(x)) for x in (old_log_prob, rollout_log_prob))
    log_ratio = old - sampled
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None and rollout_is_threshold is not None:
        band = is_band(rollout_is_threshold)
        weights, found = importance_weights(
            log_ratio, response_mask, row, rows, rollout_is, band, rollout_is_batch_normalize
        )
        metrics |= found
    kept_mask = response_mask
    if rollout_rs is not None:
        bands = rejection_bands(rollout_rs, rollout_rs_threshold)
        kept_mask, found = reject(old, sampled, response_mask, row, rows, bands)
        metrics |= found
    metrics |= mismatch_metrics(old, sampled, response_mask, row, rows)
    return Correction(weights, kept_mask, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def importance_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    row: Tensor,
    rows: int,
    level: str,
    band: tuple[float | None, float],
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """rho of each token [T] and metrics without prefix. `band` = (None, upper) truncates at upper; (lower, upper)
    zeroes what lies outside. `batch_normalize` divides by the mean over counted tokens (level token) or rows
    (sequence)."""
    if level not in LEVELS:
        raise ValueError(f"unknown rollout_is '{level}'; use one of {', '.join(LEVELS)}")
    log_of = log_ratio if level == "token" else row_sum(log_ratio * response_mask, row, rows)
    raw = log_of.clamp(-LOG_BOUND, LOG_BOUND).exp()
    raw = (raw if level == "token" else raw[row]) * response_mask
    lower, upper = band
    if lower is None:
        weights = raw.clamp(max=upper)
    else:
        weights = torch.where((raw >= lower) & (raw <= upper), raw, torch.zeros_like(raw))
    metrics = weight_metrics(weights, raw, log_of, response_mask, row, rows, level, band)
    if batch_normalize:
        factor = _mean_weight(weights, response_mask, row, rows, level)
        metrics["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor
    return weights, metrics


def reject(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    row: Tensor,
    rows: int,
    bands: dict[str, tuple[float, float]],
) -> tuple[Tensor, dict[str, float]]:
    """The mask without rejected tokens [T], and metrics without prefix. `bands`: rule -> lowest and highest value
    kept.
    """
    bounded = (old_log_prob - rollout_log_prob).clamp(-LOG_BOUND, LOG_BOUND)
    divergence = {
        "k1": -bounded,
        "k2": 0.5 * bounded.square(),
        "k3": bounded.exp() - 1.0 - bounded,
        "kl": _binary_kl(old_log_prob, rollout_log_prob),
    }
    keep = torch.ones_like(response_mask, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for rule, (low, high) in bands.items():
        level, _, kind = rule.rpartition("_")
        per_row = _row_statistic(divergence[kind], response_mask, row, rows, level)
        per_token = divergence[kind] if per_row is None else per_row[row]
        inside = (per_token >= low) & (per_token <= high) if kind == "k1" else per_token <= high
        keep &= inside
        limits = (low if kind == "k1" else None, high)
        metrics |= rejection_metrics(rule, per_token, per_row, inside, response_mask, row, rows, limits)
    gone = (~keep).to(bounded.dtype)
    metrics["rollout_rs_masked_fraction"] = float(masked_mean(gone, response_mask))
    touched = row_max(gone * response_mask, response_mask, row, rows) > 0
    metrics["rollout_rs_seq_masked_fraction"] = float(touched.float().mean())
    return response_mask * keep, metrics


def is_band(threshold: float | str) -> tuple[float | None, float]:
    """`2.0` -> (None, 2.0), truncate; `"0.5_2.0"` -> (0.5, 2.0), zero outside. ValueError unless 0 < lower <= upper."""
    lower, upper = _pair("rollout_is_threshold", str(threshold))
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError(f"rollout_is_threshold={threshold!r}: needs 0 < lower <= upper")
    return lower, upper


def rejection_bands(rules: str, thresholds: float | str | None) -> dict[str, tuple[float, float]]:
    """Rule -> (lowest, highest) value of its divergence that stays. One threshold a rule, or one for all.

    For k1 a threshold is a ratio, `upper` or `lower_upper` (lower falls back on 1 / upper), and the band is its
    logarithm; for k2 and k3 it is the largest divergence. ValueError on unknown rules and on thresholds that are
    missing or not positive.
    """
    names = list(dict.fromkeys(part.strip() for part in rules.split(",") if part.strip()))
    unknown = [n for n in names if n not in REJECTION_RULES]
    if unknown or not names:
        raise ValueError(f"rollout_rs={rules!r}: unknown {', '.join(unknown)}; use {', '.join(REJECTION_RULES)}")
    if thresholds is None:
        raise ValueError(f"rollout_rs={rules!r} needs rollout_rs_threshold")
    parts = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(parts) not in (1, len(names)):
        raise ValueError(f"rollout_rs_threshold={thresholds!r}: give 1 or {len(names)} thresholds, not {len(parts)}")
    return {n: _band_of(n, p) for n, p in zip(names, parts * (len(names) if len(parts) == 1 else 1), strict=True)}


def _band_of(rule: str, threshold: str) -> tuple[float, float]:
    lower, upper = _pair(f"rollout_rs_threshold of {rule}", threshold)
    if upper <= 0 or (lower is not None and lower <= 0):
        raise ValueError(f"rollout_rs_threshold of {rule}: {threshold!r} must be above 0")
    if rule.endswith("k1"):
        return math.log(1 / upper if lower is None else lower), math.log(upper)
    if lower is not None:
        raise ValueError(f"rollout_rs_threshold of {rule}: {threshold!r} has two bounds, {rule} has only an upper one")
    return -math.inf, upper


def _pair(what: str, text: str) -> tuple[float | None, float]:
    parts = text.strip().split("_", 1)
    try:
        numbers = [float(p) for p in parts]
    except ValueError:
        raise ValueError(f"{what}={text!r} is neither a number nor lower_upper") from None
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0])


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """max(KL(p || q), KL(q || p)) of Bernoulli distributions; probabilities held in [1e-6, 1 - 1e-6], in float32."""
    p, q = (x.float().exp().clamp(1e-6, 1 - 1e-6) for x in (log_p, log_q))
    forward = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    backward = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    return torch.maximum(forward, backward).to(log_p.dtype)


def _row_statistic(values: Tensor, mask: Tensor, row: Tensor, rows: int, level: str) -> Tensor | None:
    if level in ("token", "binary"):
        return None
    if level == "seq_sum":
        return row_sum(values * mask, row, rows)
    if level == "seq_mean":
        return row_mean(values, mask, row, rows)
    return row_max(values, mask, row, rows)


def _mean_weight(weights: Tensor, mask: Tensor, row: Tensor, rows: int, level: str) -> float:
    if level == "token":
        mean = masked_mean(weights, mask)
    else:
        filled = (row_sum(mask, row, rows) > 0).to(weights.dtype)
        mean = masked_mean(row_mean(weights, mask, row, rows), filled)
    return float(mean) if mean > 1e-8 else 1.0
