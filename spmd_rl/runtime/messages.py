"""Some rows of a batch as bytes: which columns, where each lies in the message, and in which pieces it is sent.

A message has a header (columns, types, lengths of ragged rows) and one stream of bytes a kind of device, column after
column, wide types first: so each begins at a multiple of its width without a gap. Big columns go row by row in pieces
of bounded size, small ones together in one. Both ends work the pieces out from the header alone. Rows that lie together
at the sender are sent from where they are; the receiver's columns are views of what has arrived.
"""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.runtime.bridge import from_bytes, to_bytes


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

    @property
    def entry(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.lengths.sum()) * self.entry


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


class Outgoing:
    """Rows of a batch to be sent: their form, and the bytes of each piece when it is asked for."""

    def __init__(self, batch: Batch, rows: Sequence[int], limit: int) -> None:
        self.batch, self.rows = batch, np.asarray(rows, dtype=np.int64)
        self._together = bool(np.all(np.diff(self.rows) == 1))
        self._objects: dict[str, Tensor] = {}
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

    def bytes_of(self, piece: Piece) -> Tensor:
        """A view where the piece is one run of memory, else a copy."""
        parts = [self._entries(part) for part in piece.parts]
        if len(parts) == 1:
            return parts[0]
        data = torch.empty(piece.end - piece.start, dtype=torch.uint8, device=parts[0].device)
        for part, found in zip(piece.parts, parts, strict=True):
            data[part.at : part.at + len(found)] = found
        return data

    def _entries(self, part: Part) -> Tensor:
        column = self.form.columns[part.column]
        if column.kind == "objects":
            return self._objects[column.name][part.first : part.end]
        x: Any = self.batch[column.name]
        values: Tensor = x.values if isinstance(x, Ragged) else x
        if self._together:
            before = int(x.lengths[: self.rows[0]].sum()) if isinstance(x, Ragged) else int(self.rows[0])
            return as_bytes(values[before + part.first : before + part.end])
        return as_bytes(values[self._places(x, column, part).to(values.device)])

    def _places(self, x: Any, column: Column, part: Part) -> Tensor:
        """Where the part's entries lie among the column's values; a part begins and ends with a row."""
        rows = torch.from_numpy(self.rows)
        if not isinstance(x, Ragged):
            return rows[part.first : part.end]
        ends = column.lengths.cumsum(0)
        a, b = (int(torch.searchsorted(ends, at, right=True)) for at in (part.first, part.end))
        lengths = column.lengths[a:b]
        starts = (x.lengths.cumsum(0) - x.lengths)[rows[a:b]]
        inside = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return starts.repeat_interleave(lengths) + inside


class Incoming:
    """A message on its way in: where its pieces go, and the batch that they make up."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form = form
        self._streams = {
            kind: torch.empty(size, dtype=torch.uint8, device="cpu" if kind == "cpu" else device)
            for kind, size in ({"cpu": 0} | form.sizes()).items()
        }

    def place(self, piece: Piece) -> Tensor:
        """Where to put a piece."""
        return self._streams[piece.device][piece.start : piece.end]

    def batch(self) -> Batch:
        """The rows, once all pieces have come."""
        out = Batch(TensorDict({}, batch_size=[self.form.rows]))
        for column, start in zip(self.form.columns, self.form.starts(), strict=True):
            data = self._streams[column.device][start : start + column.size]
            if column.kind == "objects":
                out.objects[column.name] = pickle.loads(data.numpy().tobytes())
                continue
            values = data.view(column.dtype).reshape(-1, *column.shape)
            out[column.name] = values if column.kind == "row" else Ragged(values, column.lengths)
        return out


def whole(batch: Batch) -> Tensor:
    """A batch of CPU tensors as one run of bytes, header first; for small things and for the disk."""
    message = Outgoing(batch, range(len(batch)), 2**62)
    header = message.form.pack()
    stream = torch.empty(message.form.sizes().get("cpu", 0), dtype=torch.uint8)
    for piece in message.form.pieces():
        stream[piece.start : piece.end] = message.bytes_of(piece)
    return torch.cat([torch.tensor([len(header)]).view(torch.uint8), header, stream])


def read(data: Tensor) -> Batch:
    """The inverse of `whole`."""
    at = 8 + int(data[:8].clone().view(torch.int64))
    message = Incoming(Form.unpack(data[8:at]), torch.device("cpu"))
    message.place(Piece("cpu", 0, len(data) - at, ())).copy_(data[at:])
    return message.batch()


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
