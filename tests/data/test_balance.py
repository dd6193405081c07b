"""Balancing and micro-batches: against verl's figures, and what must hold for any lengths."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config import ConfigError
from spmd_rl.data.balance import assign, balance, balance_report, consecutive, micro_batches, workload, zigzag

FIXTURES = Path(__file__).parents[1] / "fixtures"


def cases(name: str) -> list[Any]:
    rows = json.loads(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))
    return [pytest.param(row["inputs"]["seqlen"], row["params"], row["outputs"], id=row["name"]) for row in rows]


@pytest.mark.parametrize(("lengths", "params", "want"), cases("seqlen_balance"))
def test_balance_agrees_with_verl(lengths: list[int], params: dict[str, Any], want: dict[str, Any]) -> None:
    got = balance(lengths, params["k_partitions"], params["equal_size"])
    if "partitions" in want:
        assert got == want["partitions"]
        return
    assert workload(lengths) == want["workload"]
    assert got == want["partitions_v1_trainer_order"]
    assert [zigzag(rows, lengths) for rows in got] == want["partitions_v0_trainer_zigzag"]
    assert balance_report(lengths, got) == want["log"]


@pytest.mark.parametrize(
    ("lengths", "params", "want"), cases("micro_batches_dynamic") + cases("micro_batches_dynamic_v091")
)
def test_micro_batches_agree_with_verl_but_never_exceed_the_cap(
    lengths: list[int], params: dict[str, Any], want: dict[str, Any]
) -> None:
    cap = params["max_token_len"]
    multiple = params["num_batches_divided_by"] or 1
    got = micro_batches(
        lengths, cap, params["min_num_micro_batch"] or 1, multiple, small_ends=params["use_dynamic_bsz_balance"]
    )
    assert all(sum(lengths[i] for i in rows) <= cap for rows in got)
    assert sorted(i for rows in got for i in rows) == list(range(len(lengths)))
    assert len(got) % multiple == 0
    if max(want["tokens_per_micro"]) <= cap:
        assert got == want["micro_batch_indices"]
    else:
        assert len(got) > len(want["micro_batch_indices"])


LENGTHS = st.lists(st.integers(0, 500), max_size=60)


@given(LENGTHS, st.integers(1, 9))
@settings(deadline=None)
def test_balance_is_a_partition_no_worse_than_consecutive_chunks_plus_one_row(lengths: list[int], parts: int) -> None:
    got = balance(lengths, parts)
    assert len(got) == parts
    assert sorted(i for rows in got for i in rows) == list(range(len(lengths)))
    cost = workload(lengths)
    sums = [sum(cost[i] for i in rows) for rows in got]
    assert max(sums) <= sum(cost) / parts + max(cost, default=0)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=10), st.integers(1, 6))
@settings(deadline=None)
def test_equal_size_gives_every_part_the_same_number(lengths: list[int], parts: int) -> None:
    got = balance(lengths * parts, parts, equal_size=True)
    assert {len(rows) for rows in got} == {len(lengths)}


def test_another_cost_may_be_balanced() -> None:
    """A row of 10,000 tokens weighs as much as 10 rows of 1,000 by tokens, and as 13.5 by work (attention)."""
    lengths = [10_000] + [1000] * 20
    assert sorted(map(len, balance(lengths, 2, cost=list))) == [6, 15]
    assert sorted(map(len, balance(lengths, 2))) == [4, 17]


def test_equal_size_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="parts=2 does not divide 3 rows"):
        balance([1, 2, 3], 2, equal_size=True)


@given(LENGTHS, st.integers(500, 2000), st.integers(1, 5), st.integers(1, 3))
@settings(deadline=None)
def test_micro_batches_for_any_lengths(lengths: list[int], cap: int, at_least: int, multiple: int) -> None:
    got = micro_batches(lengths, cap, at_least, multiple)
    assert sorted(i for rows in got for i in rows) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in rows) <= cap for rows in got)
    assert len(got) >= at_least
    assert len(got) % multiple == 0
    empty = [not rows for rows in got]
    assert empty == sorted(empty), "empty micro-batches come last"


def test_a_row_over_the_cap_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match="a row of 101 tokens > max_tokens_per_micro_batch=100"):
        micro_batches([3, 101], 100)
    with pytest.raises(ConfigError, match="101 tokens"):
        assign([3, 101], [[0, 1]], 2, 100)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 8), st.integers(500, 1500), st.integers(1, 2))
@settings(deadline=None)
def test_assign_deals_every_row_once_and_keeps_ranks_in_step(
    lengths: list[int], mini_rows: int, dp_size: int, cap: int, multiple: int
) -> None:
    minibatch = consecutive(len(lengths), mini_rows)
    got = assign(lengths, minibatch, dp_size, cap, multiple)
    dealt = sorted(i for mini in got.micro for ranks in mini for rows in ranks for i in rows)
    assert dealt == list(range(len(lengths)))
    for number, ranks in enumerate(got.micro):
        assert len(ranks) == dp_size
        assert len({len(batches) for batches in ranks}) == 1, "as many micro-batches on every dp rank"
        assert len(ranks[0]) % multiple == 0
        for rank, batches in enumerate(ranks):
            for rows in batches:
                assert sum(lengths[i] for i in rows) <= cap
                assert all(got.dp_of_row[i] == rank and i in minibatch[number] for i in rows)
    assert sorted(i for rank in range(dp_size) for i in got.rows(rank)) == list(range(len(lengths)))


def test_mini_batches_do_not_depend_on_the_world_size() -> None:
    lengths = [(37 * i) % 91 + 1 for i in range(50)]
    minibatch = consecutive(50, 16)

    def members(dp_size: int) -> list[list[int]]:
        got = assign(lengths, minibatch, dp_size, 200)
        return [sorted(i for rank in range(dp_size) for i in got.mini_rows(m, rank)) for m in range(4)]

    assert members(1) == members(2) == members(3) == members(8)


def test_a_row_stays_on_its_rank_in_later_epochs() -> None:
    lengths = [5, 6, 7, 8, 9, 10]
    epochs = [*consecutive(6, 3), [1, 3, 5], [0, 2, 4]]
    got = assign(lengths, epochs, 2, 20)
    assert got.dp_of_row == assign(lengths, consecutive(6, 3), 2, 20).dp_of_row
    for mini, rows in enumerate(epochs):
        assert sorted(got.mini_rows(mini, 0) + got.mini_rows(mini, 1)) == sorted(rows)
        assert all(got.dp_of_row[i] == rank for rank in (0, 1) for i in got.mini_rows(mini, rank))


def test_a_row_in_no_mini_batch_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="row 1 of 2 is in no mini-batch"):
        assign([5, 6], [[0]], 1, 20)


def test_fewer_rows_than_ranks_leaves_some_without_work() -> None:
    got = assign([10, 20], consecutive(2, 2), 4, 100)
    assert sorted(got.dp_of_row) == [0, 1]
    assert [len(batches) for batches in got.micro[0]] == [1, 1, 1, 1]
    assert got.micro[0][3] == [[]]
