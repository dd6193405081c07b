"""Metrics as mergeable pieces: what a micro-batch or a rank knows is a `Partial`; any split merges to one value.

Names are verl's, so dashboards carry over. Shapes: N rows, T response tokens (ragged rows laid end to end).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Values = npt.ArrayLike
"""Anything numpy can read, a CPU tensor included."""

CLOCK_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/", "trainer/idle_s/")
DETERMINISTIC_PERF = ("perf/total_num_tokens",)


@dataclass(frozen=True)
class Stat:
    """One metric, as far as it is known here."""

    kind: str
    """mean | sum | min | max."""
    value: float
    """mean, sum: the weighted sum; min, max: the extreme (inf and -inf over nothing)."""
    weight: float = 1.0
    """mean: the sum of the weights; otherwise how many pieces went in (0 means none: the metric is left out)."""

    def finish(self) -> float | None:
        """The metric's value, or None when nothing went in."""
        if self.weight == 0:
            return None
        return self.value / self.weight if self.kind == "mean" else self.value


Partial = dict[str, Stat]
"""Metric name to what is known of it."""


def mean(total: float, weight: float) -> Stat:
    """A weighted mean from the sum of weight times value, and the sum of the weights."""
    return Stat("mean", float(total), float(weight))


def total(value: float) -> Stat:
    """A sum over all pieces."""
    return Stat("sum", float(value))


def smallest(value: float) -> Stat:
    """A minimum over all pieces."""
    return Stat("min", float(value))


def largest(value: float) -> Stat:
    """A maximum over all pieces; also for what is equal everywhere (learning rate, gradient norm)."""
    return Stat("max", float(value))


def merge(parts: Iterable[Partial]) -> Partial:
    """One partial from those of micro-batches or ranks. Sums are correctly rounded: the order does not matter.

    Raises ValueError when two parts give a name different kinds.
    """
    grouped: dict[str, list[Stat]] = {}
    for part in parts:
        for name, stat in part.items():
            grouped.setdefault(name, []).append(stat)
    return {name: _merge_stats(name, stats) for name, stats in grouped.items()}


def finish(partial: Partial) -> dict[str, float]:
    """Values by name; metrics into which nothing went are left out."""
    finished = {name: stat.finish() for name, stat in partial.items()}
    return {name: value for name, value in finished.items() if value is not None}


def pack(partial: Partial) -> Floats:
    """[names, 2] values and weights in the names' sorted order, to travel between ranks that hold the same names."""
    return np.array([[partial[name].value, partial[name].weight] for name in sorted(partial)], np.float64).reshape(
        -1, 2
    )


def merge_packed(like: Partial, packed_RN2: Values) -> Partial:
    """Merge what every rank packed ([ranks, names, 2]); `like` gives the names and the kinds."""
    parts = []
    for packed in np.asarray(packed_RN2, np.float64):
        rows = zip(sorted(like), packed.tolist(), strict=True)
        parts.append({name: Stat(like[name].kind, value, weight) for name, (value, weight) in rows})
    return merge(parts)


def spread(name: str, values: Values) -> Partial:
    """`name/mean`, `name/max` and `name/min` of the values, all weighing the same."""
    flat = np.asarray(values, np.float64).ravel()
    return {
        f"{name}/mean": mean(math.fsum(flat), flat.size),
        f"{name}/max": Stat("max", float(flat.max(initial=-math.inf)), float(flat.size)),
        f"{name}/min": Stat("min", float(flat.min(initial=math.inf)), float(flat.size)),
    }


