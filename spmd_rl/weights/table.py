"""What goes where: computed once from what every rank holds and what every rank wants. Pure.

A piece is a box that one rank holds and another wants. Who wants it and holds it itself copies it; else the nearest
of its holders sends it, once. Pieces are cut into buckets along the checkpoint's order, so that no rank has more than
`bucket_bytes` of a bucket on its way; both ends compute the same buckets in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from spmd_rl.weights.held import Box, TensorSpec, covers


class SyncError(RuntimeError):
    """Weights that cannot arrive, or did not."""


@dataclass(frozen=True)
class Manifest:
    """What a rank tells the others: the boxes it holds, those it wants, and the dtype that each of these becomes."""

    holds: tuple[Box, ...]
    wants: tuple[Box, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Piece:
    """A box on its way, in its final dtype; `at` is the number of the held (or wanted) box that it is a part of."""

    box: Box
    dtype: torch.dtype
    at: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.box.size).numel() * self.dtype.itemsize


@dataclass
class Bucket:
    """The pieces that this rank sends to and receives from each rank in one exchange."""

    send: list[list[Piece]]
    recv: list[list[Piece]]

    def sends_alike(self, me: int) -> bool:
        """Whether every other rank gets the same pieces from this one."""
        boxes = [[p.box for p in pieces] for peer, pieces in enumerate(self.send) if peer != me]
        return all(b == boxes[0] for b in boxes)


@dataclass
class Table:
    """One rank's part of a weight sync."""

    local: list[tuple[Piece, int]] = field(default_factory=list)
    """What it copies from itself: (piece of a wanted box, number of the held box it comes from)."""
    buckets: list[Bucket] = field(default_factory=list)
    """What it exchanges; as many on every rank."""


def build_table(specs: Sequence[TensorSpec], everyone: Sequence[Manifest], me: int, bucket_bytes: int) -> Table:
    """The part of rank `me` of len(everyone). Raises SyncError when something wanted is held by nobody."""
    holders = _holders(everyone)
    _check(specs, everyone, holders)
    slabs = _slabs(specs, everyone, bucket_bytes)
    size = len(everyone)
    count = 1 + max((bucket for parts in slabs.values() for bucket, _ in parts), default=-1)
    table = Table([], [Bucket([[] for _ in range(size)], [[] for _ in range(size)]) for _ in range(count)])
    mine = {box: at for at, box in enumerate(everyone[me].holds)}
    names = {box.name for box in mine}
    for peer, manifest in enumerate(everyone):
        for at, (want, dtype) in enumerate(zip(manifest.wants, manifest.dtypes, strict=True)):
            if peer != me and want.name not in names:
                continue
            for source, held, part in _sources(want, holders, peer, size):
                if source == me == peer:
                    table.local.append((Piece(part, dtype, at), mine[held]))
                elif me in (source, peer):
                    for bucket, box in _cut(part, slabs):
                        if peer == me:
                            table.buckets[bucket].recv[source].append(Piece(box, dtype, at))
                        else:
                            table.buckets[bucket].send[peer].append(Piece(box, dtype, mine[held]))
    order = {spec.name: i for i, spec in enumerate(specs)}
    for exchanged in table.buckets:
        for pieces in (*exchanged.send, *exchanged.recv):
            pieces.sort(key=lambda p: (order[p.box.name], p.box.start))
    table.buckets = table.buckets if size > 1 else []
    return table


Holders = dict[str, dict[Box, list[int]]]
Slabs = dict[str, list[tuple[int, Box]]]


def _holders(everyone: Sequence[Manifest]) -> Holders:
    found: Holders = {}
    for rank, manifest in enumerate(everyone):
        for box in manifest.holds:
            found.setdefault(box.name, {}).setdefault(box, []).append(rank)
    return found


def _sources(want: Box, holders: Holders, me: int, size: int) -> Iterator[tuple[int, Box, Box]]:
    """Who gives rank `me` which part of `want`, from which held box: itself where it can, else the nearest holder.

    With H holders of N ranks (replicas of ddp), one in its own block of N/H ranks is nearer than any other.
    """
    for held, ranks in holders[want.name].items():
        part = want.overlap(held)
        if part is not None:
            block = max(1, size // len(ranks))
            yield min(ranks, key=lambda r: (r != me, r // block != me // block, abs(r - me), r)), held, part


def _slabs(specs: Sequence[TensorSpec], everyone: Sequence[Manifest], limit: int) -> Slabs:
    """(bucket, rows) of every tensor in order, at most `limit` bytes a bucket (or one row, if that is more)."""
    widths: dict[str, int] = {}
    for manifest in everyone:
        for want, dtype in zip(manifest.wants, manifest.dtypes, strict=True):
            widths[want.name] = max(widths.get(want.name, 0), dtype.itemsize)
    bucket, filled = 0, 0
    slabs: Slabs = {}
    for spec in specs:
        rows, row = spec.shape[0], torch.Size(spec.shape[1:]).numel() * widths.get(spec.name, 0)
        at = 0
        while at < rows:
            room = (limit - filled) // row if row else rows
            if room < 1 and filled:
                bucket, filled = bucket + 1, 0
                continue
            take = min(rows - at, max(room, 1))
            box = Box(spec.name, (at, *[0] * (len(spec.shape) - 1)), (take, *spec.shape[1:]))
            slabs.setdefault(spec.name, []).append((bucket, box))
            at, filled = at + take, filled + take * row
    return slabs


def _cut(part: Box, slabs: Slabs) -> Iterator[tuple[int, Box]]:
    for bucket, slab in slabs[part.name]:
        box = part.overlap(slab)
        if box is not None:
            yield bucket, box


def _check(specs: Sequence[TensorSpec], everyone: Sequence[Manifest], holders: Holders) -> None:
    """Every element of the checkpoint is held by someone, every tensor is wanted by someone, and nothing else is."""
    wanted = {want.name for manifest in everyone for want in manifest.wants}
    known = {spec.name for spec in specs}
    if strange := sorted(wanted - known):
        raise SyncError(f"weight sync: the rollout wants {strange[0]}, and the actor has no such tensor")
    if left := [spec.name for spec in specs if spec.name not in wanted]:
        raise SyncError(f"weight sync: no rank of the rollout has a place for {left[0]} (of {len(left)} tensors)")
    missing = covers((box for boxes in holders.values() for box in boxes), specs)
    if missing:
        raise SyncError(f"weight sync: parts of {missing[0]} (of {len(missing)} tensors) are held by no rank")
