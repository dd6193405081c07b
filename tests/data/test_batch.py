"""The typed batch keeps its columns together."""

import pytest
import torch
from tensordict import TensorDict

from spmd_rl.data.batch import Batch, Ragged, length_mask


def batch(*lengths: int) -> Batch:
    n = len(lengths)
    tokens = Ragged.from_rows([torch.arange(k) + 10 * i for i, k in enumerate(lengths)], dtype=torch.int64)
    return Batch(
        TensorDict({"uid": torch.arange(n)}, batch_size=[n]),
        {"responses": tokens},
        {"text": [f"t{i}" for i in range(n)]},
    )


def test_ragged_round_trips_through_padding() -> None:
    ragged = Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])])
    padded = ragged.padded(value=-1)
    assert padded.tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert Ragged.from_padded(padded, ragged.lengths).values.tolist() == [1, 2, 3]
    assert ragged.row_sums().tolist() == [3, 0, 3]
    assert length_mask(ragged.lengths, 2).tolist() == [[True, True], [False, False], [True, False]]


def test_select_takes_all_columns_in_order() -> None:
    picked = batch(2, 0, 3).select([2, 0])
    assert picked["uid"].tolist() == [2, 0]
    assert [r.tolist() for r in picked["responses"].rows()] == [[20, 21, 22], [0, 1]]
    assert picked["text"] == ["t2", "t0"]
    assert len(batch(2).select([])) == 0


def test_concat_of_empty_and_full() -> None:
    whole = Batch.concat([batch(2).select([]), batch(1, 2)])
    assert whole["uid"].tolist() == [0, 1]
    assert whole["responses"].lengths.tolist() == [1, 2]
    assert whole["text"] == ["t0", "t1"]


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="column 'text' has 1 rows, the batch has 2"):
        batch(1, 1)["text"] = ["x"]
    with pytest.raises(ValueError, match=r"sum\(lengths\)=3 != len\(values\)=2"):
        Ragged(torch.zeros(2), torch.tensor([3]))