def batch_metrics(
    scores_N: Values,
    response_lengths_N: Values,
    prompt_lengths_N: Values,
    max_response_length: int,
    max_prompt_length: int,
    rewards_N: Values | None = None,
    advantages_T: Values | None = None,
    returns_T: Values | None = None,
    values_T: Values | None = None,
) -> Partial:
    """verl's metrics of a batch, of the rows at hand; merge over ranks for the whole batch.

    `scores_N` is what the reward functions gave, `rewards_N` the sum of the token rewards after a KL penalty (unset:
    the scores). The `_T` arrays hold response tokens under the mask only. Rows with an empty reply (aborted) are left
    out of score and reward, as in verl.
    """
    scores, lengths = np.asarray(scores_N, np.float64), np.asarray(response_lengths_N, np.float64)
    rewards = scores if rewards_N is None else np.asarray(rewards_N, np.float64)
    prompts, kept = np.asarray(prompt_lengths_N, np.float64), lengths > 0
    partial = {
        **spread("critic/score", scores[kept]),
        **spread("critic/rewards", rewards[kept]),
        **spread("response_length", lengths),
        "response_length/clip_ratio": mean(float((lengths >= max_response_length).sum()), lengths.size),
        **spread("response_length_non_aborted", lengths[kept]),
        "response_length_non_aborted/clip_ratio": mean(float((lengths >= max_response_length).sum()), kept.sum()),
        "response/aborted_ratio": mean(float((~kept).sum()), lengths.size),
        **spread("prompt_length", prompts),
        "prompt_length/clip_ratio": mean(float((prompts >= max_prompt_length).sum()), prompts.size),
        "perf/total_num_tokens": total(float(lengths.sum() + prompts.sum())),
    }
    for name, tokens in (("advantages", advantages_T), ("returns", returns_T), ("values", values_T)):
        if tokens is not None:
            partial |= spread(f"critic/{name}", tokens)
    return partial


def moments(returns_T: Values, values_T: Values) -> Floats:
    """[count, Σr, Σr², Σ(r−v), Σ(r−v)²]: add them up over ranks for `explained_variance`."""
    returns = np.asarray(returns_T, np.float64).ravel()
    errors = returns - np.asarray(values_T, np.float64).ravel()
    sums = (returns, returns**2, errors, errors**2)
    return np.array([returns.size, *(math.fsum(values) for values in sums)], np.float64)


def explained_variance(moments_5: Values) -> float:
    """`critic/vf_explained_var`: 1 − Var(r − v) / (Var(r) + 1e-5), unbiased variances; NaN below two tokens."""
    count, first, second, error, error_second = np.asarray(moments_5, np.float64).tolist()
    if count < 2:
        return math.nan
    variance = (second - first**2 / count) / (count - 1)
    error_variance = (error_second - error**2 / count) / (count - 1)
    return 1.0 - error_variance / (variance + 1e-5)


def timing_metrics(
    seconds: Mapping[str, float], prompt_tokens: float, response_tokens: float, ranks: int
) -> dict[str, float]:
    """`timing_s/*`, `timing_per_token_ms/*` and `perf/*` of one step.

    `seconds` maps phases to their time and holds `step`, the whole. `generate` is divided by the response tokens, the
    other phases by all tokens. `perf/throughput` is tokens a second and rank.
    """
    tokens = prompt_tokens + response_tokens
    timed = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    for phase, value in seconds.items():
        share = response_tokens if phase == "generate" else tokens
        if phase != "step" and share > 0:
            timed[f"timing_per_token_ms/{phase}"] = 1000 * value / share
    step = seconds["step"]
    timed["perf/time_per_step"] = step
    timed["perf/throughput"] = tokens / (step * ranks) if step > 0 else 0.0
    return timed


def mfu(flops: float, seconds: float, ranks: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: FLOPs of the phase over what all ranks' cards could have done in that time."""
    return flops / (seconds * ranks * peak_flops) if seconds > 0 else 0.0


def deterministic(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics without those that the clock decided: equal for a resumed and an uninterrupted run."""
    return {
        name: value
        for name, value in metrics.items()
        if name in DETERMINISTIC_PERF or not name.startswith(CLOCK_PREFIXES)
    }


def _merge_stats(name: str, stats: Sequence[Stat]) -> Stat:
    kinds = {stat.kind for stat in stats}
    if len(kinds) > 1:
        raise ValueError(f"metric {name} is given as {' and as '.join(sorted(kinds))}")
    values, weight = [stat.value for stat in stats], math.fsum(stat.weight for stat in stats)
    merged = {"min": min, "max": max}.get(stats[0].kind, math.fsum)(values)
    return Stat(stats[0].kind, float(merged), weight)
