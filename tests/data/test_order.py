"""The epoch order: everything once, reproducible, resumable."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config import ConfigError
from spmd_rl.data.order import PromptOrder, epoch_order


@dataclass
class Numbers:
    """Rows that are their own uids."""

    n: int
    fingerprint: int = 7

    def __len__(self) -> int:
        return self.n

    def at(self, uid: int) -> int:
        return uid


def order(n: int, batch: int, **options: Any) -> PromptOrder[int]:
    return PromptOrder(Numbers(n), batch, **options)


def drain(prompts: PromptOrder[int]) -> list[list[int]]:
    out = []
    while batch := prompts.take():
        out.append(batch)
    return out


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 50))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(n, seed, epoch).tolist()) == list(range(n))


def test_the_order_is_fixed_for_ever() -> None:
    """These figures may never change: a resumed run relies on them across versions and machines."""
    assert epoch_order(8, seed=1, epoch=0).tolist() == [2, 5, 1, 4, 6, 0, 3, 7]
    assert epoch_order(8, seed=1, epoch=1).tolist() == [4, 2, 0, 7, 1, 3, 6, 5]
    assert epoch_order(8, seed=2, epoch=0).tolist() == [1, 3, 0, 5, 7, 2, 6, 4]


def test_places_are_uniform() -> None:
    """Row 0's place over many epochs: each of 5 within 5 sigma of its share."""
    places = [epoch_order(5, 0, e).tolist().index(0) for e in range(5000)]
    assert all(abs(places.count(p) - 1000) < 5 * (1000 * 0.8) ** 0.5 for p in range(5))


@pytest.mark.parametrize("drop_last", [True, False])
def test_each_row_once_an_epoch(drop_last: bool) -> None:
    batches = drain(prompts := order(10, 4, epochs=3, drop_last=drop_last))
    assert len(batches) == prompts.total_steps() == (6 if drop_last else 9)
    assert prompts.exhausted
    for epoch in range(3):
        uids = [u for b in batches for u in b if u // 10 == epoch]
        assert len(uids) == len(set(uids)) == (8 if drop_last else 10)
    assert [len(b) for b in batches[:3]] == ([4, 4, 4] if drop_last else [4, 4, 2])


def test_epochs_differ_unless_not_shuffled() -> None:
    shuffled, plain = order(50, 50, epochs=2), order(50, 50, epochs=2, shuffle=False)
    first, second = drain(shuffled)
    assert [u % 50 for u in first] != [u % 50 for u in second]
    assert drain(plain) == [list(range(50)), list(range(50, 100))]


def test_batch_size_does_not_change_the_order() -> None:
    threes, fours = drain(order(12, 3, epochs=1)), drain(order(12, 4, epochs=1))
    assert [u for b in threes for u in b] == [u for b in fours for u in b]


def test_resume_gives_the_very_next_rows_also_between_takes_of_one_step() -> None:
    whole = drain(order(10, 3, epochs=4, seed=5))
    for stop in range(len(whole) + 1):
        before = order(10, 3, epochs=4, seed=5)
        for _ in range(stop):
            before.take()
        after = order(10, 3, epochs=4, seed=5)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert drain(after) == whole[stop:]


def test_endless_without_epochs() -> None:
    prompts = order(4, 4)
    assert prompts.total_steps() is None
    assert [len(prompts.take()) for _ in range(20)] == [4] * 20
    assert not prompts.exhausted


def test_take_more_than_once_a_step() -> None:
    prompts = order(10, 4, epochs=1, shuffle=False)
    assert prompts.take() == [0, 1, 2, 3]
    assert prompts.take(2) == [4, 5]
    assert prompts.take() == [6, 7, 8, 9]
    assert prompts.take() == []
    assert prompts.take(1) == []


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size=5 > 4 rows.*use at most 4, or data\.drop_last=false"
    ):
        order(4, 5)
    assert drain(order(4, 5, drop_last=False, epochs=1, shuffle=False)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptOrder(Numbers(9), 3), "number of prompts differ: 10 then, 9 now"),
        (PromptOrder(Numbers(10), 3, seed=1), r"data\.seed differ: 0 then, 1 now"),
        (PromptOrder(Numbers(10), 3, shuffle=False), r"data\.shuffle differ"),
        (PromptOrder(Numbers(10, fingerprint=8), 3), r"prompts \(their token ids\) differ"),
    ],
)
def test_a_state_of_other_data_is_refused(other: PromptOrder[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(order(10, 3).state_dict())
