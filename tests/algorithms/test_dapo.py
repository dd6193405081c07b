import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms import group_index, has_signal, overlong_penalty, refill


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=12))
def test_a_group_has_signal_when_its_scores_differ(rows: list[tuple[int, float]]) -> None:
    uid, score = torch.tensor([u for u, _ in rows]), torch.tensor([s for _, s in rows])
    kept = has_signal(score, group_index(uid))
    for i, (u, _) in enumerate(rows):
        scores = [s for v, s in rows if v == u]
        assert kept[i] == (len(set(scores)) > 1 or len(scores) == 1)


def test_refill_ends() -> None:
    assert refill(kept=8, wanted=8, rounds=1, max_rounds=1, exhausted=True) == "train"
    assert refill(kept=7, wanted=8, rounds=1, max_rounds=2, exhausted=False) == "sample"
    assert refill(kept=7, wanted=8, rounds=2, max_rounds=2, exhausted=False) == "stop"
    assert refill(kept=7, wanted=8, rounds=99, max_rounds=0, exhausted=False) == "sample"
    assert refill(kept=7, wanted=8, rounds=1, max_rounds=0, exhausted=True) == "stop"


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 60, 80, 90, 100])
    penalty = overlong_penalty(lengths, max_response_length=100, buffer_len=20, penalty_factor=2.0)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, 0.0, -1.0, -2.0])
    with pytest.raises(ValueError, match="overlong_buffer_len=0"):
        overlong_penalty(lengths, 100, 0)
