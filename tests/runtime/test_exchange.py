"""Batches that move between ranks arrive as they were: values, types and order."""

import pytest

from tests.runtime import ranks
from tests.world import Worlds


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_ragged_batches_arrive_whole_and_in_order(worlds: Worlds, size: int) -> None:
    assert worlds[size].run(ranks.move_batches, list(range(60))) == [[]] * size


def test_rows_that_nobody_or_two_ranks_hold(worlds: Worlds) -> None:
    for lost, twice in worlds[2].run(ranks.move_what_nobody_or_two_hold):
        assert "rows [5] were held by no rank" in lost
        assert "3 rows came twice" in twice


def test_sums_have_the_same_bits_on_every_rank(worlds: Worlds) -> None:
    results = worlds[4].run(ranks.add_up)
    assert len({tuple(bits) for bits, _ in results}) == 1
    for _, merged in results:
        assert merged == {"a": 12 / 6, "b": 6.0, "c": 0.0}
