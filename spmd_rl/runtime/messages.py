"""Some rows of a batch as bytes: which columns, where each lies in the message, and in which pieces it is sent.

A message has a header (columns, types, lengths of ragged rows) and one stream of bytes a kind of device, column after
column, wide types first: so each begins at a multiple of its width without a gap. Big columns go row by row in pieces
of bounded size, small ones together in one. Both ends work the pieces out from the header alone. Rows that lie together
at the sender are sent from where they are. A rank that reads the sender's memory is told where they lie, and needs no
stream. `arrival.py` is the other end.
"""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.runtime.bridge import from_bytes, to_bytes

COARSE = 1024
"""Bytes of a row from which on it is moved by itself."""


@dataclass(frozen=True)
class Column:
    """One column of a message."""

    name: str
    kind: str
    """row | ragged | objects."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one entry."""
    device: str
    """cpu | cuda."""
    lengths: Tensor
    """int64 [n]: entries of each row (ragged), 1 each (row); objects: one row with all bytes."""

    @cached_property
    def entry(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.entry

    @cached_property
    def count(self) -> int:
        """Entries of all rows."""
        return int(self.lengths.sum())

    @cached_property
    def starts(self) -> Tensor:
        """int64 [n]: entries before each row."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def coarse(self) -> bool:
        """Whether its rows are long enough, on average, to be moved one by one; short ones are moved together."""
        return self.size >= COARSE * max(1, len(self.lengths))

    def rows_of(self, part: "Part") -> tuple[int, int]:
        """The first row of a part, and the one behind its last."""
        if (part.first, part.end) == (0, self.count):
            return 0, len(self.lengths)
        ends = self.starts + self.lengths
        a, b = (int(torch.searchsorted(ends, at, right=True)) for at in (part.first, part.end))
        return a, b


@dataclass(frozen=True)
class Part:
    """Entries first..end-1 of a column, `at` bytes into the piece."""

    column: int
    first: int
    end: int
    at: int


@dataclass(frozen=True)
class Piece:
    """What is sent at one time: bytes start..end-1 of the stream of one kind of device."""

    device: str
    start: int
    end: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Form:
    """What a header says: enough to cut the message into pieces and to read it."""

    rows: int
    limit: int
    """Bytes of a piece, but for a single row that is longer."""
    columns: tuple[Column, ...]

    def starts(self) -> list[int]:
        """Where each column begins in the stream of its device."""
        ends: dict[str, int] = {}
        found = []
        for column in self.columns:
            found.append(ends.get(column.device, 0))
            ends[column.device] = found[-1] + column.size
        return found

    def sizes(self) -> dict[str, int]:
        """Bytes of the stream of each kind of device."""
        sizes: Counter[str] = Counter()
        for column in self.columns:
            sizes[column.device] += column.size
        return dict(sizes)

    def pieces(self) -> list[Piece]:
        """Small columns that follow each other together, a big one in runs of rows."""
        found: list[Piece] = []
        together: list[Part] = []
        begin = 0

        def close(device: str) -> None:
            if together:
                last = together[-1]
                size = last.at + (last.end - last.first) * self.columns[last.column].entry
                found.append(Piece(device, begin, begin + size, tuple(together)))
                together.clear()

        device = ""
        for number, (column, start) in enumerate(zip(self.columns, self.starts(), strict=True)):
            if column.device != device or (together and start + column.size - begin > self.limit):
                close(device)
            device = column.device
            if not column.size:
                continue
            if column.size > self.limit:
                for first, end in _runs(column, self.limit):
                    at, to = start + first * column.entry, start + end * column.entry
                    found.append(Piece(device, at, to, (Part(number, first, end, 0),)))
                continue
            begin = begin if together else start
            together.append(Part(number, 0, column.size // column.entry, start - begin))
        close(device)
        return found

    def pack(self) -> Tensor:
        """The header as bytes: JSON, then the lengths."""
        said = [[c.name, c.kind, str(c.dtype).removeprefix("torch."), list(c.shape), c.device] for c in self.columns]
        json = to_bytes([self.rows, self.limit, said])
        lengths = [c.lengths.view(torch.uint8) for c in self.columns if c.kind != "row"]
        return torch.cat([torch.tensor([len(json)]).view(torch.uint8), json, *lengths])

    @classmethod
    def unpack(cls, data: Tensor) -> "Form":
        """The inverse of `pack`."""
        at = 8 + int(data[:8].clone().view(torch.int64))
        rows, limit, said = from_bytes(data[8:at])
        columns = []
        for name, kind, dtype, shape, device in said:
            count = {"row": 0, "ragged": rows, "objects": 1}[kind]
            lengths = data[at : at + 8 * count].clone().view(torch.int64)
            at += 8 * count
            lengths = torch.ones(rows, dtype=torch.int64) if kind == "row" else lengths
            columns.append(Column(name, kind, getattr(torch, dtype), tuple(shape), device, lengths))
        return cls(rows, limit, tuple(columns))


@dataclass(frozen=True)
class Lying:
    """Where the rows of a column lie in the memory of their holder."""

    address: int
    starts: Tensor | None
    """int64 [rows]: entries from the address to each row; None where row follows row."""


@dataclass(frozen=True)
class Message:
    """What the holder of rows says of them to a rank that wants them."""

    form: Form
    ids: Tensor
    """int64 [rows]: their row_id."""
    lying: tuple[Lying, ...] | None
    """Of each column, for those that read them there."""

    def pack(self) -> Tensor:
        """As bytes: how long the form is and where columns lie (JSON), the form, ids and starts (int64)."""
        form, lying = self.form.pack(), self.lying
        said = [[column.address, column.starts is not None] for column in lying] if lying is not None else None
        json = to_bytes([len(form), said])
        starts = [column.starts for column in lying or () if column.starts is not None]
        numbers = [numbers.view(torch.uint8) for numbers in (self.ids, *starts)]
        return torch.cat([torch.tensor([len(json)]).view(torch.uint8), json, form, *numbers])

    @classmethod
    def unpack(cls, data: Tensor) -> "Message":
        """The inverse of `pack`."""
        at = 8 + int(data[:8].clone().view(torch.int64))
        size, said = from_bytes(data[8:at])
        form = Form.unpack(data[at : at + size])
        ids, *rest = data[at + size :].clone().view(torch.int64).split(max(1, form.rows))
        if said is None:
            return cls(form, ids, None)
        starts = iter(rest)
        return cls(form, ids, tuple(Lying(address, next(starts) if some else None) for address, some in said))


class Outgoing:
    """Rows of a batch to be sent: their form, and the bytes of each piece when it is asked for."""

    def __init__(self, batch: Batch, rows: Sequence[int], limit: int) -> None:
        self.batch, self.rows = batch, np.asarray(rows, dtype=np.int64)
        self._together = bool(np.all(np.diff(self.rows) == 1))
        self._objects: dict[str, Tensor] = {}
        self._kept: list[Tensor] = []
        self.form = Form(len(rows), limit, tuple(sorted(self._columns(), key=_place)))

    def _columns(self) -> Iterator[Column]:
        batch, n = self.batch, len(self.rows)
        for name in sorted(map(str, batch.rows.keys())):
            x = batch.rows[name]
            yield Column(name, "row", x.dtype, tuple(x.shape[1:]), x.device.type, torch.ones(n, dtype=torch.int64))
        for name, ragged in sorted(batch.ragged.items()):
            x = ragged.values
            lengths = ragged.lengths[torch.from_numpy(self.rows)]
            yield Column(name, "ragged", x.dtype, tuple(x.shape[1:]), x.device.type, lengths)
        for name, objects in sorted(batch.objects.items()):
            data = np.frombuffer(pickle.dumps([objects[i] for i in self.rows]), dtype=np.uint8)
            self._objects[name] = torch.from_numpy(data.copy())
            yield Column(name, "objects", torch.uint8, (), "cpu", torch.tensor([len(data)]))

    def message(self, in_place: bool) -> Message:
        """What to tell; `in_place`: to a rank that reads CPU columns here. Keep this object until it has."""
        ids = self.batch["row_id"][torch.from_numpy(self.rows)]
        lying = tuple(map(self._lying, range(len(self.form.columns)))) if in_place else None
        return Message(self.form, ids, lying)

    def _lying(self, number: int) -> Lying:
        """Long rows where they are; short ones that do not lie together, and pinned memory, in a copy."""
        column = self.form.columns[number]
        if column.device != "cpu":
            return Lying(0, None)
        x: Any = self.batch[column.name]
        if column.coarse and not self._together and isinstance(x, Ragged) and readable(x.values):
            starts = (x.lengths.cumsum(0) - x.lengths)[torch.from_numpy(self.rows)]
            return Lying(x.values.data_ptr(), starts)
        data = self.entries(Part(number, 0, column.count, 0))
        data = data if readable(data) else data.clone()
        self._kept.append(data)
        return Lying(data.data_ptr(), None)

    def bytes_of(self, piece: Piece) -> Tensor:
        """A view where the piece is one run of memory, else a copy."""
        parts = [self.entries(part) for part in piece.parts]
        if len(parts) == 1:
            return parts[0]
        data = torch.empty(piece.end - piece.start, dtype=torch.uint8, device=parts[0].device)
        for part, found in zip(piece.parts, parts, strict=True):
            data[part.at : part.at + len(found)] = found
        return data

    def entries(self, part: Part) -> Tensor:
        """The bytes of a part; a view where its rows lie together."""
        column = self.form.columns[part.column]
        if column.kind == "objects":
            return self._objects[column.name][part.first : part.end]
        x: Any = self.batch[column.name]
        values: Tensor = x.values if isinstance(x, Ragged) else x
        if self._together:
            first = int(self.rows[0]) if len(self.rows) else 0
            before = int(x.lengths[:first].sum()) if isinstance(x, Ragged) else first
            return as_bytes(values[before + part.first : before + part.end])
        return as_bytes(values[self._places(x, column, part).to(values.device)])

    def _places(self, x: Any, column: Column, part: Part) -> Tensor:
        """Where the part's entries lie among the column's values; a part begins and ends with a row."""
        rows = torch.from_numpy(self.rows)
        if not isinstance(x, Ragged):
            return rows[part.first : part.end]
        a, b = column.rows_of(part)
        return spread((x.lengths.cumsum(0) - x.lengths)[rows[a:b]], column.lengths[a:b])


def whole(batch: Batch) -> Tensor:
    """A batch of CPU tensors as one run of bytes, header first; for small things and for the disk."""
    message = Outgoing(batch, range(len(batch)), 2**62)
    header = message.form.pack()
    stream = torch.empty(message.form.sizes().get("cpu", 0), dtype=torch.uint8)
    for piece in message.form.pieces():
        stream[piece.start : piece.end] = message.bytes_of(piece)
    return torch.cat([torch.tensor([len(header)]).view(torch.uint8), header, stream])


def read(data: Tensor) -> Batch:
    """The inverse of `whole`; the columns are views of a copy."""
    at = 8 + int(data[:8].clone().view(torch.int64))
    form, stream = Form.unpack(data[8:at]), data[at:].clone()
    out = Batch.empty_like(form.rows)
    for column, start in zip(form.columns, form.starts(), strict=True):
        part = stream[start : start + column.size]
        if column.kind == "objects":
            out.objects[column.name] = pickle.loads(part.numpy().tobytes())
            continue
        values = part.view(column.dtype).reshape(column.count, *column.shape)
        out[column.name] = values if column.kind == "row" else Ragged(values, column.lengths)
    return out


def spread(starts: Tensor, lengths: Tensor) -> Tensor:
    """The entries of rows that begin at `starts` [n] and have `lengths` [n], one after the other: int64 [entries]."""
    inside = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + inside


def readable(x: Tensor) -> bool:
    """Whether another process may find it in memory: its own pages, not those that belong to a device's driver."""
    return x.is_contiguous() and not x.is_pinned()


def _place(column: Column) -> tuple[str, int, str]:
    return column.device, -column.dtype.itemsize, column.name


def as_bytes(x: Tensor) -> Tensor:
    """uint8 [bytes]; a view where x is contiguous."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _runs(column: Column, limit: int) -> Iterator[tuple[int, int]]:
    """(first, end) entries: as many whole rows as fit the limit, one at least; objects are cut anywhere."""
    if column.kind == "objects":
        yield from ((at, min(at + limit, column.size)) for at in range(0, column.size, limit))
        return
    ends = column.lengths.cumsum(0)
    first, total, most = 0, int(ends[-1]), limit // max(column.entry, 1)
    while first < total:
        fitting = int(torch.searchsorted(ends, first + most, right=True))
        end = int(ends[fitting - 1]) if fitting and int(ends[fitting - 1]) > first else 0
        if not end:
            end = int(ends[int(torch.searchsorted(ends, first, right=True))])
        yield first, end
        first = end
