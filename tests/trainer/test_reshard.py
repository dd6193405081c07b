"""Rows that go from the actor's layout to another role's, pure parts: who owns what."""

from spmd_rl.data.balance import assign, consecutive


def test_rows_that_are_dealt_out_already_stay_with_their_owners() -> None:
    lengths = [5, 9, 2, 7, 7, 3, 8, 1]
    first = assign(lengths, consecutive(8, 4), 2, 20)
    again = assign(lengths, consecutive(8, 2) * 2, 2, 12, owner=first.dp_of_row)
    assert again.dp_of_row == first.dp_of_row
    assert len(again.micro) == 8
    for mini, rows in enumerate([*consecutive(8, 2), *consecutive(8, 2)]):
        for dp in range(2):
            assert sorted(again.mini_rows(mini, dp)) == [r for r in rows if first.dp_of_row[r] == dp]
        counts = {len(batches) for batches in again.micro[mini]}
        assert len(counts) == 1
