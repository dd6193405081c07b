"""mean@k, best@k, worst@k, maj@k."""

from collections import Counter

import numpy as np
import pytest

from spmd_rl.observe.validation import validation_metrics


def test_one_sample_a_prompt_gives_the_mean_over_prompts() -> None:
    metrics = validation_metrics(["sums"] * 4, [0, 1, 2, 3], {"reward": [1, 0, 0, 1]})
    assert metrics == {"val-core/sums/reward/mean@1": 0.5}


def test_accuracy_leads_when_there_is_one() -> None:
    metrics = validation_metrics(["a", "b"], [0, 0], {"reward": [0.5, 1.0], "acc": [0, 1]})
    assert metrics == {
        "val-aux/a/reward/mean@1": 0.5,
        "val-core/a/acc/mean@1": 0.0,
        "val-aux/b/reward/mean@1": 1.0,
        "val-core/b/acc/mean@1": 1.0,
    }


def test_names_follow_the_number_of_samples() -> None:
    metrics = validation_metrics(["s"] * 6, [7] * 6, {"reward": [0, 1, 0, 1, 1, 0]}, list("abcabc"))
    core = {name.rsplit("/reward/")[1] for name in metrics if name.startswith("val-core")}
    assert core == {"mean@6", "best@6/mean", "best@6/std", "maj@6/mean", "maj@6/std"}
    sizes = {name.split("@")[1].split("/")[0] for name in metrics if "best" in name}
    assert sizes == {"2", "4", "6"}
    assert "val-aux/s/reward/worst@6/mean" in metrics
    assert "val-aux/s/reward/std@6" in metrics


def test_bootstrap_by_loops() -> None:
    """The same draws as numpy's global generator under that seed, voted and compared one by one."""
    values, answers = [0.0, 1.0, 0.25, 1.0], ["7", "8", "7", "9"]
    metrics = validation_metrics(["s"] * 4, [0] * 4, {"reward": values}, answers, seed=42, resamples=200)
    for k in (2, 4):
        np.random.seed(42)
        best, voted = [], []
        for draw in np.random.choice(4, size=(200, k), replace=True):
            best.append(max(values[i] for i in draw))
            winner = Counter(answers[i] for i in draw).most_common(1)[0][0]
            voted.append(next(values[i] for i in draw if answers[i] == winner))
        section = "val-core" if k == 4 else "val-aux"
        assert metrics[f"{section}/s/reward/best@{k}/mean"] == pytest.approx(np.mean(best), rel=1e-12)
        assert metrics[f"{section}/s/reward/maj@{k}/mean"] == pytest.approx(np.mean(voted), rel=1e-12)
        assert metrics[f"{section}/s/reward/maj@{k}/std"] == pytest.approx(np.std(voted), rel=1e-12)


def test_the_callers_generator_is_left_alone_and_the_samples_order_across_prompts_does_not_matter() -> None:
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    first = validation_metrics(["s"] * 4, [0, 0, 1, 1], {"reward": [0, 1, 1, 1]})
    assert np.random.rand() == expected
    assert first == validation_metrics(["s"] * 4, [1, 0, 1, 0], {"reward": [1, 0, 1, 1]})
