"""A foreign loader's copies, as they are recorded and proved."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from spmd_rl.weights.held import Box, TensorSpec
from spmd_rl.weights.trace import Untraceable, prove, trace

SPECS = [TensorSpec("q", (4, 6)), TensorSpec("k", (2, 6)), TensorSpec("o", (6, 4)), TensorSpec("head", (5, 6))]


class Fused(nn.Module):
    """One of two tensor-parallel ranks: q and k fused, o cut by columns, a vocabulary padded to 4 rows a rank."""

    def __init__(self, rank: int, fault: str = "") -> None:
        super().__init__()
        self.rank, self.fault = rank, fault
        self.qk = nn.Parameter(torch.full((3, 6), torch.nan))
        self.o = nn.Parameter(torch.full((6, 2), torch.nan))
        self.head = nn.Parameter(torch.full((4, 6), torch.nan))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "o" and self.fault == "left out":
                continue
            if name == "q":
                if self.fault == "computed":
                    tensor = tensor * 2
                if self.fault == "computed in place":
                    tensor.narrow(0, 0, 1).mul_(2)
                self.qk.data[:2].copy_(tensor.narrow(0, 2 * self.rank, 2))
            elif name == "k":
                at = slice(2, 3) if self.fault != "overwritten" else slice(1, 2)
                self.qk.data[at].copy_(tensor.chunk(2)[self.rank].clone().contiguous())
            elif name == "o":
                mine = slice(2 * self.rank, 2 * self.rank + 2)
                self.o.data.copy_(tensor.view(4, 6).t()[:, mine] if self.fault == "turned" else tensor[:, mine])
            elif name == "head":
                rows = tensor[4 * self.rank : 4 * self.rank + 4].to(torch.float32)
                target = self.head if self.fault != "elsewhere" else torch.zeros(4, 6)
                target.data[: len(rows)].copy_(rows)
                self.head.data[len(rows) :].fill_(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_cut_and_padded_parameters(rank: int) -> None:
    model = Fused(rank)
    held = trace(model.load, SPECS, dict(model.named_parameters()))
    rows = 4 if rank == 0 else 1
    assert [h.box for h in held] == [
        Box("q", (2 * rank, 0), (2, 6)),
        Box("k", (rank, 0), (1, 6)),
        Box("o", (0, 2 * rank), (6, 2)),
        Box("head", (4 * rank, 0), (rows, 6)),
    ]
    assert model.qk.isnan().all(), "tracing copies nothing"
    prove(model.load, SPECS, held)
    assert not model.head.isnan().any(), "padding is the loader's"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("computed", "q: the loader computes"),
        ("computed in place", "q: the loader computes aten.mul_.* in it"),
        ("left out", "o: the loader puts nothing into it"),
        ("elsewhere", "head: the loader copies it into something that is no parameter"),
        ("turned", "o: the loader reads it with strides"),
    ],
)
def test_what_cannot_be_traced_is_named(fault: str, said: str) -> None:
    model = Fused(0, fault)
    with pytest.raises(Untraceable, match=said):
        trace(model.load, SPECS, dict(model.named_parameters()))


def test_a_table_that_does_not_hold_is_found_by_the_proof() -> None:
    model = Fused(0)
    held = trace(model.load, SPECS, dict(model.named_parameters()))
    q, k = held[0], held[1]
    swapped = [type(q)(q.box, q.view.flip(0)), *held[1:]]
    with pytest.raises(Untraceable, match=r"q\[0:2, 0:6\]: the loader put something else there"):
        prove(model.load, SPECS, swapped)
    with pytest.raises(Untraceable, match=r"k\[0:1, 0:6\]: the loader put something else there"):
        prove(model.load, SPECS, [q, type(k)(k.box, model.qk.data[:1]), *held[2:]])
