"""Batches that move between ranks arrive as they were: values, types and order; and nothing is sent twice."""

import pytest

from tests.runtime import ranks
from tests.world import Worlds

REF = ["actor.use_kl_loss=true"]


def pool_of(size: int) -> list[str]:
    """The reference on a pool of its own."""
    return [*REF, f"+pools.ref.n_gpus_per_node={size}", "ref.pool=ref"]


POOLS = {
    "1": (1, REF),
    "2": (2, REF),
    "4": (4, REF),
    "1+1": (2, pool_of(1)),
    "2+2": (4, pool_of(2)),
    "1+3": (4, pool_of(3)),
    "3+1": (4, pool_of(1)),
}


@pytest.mark.parametrize("case", POOLS)
def test_random_ragged_batches_arrive_whole_and_in_order(worlds: Worlds, case: str) -> None:
    size, overrides = POOLS[case]
    assert worlds[size].run(ranks.move_batches, list(range(12)), [], *overrides) == [[]] * size


@pytest.mark.parametrize(("case", "blinded"), [("2", [0, 1]), ("2+2", [2]), ("1+3", [0]), ("3+1", [0, 1, 2])])
def test_ranks_that_may_not_read_each_other_send(worlds: Worlds, case: str, blinded: list[int]) -> None:
    size, overrides = POOLS[case]
    assert worlds[size].run(ranks.move_batches, list(range(6)), blinded, *overrides) == [[]] * size


@pytest.mark.parametrize("case", ["1", "4", "1+1", "3+1"])
def test_everybody_hears_of_all_rows(worlds: Worlds, case: str) -> None:
    size, overrides = POOLS[case]
    assert worlds[size].run(ranks.gather_batches, list(range(20)), *overrides) == [[]] * size


@pytest.mark.parametrize("blinded", [[], [1]], ids=["read", "sent"])
def test_long_columns_go_in_pieces(worlds: Worlds, blinded: list[int]) -> None:
    assert worlds[2].run(ranks.move_in_pieces, 100, blinded) == [[]] * 2


def test_messages_of_any_length(worlds: Worlds) -> None:
    assert worlds[4].run(ranks.talk, list(range(20))) == [[]] * 4


def test_nothing_stays_behind(worlds: Worlds) -> None:
    for left in worlds[2].run(ranks.leave_nothing, 10):
        assert left["read"] > 10 * 2**23
        assert left["fds"] == left["shared"] == set()
        assert left["bytes"] < 2 * 2**23


def test_rows_that_nobody_or_two_ranks_hold(worlds: Worlds) -> None:
    for lost, twice in worlds[2].run(ranks.move_what_nobody_or_two_hold):
        assert "rows [5] were held by no rank" in lost
        assert "3 rows came twice" in twice


def test_sums_have_the_same_bits_on_every_rank(worlds: Worlds) -> None:
    results = worlds[4].run(ranks.add_up)
    assert len({tuple(bits) for bits, _ in results}) == 1
    for _, merged in results:
        assert merged == {"a": 12 / 6, "b": 6.0, "c": 0.0}
