"""Ways to lay the same few tensors over ranks."""

from collections.abc import Callable

import torch

from spmd_rl.weights.held import Box, TensorSpec
from spmd_rl.weights.table import Manifest

SPECS = [
    TensorSpec("embed", (13, 6)),
    TensorSpec("q", (8, 6)),
    TensorSpec("o", (6, 8)),
    TensorSpec("norm", (6,)),
    TensorSpec("one", (1, 10)),
    TensorSpec("expert", (4, 5)),
]
CUT = {"embed": 0, "q": 0, "o": 1, "norm": None, "one": None, "expert": 0}
"""The dim that tensor parallelism cuts."""


def split(box: Box, dim: int, parts: int, part: int) -> Box | None:
    """Part of `parts` along a dim, in chunks of equal size (the last ones may be smaller, or nothing)."""
    chunk = -(-box.size[dim] // parts)
    start, end = min(part * chunk, box.size[dim]), min((part + 1) * chunk, box.size[dim])
    if start == end:
        return None
    starts, sizes = list(box.start), list(box.size)
    starts[dim], sizes[dim] = starts[dim] + start, end - start
    return Box(box.name, tuple(starts), tuple(sizes))


def _whole(spec: TensorSpec) -> Box:
    return Box(spec.name, (0,) * len(spec.shape), spec.shape)


def _fsdp(parts: Callable[[int], int]) -> Callable[[TensorSpec, int, int], Box | None]:
    return lambda spec, rank, ranks: split(_whole(spec), 0, parts(ranks), rank % parts(ranks))


def _tp(parts: int) -> Callable[[TensorSpec, int, int], Box | None]:
    def box(spec: TensorSpec, rank: int, ranks: int) -> Box | None:
        dim, tp = CUT[spec.name], min(parts, ranks)
        return _whole(spec) if dim is None else split(_whole(spec), dim, tp, rank % tp)

    return box


LAYOUTS: dict[str, Callable[[TensorSpec, int, int], Box | None]] = {
    "whole": lambda spec, rank, ranks: _whole(spec),
    "fsdp": _fsdp(lambda ranks: ranks),
    "ddp2_fsdp2": _fsdp(lambda ranks: max(1, ranks // 2)),
    "tp2": _tp(2),
    "tp4": _tp(4),
    "first_only": lambda spec, rank, ranks: _whole(spec) if rank == 0 else None,
}


def boxes(layout: str, rank: int, ranks: int) -> tuple[Box, ...]:
    found = (LAYOUTS[layout](spec, rank, ranks) for spec in SPECS)
    return tuple(box for box in found if box is not None)


def manifests(source: str, target: str, ranks: int) -> list[Manifest]:
    made = []
    for rank in range(ranks):
        wants = boxes(target, rank, ranks)
        made.append(Manifest(boxes(source, rank, ranks), wants, (torch.bfloat16,) * len(wants)))
    return made
