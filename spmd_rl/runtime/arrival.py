"""The rows that a rank wants, each put where it belongs as it comes: from this rank, by a message, or read in place."""

import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.runtime import peer_memory
from spmd_rl.runtime.messages import Column, Lying, Message, Outgoing, Part, Piece, as_bytes, spread
from spmd_rl.runtime.peer_memory import Places


class Arrival:
    """The batch of the rows `want`, in that order, on its way in; `messages` say who has which of them."""

    def __init__(self, want: Sequence[int], messages: Mapping[int, Message], device: torch.device) -> None:
        """`device`: where CUDA columns arrive. Raises: RuntimeError naming rows that nobody, or two ranks, hold."""
        self.messages, self.rows, self.device = messages, len(want), device
        self.at = places(want, {peer: message.ids.tolist() for peer, message in messages.items()})
        filled = [message.form for message in messages.values() if message.form.rows]
        self.columns = {column.name: column for column in (filled or [next(iter(messages.values())).form])[0].columns}
        for form in filled:
            _check_same(self.columns, {column.name: column for column in form.columns})
        self.lengths = {name: self._lengths(column) for name, column in self.columns.items()}
        self.starts = {name: lengths.cumsum(0) - lengths for name, lengths in self.lengths.items()}
        self.values = {name: self._room(column) for name, column in self.columns.items()}
        self.objects = {
            (peer, column.name): torch.empty(column.size, dtype=torch.uint8)
            for peer, message in messages.items()
            for column in message.form.columns
            if column.kind == "objects"
        }

    def _lengths(self, column: Column) -> Tensor:
        """int64 [rows]: entries of each row of the batch."""
        lengths = torch.ones(self.rows, dtype=torch.int64)
        for peer, message in self.messages.items():
            if column.kind == "ragged" and message.form.rows:
                lengths[self.at[peer]] = next(c.lengths for c in message.form.columns if c.name == column.name)
        return lengths

    def _room(self, column: Column) -> Tensor:
        n = int(self.lengths[column.name].sum()) if column.kind != "objects" else 0
        if column.device == "cpu":
            return peer_memory.fresh(n * column.entry).view(column.dtype).reshape(n, *column.shape)
        return torch.empty(n, *column.shape, dtype=column.dtype, device=self.device)

    def place(self, peer: int, piece: Piece) -> Tensor:
        """Where to receive a piece, uint8: where it belongs if that is one run of memory, else in room of its own."""
        if len(piece.parts) == 1 and (run := self._run(peer, piece.parts[0])) is not None:
            return run
        device = "cpu" if piece.device == "cpu" else self.device
        return torch.empty(piece.end - piece.start, dtype=torch.uint8, device=device)

    def put(self, peer: int, piece: Piece, data: Tensor) -> None:
        """Take what has come into `data`, which `place` gave."""
        for part in piece.parts:
            size = (part.end - part.first) * self.messages[peer].form.columns[part.column].entry
            self._put(peer, part, data[part.at : part.at + size])

    def read(self, peer: int, pid: int) -> None:
        """Read a peer's CPU columns where they lie; `pid` 0: in this process."""
        message = self.messages[peer]
        assert message.lying is not None, "who is read says where its rows are"
        runs, packed = list[tuple[Places, Places, Places]](), list[tuple[Part, Tensor]]()
        for number, (column, lying) in enumerate(zip(message.form.columns, message.lying, strict=True)):
            if column.device != "cpu" or not column.size:
                continue
            if column.coarse and column.kind != "objects":
                runs.append(self._runs(peer, column, lying))
                continue
            part = Part(number, 0, column.count, 0)
            data = self.place(peer, Piece("cpu", 0, column.size, (part,)))
            packed.append((part, data))
            runs.append(_run(lying.address, data.data_ptr(), column.size))
        if not runs:
            return
        sources, targets, sizes = (np.concatenate(numbers) for numbers in zip(*runs, strict=True))
        if pid:
            peer_memory.read(pid, sources, targets, sizes)
        else:
            peer_memory.copy(sources, targets, sizes)
        for part, data in packed:
            self._put(peer, part, data)

    def keep(self, me: int, own: Outgoing) -> None:
        """Take the rows that this rank has itself."""
        self.read(me, 0)
        for number, column in enumerate(own.form.columns):
            if column.device != "cpu":
                part = Part(number, 0, column.count, 0)
                self._put(me, part, own.entries(part))

    def batch(self) -> Batch:
        """The rows, once all have come."""
        out = Batch.empty_like(self.rows)
        for name, column in self.columns.items():
            if column.kind == "objects":
                out.objects[name] = [None] * self.rows
            else:
                values = self.values[name]
                out[name] = values if column.kind == "row" else Ragged(values, self.lengths[name])
        for (peer, name), data in self.objects.items():
            for place, value in zip(self.at[peer].tolist(), pickle.loads(data.numpy().tobytes()), strict=True):
                out.objects[name][place] = value
        return out

    def _run(self, peer: int, part: Part) -> Tensor | None:
        """Where a part belongs if that is one run of memory."""
        column = self.messages[peer].form.columns[part.column]
        if column.kind == "objects":
            return self.objects[peer, column.name][part.first : part.end]
        a, b = column.rows_of(part)
        at = self.at[peer][a:b]
        if not len(at) or np.any(np.diff(at) != 1):
            return None
        start = int(self.starts[column.name][at[0]])
        return as_bytes(self.values[column.name][start : start + part.end - part.first])

    def _runs(self, peer: int, column: Column, lying: Lying) -> tuple[Places, Places, Places]:
        """Addresses of a column's rows there and here, and their bytes."""
        starts = lying.starts if lying.starts is not None else column.starts
        here = self.starts[column.name][self.at[peer]]
        sources, targets = (
            lying.address + starts * column.entry,
            self.values[column.name].data_ptr() + here * column.entry,
        )
        return sources.numpy(), targets.numpy(), (column.lengths * column.entry).numpy()

    def _put(self, peer: int, part: Part, data: Tensor) -> None:
        """The bytes of a part to where they belong, if they are not there."""
        column = self.messages[peer].form.columns[part.column]
        run = self._run(peer, part)
        if run is not None:
            if run.data_ptr() != data.data_ptr():
                run.copy_(data)
            return
        a, b = column.rows_of(part)
        lengths, starts = column.lengths[a:b], self.starts[column.name][self.at[peer][a:b]]
        values = self.values[column.name]
        if column.device == "cpu" and column.coarse:
            sources = data.data_ptr() + (lengths.cumsum(0) - lengths) * column.entry
            targets = values.data_ptr() + starts * column.entry
            peer_memory.copy(*(x.numpy() for x in (sources, targets, lengths * column.entry)))
        else:
            at = spread(starts, lengths).to(values.device)
            values[at] = data.view(column.dtype).reshape(len(at), *column.shape)


def _run(source: int, target: int, size: int) -> tuple[Places, Places, Places]:
    return np.array([source]), np.array([target]), np.array([size])


def _check_same(expected: Mapping[str, Column], found: Mapping[str, Column]) -> None:
    def said(columns: Mapping[str, Column]) -> set[str]:
        return {f"{c.name} ({c.kind}, {c.dtype} {list(c.shape)}, {c.device})" for c in columns.values()}

    if different := said(expected) ^ said(found):
        raise RuntimeError(f"exchange: holders of rows differ in their columns: {', '.join(sorted(different))}")


def places(want: Sequence[int], held: Mapping[int, Sequence[int]]) -> dict[int, Places]:
    """Where the rows of each holder lie in the order `want`.

    Raises: RuntimeError naming the rows that no rank held, or how many came twice.
    """
    place = {int(row): i for i, row in enumerate(want)}
    came = [row for rows in held.values() for row in rows]
    here = set(came)
    lost = [row for row in place if row not in here]
    if lost or len(here) != len(came):
        raise RuntimeError(
            f"exchange: rows {lost[:8]} were held by no rank, or {len(came) - len(here)} rows came twice"
        )
    return {peer: np.array([place[row] for row in rows], dtype=np.int64) for peer, rows in held.items()}
