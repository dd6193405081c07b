"""The copies of copies.py as one Triton launch a dtype pair: a table of contiguous runs, one program a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.weights.copies import checksum

RUN = 8192
"""Elements a program copies at most."""
BLOCK = 2048
SHORTEST = 32
"""Contiguous elements below which a program a run is wasteful: torch copies such a slice."""
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass
class _Runs:
    """Runs of one dtype pair; rows of int64: source, target, elements, place, pair. `aligned`: the first three are all
    multiples of 16, which lets the compiler load and store 16 bytes at a time."""

    source: torch.dtype
    target: torch.dtype
    aligned: bool
    table_5R: Tensor


class CopyTable:
    """See `Copies`."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.targets, self.sources = targets, sources
        self.device = targets[0].device
        self.pairs = len(targets)
        self.odd = [i for i in range(self.pairs) if not _regular(targets[i], sources[i])]
        regular = sorted(set(range(self.pairs)) - set(self.odd))
        self.copying = _tables([(targets[i], sources[i], i) for i in regular], self.device)
        self.summing = _tables([(targets[i], targets[i], i) for i in regular], self.device)

    def run(self) -> Tensor:
        sums = torch.zeros(self.pairs, dtype=torch.int32, device=self.device)
        for runs in self.copying:
            _launch(runs, sums, copy=True)
        for i in self.odd:
            self.targets[i].copy_(self.sources[i])
            sums[i] = checksum(self.sources[i].to(self.targets[i].dtype))
        return sums

    def sums(self) -> Tensor:
        sums = torch.zeros(self.pairs, dtype=torch.int32, device=self.device)
        for runs in self.summing:
            _launch(runs, sums, copy=False)
        for i in self.odd:
            sums[i] = checksum(self.targets[i])
        return sums


def _regular(target: Tensor, source: Tensor) -> bool:
    """Whether a pair is made of runs that are long enough, of dtypes that the kernel knows."""
    known = target.dtype in _TYPES and source.dtype in _TYPES
    return known and _run_length(target, source) >= min(SHORTEST, target.numel())


def _run_length(*views: Tensor) -> int:
    """Elements at the end of the shape that lie one after another in every view."""
    length = 1
    for dim in reversed(range(views[0].ndim)):
        if views[0].shape[dim] > 1 and any(v.stride(dim) != length for v in views):
            break
        length *= views[0].shape[dim]
    return length


def _tables(pairs: Sequence[tuple[Tensor, Tensor, int]], device: torch.device) -> list[_Runs]:
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[Tensor]] = {}
    for target, source, pair in pairs:
        rows_5R = _rows(target, source, pair)
        aligned = bool((rows_5R[:3] % 16 == 0).all())
        groups.setdefault((source.dtype, target.dtype, aligned), []).append(rows_5R)
    return [
        _Runs(source, target, aligned, torch.cat(rows, 1).contiguous().to(device))
        for (source, target, aligned), rows in groups.items()
    ]


def _rows(target: Tensor, source: Tensor, pair: int) -> Tensor:
    """The runs of one pair, int64 [5, R] on the host."""
    run = _run_length(target, source)
    outer = torch.Size(_outer(target, run))
    starts_t, starts_s = _starts(target, outer), _starts(source, outer)
    within = torch.arange(0, run, RUN)
    offsets_t = (starts_t[:, None] + within * target.element_size()).flatten()
    offsets_s = (starts_s[:, None] + within * source.element_size()).flatten()
    count = (run - within).clamp(max=RUN).repeat(len(starts_t))
    place = (torch.arange(len(starts_t))[:, None] * run + within).flatten()
    return torch.stack(
        [source.data_ptr() + offsets_s, target.data_ptr() + offsets_t, count, place, torch.full_like(count, pair)]
    )


def _outer(view: Tensor, run: int) -> list[int]:
    """The leading dims whose product with `run` is the whole."""
    shape, left = list(view.shape), run
    while left > 1:
        left //= shape.pop()
    return shape


def _starts(view: Tensor, outer: torch.Size) -> Tensor:
    """Byte offset of every run from the view's beginning, int64 [runs]."""
    starts = torch.zeros(1, dtype=torch.int64)
    for dim, size in enumerate(outer):
        starts = (starts[:, None] + torch.arange(size) * view.stride(dim) * view.element_size()).flatten()
    return starts


def _launch(runs: _Runs, sums: Tensor, copy: bool) -> None:
    count = runs.table_5R.shape[1]
    _copy_kernel[(count,)](
        runs.table_5R, sums, count, _TYPES[runs.source], _TYPES[runs.target], runs.aligned, copy,
        16 if runs.target.itemsize == 2 else 32, RUN, BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    table, sums, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, ALIGNED: tl.constexpr, COPY: tl.constexpr,
    BITS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """One run: load, convert, store if COPY, and add the run's part of its pair's checksum."""
    run = tl.program_id(0).to(tl.int64)
    source = tl.load(table + run).to(tl.pointer_type(SOURCE))
    target = tl.load(table + count + run).to(tl.pointer_type(TARGET))
    elements = tl.load(table + 2 * count + run).to(tl.int32)
    place = tl.load(table + 3 * count + run).to(tl.int32)
    pair = tl.load(table + 4 * count + run)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        elements = tl.multiple_of(elements, 16)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for at in range(0, RUN, BLOCK):
        i = at + tl.arange(0, BLOCK)
        mask = i < elements
        values = tl.load(source + i, mask=mask, other=0.0).to(TARGET)
        if COPY:
            tl.store(target + i, values, mask=mask)
        if BITS == 16:
            bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        else:
            bits = values.to(tl.int32, bitcast=True)
        weight = ((place + i) * -1640531535 + -1640531527) | 1
        total += tl.where(mask, (bits + 1) * weight, 0)
    tl.atomic_add(sums + pair, tl.sum(total, axis=0))
