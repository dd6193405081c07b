"""Validation metrics over groups of samples: mean@k, best@k, worst@k and maj@k, under verl's names."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CORE = ("acc", "reward")
"""The variable that goes under `val-core`: the first of these that is there."""


def validation_metrics(
    data_sources: Sequence[str],
    uids: Sequence[int],
    variables: Mapping[str, Sequence[float]],
    predictions: Sequence[str] | None = None,
    seed: int = 42,
    resamples: int = 1000,
) -> dict[str, float]:
    """`val-core/<source>/<variable>/mean@k` and its kin, from N samples given as parallel sequences.

    Samples with one (data source, uid) are one prompt's. Each metric is taken per prompt and averaged over prompts.
    best@k, worst@k and maj@k (with `predictions`, the extracted answers) are bootstrap estimates: the mean and standard
    deviation over `resamples` draws of k of the prompt's samples, with replacement, from a generator of their own with
    this seed; equal to verl's, which reseeds numpy's global one. k runs over 2, 4, 8 … and the number of samples.
    """
    collected: dict[tuple[str, str, str], list[float]] = {}
    for (source, _), rows in sorted(_by_prompt(data_sources, uids).items()):
        votes = None if predictions is None else _codes([predictions[row] for row in rows])
        for variable, values in variables.items():
            per_prompt = _prompt_metrics(np.array([values[row] for row in rows], np.float64), votes, seed, resamples)
            for metric, value in per_prompt.items():
                collected.setdefault((source, variable, metric), []).append(value)
    core = next((name for name in CORE if name in variables), None)
    largest: dict[tuple[str, str], int] = {}
    for source, variable, metric in collected:
        largest[source, variable] = max(largest.get((source, variable), 0), _k(metric))
    named = {}
    for (source, variable, metric), found in collected.items():
        leading = metric.startswith(("mean", "best", "maj")) and _k(metric) == largest[source, variable]
        section = "val-core" if variable == core and leading else "val-aux"
        named[f"{section}/{source}/{variable}/{metric}"] = float(np.mean(found))
    return named


def _by_prompt(data_sources: Sequence[str], uids: Sequence[int]) -> dict[tuple[str, int], list[int]]:
    rows: dict[tuple[str, int], list[int]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        rows.setdefault((source, int(uid)), []).append(row)
    return rows


def _prompt_metrics(values_G: Floats, votes_G: Ints | None, seed: int, resamples: int) -> dict[str, float]:
    count = len(values_G)
    metrics = {f"mean@{count}": float(values_G.mean())}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(values_G.std())
    for k in _sizes(count):
        draws_RK = np.random.RandomState(seed).choice(count, size=(resamples, k), replace=True)
        drawn_RK = values_G[draws_RK]
        estimates = {"best": drawn_RK.max(1), "worst": drawn_RK.min(1)}
        if votes_G is not None:
            estimates["maj"] = _majority(drawn_RK, votes_G[draws_RK])
        for name, values_R in estimates.items():
            metrics[f"{name}@{k}/mean"] = float(values_R.mean())
            metrics[f"{name}@{k}/std"] = float(values_R.std())
    return metrics


def _majority(values_RK: Floats, votes_RK: Ints) -> Floats:
    """[R] the value of the first sample that gave the commonest answer; of equally common ones, the first given."""
    counts_RK = (votes_RK[:, :, None] == votes_RK[:, None, :]).sum(-1)
    return np.take_along_axis(values_RK, counts_RK.argmax(1)[:, None], 1)[:, 0]


def _codes(answers: Sequence[str]) -> Ints:
    """[G] equal answers as equal numbers."""
    return np.unique(np.array([str(answer) for answer in answers]), return_inverse=True)[1].astype(np.int64)


def _sizes(count: int) -> list[int]:
    powers = [2**power for power in range(1, count.bit_length()) if 2**power < count]
    return [*powers, count]


def _k(metric: str) -> int:
    return int(metric.split("@")[1].split("/")[0])
