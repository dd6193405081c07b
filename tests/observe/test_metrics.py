"""Merging, verl's names, and that no split of a batch changes a metric."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.observe.metrics import (
    Stat,
    batch_metrics,
    deterministic,
    explained_variance,
    finish,
    largest,
    mean,
    merge,
    merge_packed,
    mfu,
    moments,
    pack,
    smallest,
    timing_metrics,
    total,
)
from spmd_rl.observe.timer import Timer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "metrics.json"


def test_agrees_with_the_reference_values() -> None:
    kinds = {"min": smallest, "max": largest, "sum": total, "mean": lambda value: mean(value, 1)}
    for case in json.loads(FIXTURE.read_text()):
        make = kinds[case["params"]["aggregation"]]
        ranks = [merge({"m": make(value)} for value in rank) for rank in case["inputs"]["values_dp_by_micro"]]
        assert finish(merge(ranks))["m"] == case["outputs"]["value"]


def test_means_are_weighted_and_empty_pieces_do_not_count() -> None:
    merged = merge([{"a": mean(6.0, 3)}, {"a": mean(0.0, 0)}, {"a": mean(1.0, 1), "b": mean(0.0, 0)}])
    assert finish(merged) == {"a": 1.75}


def test_a_name_has_one_kind() -> None:
    with pytest.raises(ValueError, match="metric a is given as max and as mean"):
        merge([{"a": largest(1)}, {"a": mean(1, 1)}])


def test_batch_metrics_by_hand() -> None:
    metrics = finish(
        batch_metrics(
            scores_N=[1.0, 0.0, 9.0],
            response_lengths_N=[2, 4, 0],
            prompt_lengths_N=[3, 3, 6],
            max_response_length=4,
            max_prompt_length=6,
            rewards_N=[0.5, -0.5, 0.0],
            advantages_T=[1.0, 1.0, -1.0, -1.0, -1.0, -1.0],
        )
    )
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/rewards/min"] == -0.5
    assert metrics["critic/advantages/mean"] == pytest.approx(-1 / 3)
    assert metrics["response_length/mean"] == 2.0
    assert metrics["response_length/min"] == 0.0
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 3.0
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["perf/total_num_tokens"] == 18
    assert "critic/values/mean" not in metrics


def _batch(rows: list[tuple[float, int, int]]) -> dict[str, Stat]:
    scores, lengths, prompts = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    advantages = np.repeat(np.array(scores, float), np.array(lengths, int))
    return batch_metrics(scores, lengths, prompts, 8, 8, advantages_T=advantages)


ROWS = st.lists(st.tuples(st.floats(-4, 4), st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=12)


@given(ROWS, st.integers(0, 12), st.integers(0, 12))
def test_no_split_over_ranks_changes_a_metric(rows: list[tuple[float, int, int]], first: int, second: int) -> None:
    low, high = sorted((first, second))
    ranks = [_batch(rows[:low]), _batch(rows[low:high]), _batch(rows[high:])]
    whole = finish(_batch(rows))
    packed = np.stack([pack(rank) for rank in ranks])
    for merged in (finish(merge(ranks)), finish(merge_packed(ranks[0], packed))):
        assert merged == {name: pytest.approx(value, rel=1e-12, abs=1e-12) for name, value in whole.items()}


def test_explained_variance_is_that_of_the_whole() -> None:
    generator = np.random.default_rng(0)
    returns = generator.normal(size=50)
    values = returns + 0.3 * generator.normal(size=50)
    summed = moments(returns[:7], values[:7]) + moments(returns[7:], values[7:])
    expected = 1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5)
    assert explained_variance(summed) == pytest.approx(expected, rel=1e-9)
    assert math.isnan(explained_variance(moments([1.0], [1.0])))


def test_timing_metrics() -> None:
    metrics = timing_metrics({"generate": 2.0, "update_actor": 3.0, "step": 6.0}, 100, 200, ranks=2)
    assert metrics["timing_s/generate"] == 2.0
    assert metrics["timing_per_token_ms/generate"] == 10.0
    assert metrics["timing_per_token_ms/update_actor"] == 10.0
    assert metrics["perf/throughput"] == 25.0
    assert metrics["perf/time_per_step"] == 6.0
    assert "timing_per_token_ms/step" not in metrics
    assert mfu(flops=1e12, seconds=2.0, ranks=5, peak_flops=1e12) == 0.1


def test_deterministic_keeps_what_the_clock_did_not_decide() -> None:
    metrics: dict[str, Any] = {
        "step": 3,
        "actor/pg_loss": 0.1,
        "perf/total_num_tokens": 7,
        **timing_metrics({"step": 1.0, "generate": 0.5}, 1, 1, 1),
    }
    assert set(deterministic(metrics)) == {"step", "actor/pg_loss", "perf/total_num_tokens"}


def test_the_timer_adds_up_and_starts_anew() -> None:
    waited: list[int] = []
    timer = Timer(synchronize=lambda: waited.append(1))
    for _ in range(2):
        with timer.phase("generate"):
            pass
    with pytest.raises(RuntimeError), timer.phase("reward"):
        raise RuntimeError
    taken = timer.take()
    assert set(taken) == {"generate", "reward"}
    assert min(taken.values()) >= 0
    assert len(waited) == 2
    assert timer.take() == {}
