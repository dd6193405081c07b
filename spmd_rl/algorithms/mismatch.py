"""Metrics of rollout correction: how far the training policy is from the one that sampled. Names follow verl's.

Shapes: T packed tokens of R rows; `row` int64 [T]. Each returns plain numbers over the whole batch, names without
prefix. A row without counted tokens stands in the means over rows with its mean of 0, as in the figures this agrees
with.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import masked_mean, row_mean, row_sum

LOG_BOUND = 20.0


def row_max(values: Tensor, mask: Tensor, row: Tensor, rows: int) -> Tensor:
    """Largest counted value of each row [R]; 0 for a row without any."""
    hidden = values.masked_fill(mask <= 0, -torch.inf)
    found = values.new_full((rows,), -torch.inf).scatter_reduce(0, row, hidden, reduce="amax")
    return torch.where(found == -torch.inf, torch.zeros_like(found), found)


def mismatch_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, row: Tensor, rows: int
) -> dict[str, float]:
    """Perplexities, KL(rollout || training) by k1 and k3, chi-square divergence of tokens and of sequences.

    chi2 = E[rho^2] - 1 with rho = pi_training / pi_rollout; perplexity of a row = exp(-mean log-prob).
    """
    log_ratio = old_log_prob - rollout_log_prob
    training = -row_mean(old_log_prob, mask, row, rows)
    sampling = -row_mean(rollout_log_prob, mask, row, rows)
    difference = training - sampling
    whole = row_sum(log_ratio * mask, row, rows).clamp(-LOG_BOUND, LOG_BOUND)
    found = {
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "rollout_ppl": sampling.exp().mean(),
        "rollout_log_ppl": sampling.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": masked_mean(log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp().square(), mask) - 1,
        "chi2_seq": (2 * whole).exp().mean() - 1,
    }
    return {name: float(value) for name, value in found.items()}


def weight_metrics(
    weights: Tensor,
    raw: Tensor,
    log_of: Tensor,
    mask: Tensor,
    row: Tensor,
    rows: int,
    level: str,
    band: tuple[float | None, float],
) -> dict[str, float]:
    """Of importance weights: mean, spread, effective sample size, shares outside the band; per sequence as well.

    `raw` [T] before truncation; `log_of` [T] or [R] the log-ratio before the bound; band as in `importance_weights`, a
    missing lower end counts as 1 / upper here.
    """
    upper = band[1]
    lower = 1 / upper if band[0] is None else band[0]
    found = {"rollout_is_mean": masked_mean(weights, mask)}
    counted = weights[mask > 0]
    if level == "sequence":
        found["rollout_is_max"] = log_of.max().clamp(max=LOG_BOUND).exp()
        found["rollout_is_min"] = log_of.min().exp()
        found["rollout_is_ratio_fraction_high"] = _share(log_of > torch.tensor(upper).log())
        found["rollout_is_ratio_fraction_low"] = _share(log_of < torch.tensor(lower).log())
    else:
        found["rollout_is_max"], found["rollout_is_min"] = counted.max(), counted.min()
        found["rollout_is_ratio_fraction_high"] = masked_mean((raw > upper).to(raw.dtype), mask)
        found["rollout_is_ratio_fraction_low"] = masked_mean((raw < lower).to(raw.dtype), mask)
    if band[0] is not None:
        outside = (raw < lower) | (raw > upper)
        found["rollout_is_oob_ratio"] = masked_mean(outside.to(raw.dtype), mask)
    held = weights.clamp(0.0, upper)
    mean = masked_mean(held, mask)
    found["rollout_is_std"] = _masked_std(held, mask)
    found["rollout_is_eff_sample_size"] = 1 / masked_mean((held / (mean + 1e-8)).square(), mask)
    per_row, raw_row = row_mean(weights, mask, row, rows), row_mean(raw, mask, row, rows)
    found |= {
        "rollout_is_seq_mean": per_row.mean(),
        "rollout_is_seq_std": _std(per_row),
        "rollout_is_seq_max": per_row.max(),
        "rollout_is_seq_min": per_row.min(),
        "rollout_is_seq_max_deviation": (per_row - 1).abs().max(),
        "rollout_is_seq_fraction_high": _share(raw_row > upper),
        "rollout_is_seq_fraction_low": _share(raw_row < lower),
    }
    return {name: float(value) for name, value in found.items()}


def rejection_metrics(
    rule: str,
    per_token: Tensor,
    per_row: Tensor | None,
    inside: Tensor,
    mask: Tensor,
    row: Tensor,
    rows: int,
    limits: tuple[float | None, float],
) -> dict[str, float]:
    """Of one rejection rule: its divergence over tokens and sequences, and the shares that it takes out.

    `per_token` [T] the value judged, `per_row` [R] the same for a sequence's rule, `inside` bool [T]; limits (low or
    None, high).
    """
    low, high = limits
    filled = row_sum(mask, row, rows) > 0
    sequences = (row_mean(per_token, mask, row, rows) if per_row is None else per_row)[filled]
    extremes = per_token[mask > 0] if per_row is None else sequences
    above, below = (per_token > high).to(per_token.dtype), (per_token < (low or 0.0)).to(per_token.dtype)
    row_above, row_below = _share(sequences > high), _share(sequences < (low or 0.0))
    none = torch.zeros(())
    gone = (~inside).to(per_token.dtype)
    found = {
        "mean": masked_mean(per_token, mask),
        "max": extremes.max(),
        "min": extremes.min(),
        "fraction_high": masked_mean(above, mask) if per_row is None else row_above,
        "fraction_low": none if low is None else (masked_mean(below, mask) if per_row is None else row_below),
        "std": _masked_std(per_token.clamp(low or 0.0, high), mask),
        "seq_mean": sequences.mean(),
        "seq_std": _std(sequences),
        "seq_max": sequences.max(),
        "seq_min": sequences.min(),
        "seq_max_deviation": sequences.abs().max(),
        "seq_fraction_high": row_above,
        "masked_fraction": masked_mean(gone, mask),
        "seq_masked_fraction": row_max(gone, mask, row, rows)[filled].mean(),
    }
    if low is not None:
        found["seq_fraction_low"] = row_below
    return {f"rollout_rs_{rule}_{name}": float(value) for name, value in found.items()}


def _share(condition: Tensor) -> Tensor:
    return condition.float().mean()


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else torch.zeros(())


def _masked_std(values: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((values - masked_mean(values, mask)).square(), mask).sqrt()
