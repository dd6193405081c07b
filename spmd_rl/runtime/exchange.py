"""A batch moves from one layout to another: rows as packed bytes, each sent once to each rank that wants it.

Tensors travel as their bytes, never pickled; Python objects (texts, extra columns) as one byte tensor a message.
Every rank of the process group calls these in the same order; a rank may hold or want no row.
"""

import pickle
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.data.batch import Batch, Ragged


def exchange(batch: Batch, wanted: Sequence[Sequence[int]], group: ProcessGroup) -> Batch:
    """Give rank r of `group` the rows `wanted[r]`, in that order.

    `batch` holds this rank's rows with their `row_id`; a row lives on exactly one rank before, on any number after.
    All ranks hold the same columns and pass the same `wanted` (a pure function of plan and row lengths).

    Raises: RuntimeError naming the rows that no rank held.
    """
    place = {int(r): i for i, r in enumerate(batch["row_id"].tolist())}
    outgoing = [_pack(batch.select([place[r] for r in rows if r in place])) for rows in wanted]
    incoming = _all_to_all(outgoing, group)
    received = Batch.concat([_unpack(data, batch) for data in incoming])
    mine = wanted[dist.get_rank(group)]
    return _in_order(received, mine)


def gather(batch: Batch, columns: Sequence[str], group: ProcessGroup) -> Batch:
    """All rows of all ranks, with `columns` only, in `row_id` order, on every rank. A row must live on one rank."""
    part = _columns(batch, ["row_id", *[c for c in columns if c != "row_id"]])
    data = _pack(part)
    sizes = torch.tensor([len(data)])
    all_sizes = [torch.zeros_like(sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_sizes, sizes, group=group)
    width = int(max(int(s) for s in all_sizes))
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: len(data)] = data
    buffers = [torch.empty_like(padded) for _ in all_sizes]
    dist.all_gather(buffers, padded, group=group)
    whole = Batch.concat([_unpack(b[: int(s)], part) for b, s in zip(buffers, all_sizes, strict=True)])
    return _in_order(whole, sorted(whole["row_id"].tolist()))


def _columns(batch: Batch, names: Sequence[str]) -> Batch:
    out = Batch.empty_like(len(batch))
    for name in names:
        out[name] = batch[name]
    return out


def _in_order(batch: Batch, row_ids: Sequence[int]) -> Batch:
    place = {int(r): i for i, r in enumerate(batch["row_id"].tolist())}
    lost = [r for r in row_ids if r not in place]
    if lost or len(place) != len(batch):
        raise RuntimeError(
            f"exchange: rows {lost[:8]} were held by no rank, or {len(batch) - len(place)} rows came twice"
        )
    return batch.select([place[r] for r in row_ids])


def _all_to_all(outgoing: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    sent = torch.tensor([len(o) for o in outgoing])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    incoming = torch.empty(int(received.sum()), dtype=torch.uint8)
    dist.all_to_all_single(incoming, torch.cat(outgoing), received.tolist(), sent.tolist(), group=group)
    return list(incoming.split(received.tolist()))


def _pack(batch: Batch) -> Tensor:
    """uint8: number of rows, then each column in the order of its name."""
    parts = [_bytes(torch.tensor([len(batch)]))]
    for name in sorted(batch.rows.keys()):
        parts.append(_bytes(batch.rows[name]))
    for name in sorted(batch.ragged):
        parts += [_bytes(batch.ragged[name].lengths), _bytes(batch.ragged[name].values)]
    for name in sorted(batch.objects):
        text = torch.from_numpy(np.frombuffer(pickle.dumps(batch.objects[name]), dtype=np.uint8).copy())
        parts += [_bytes(torch.tensor([len(text)])), text]
    return torch.cat(parts)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class _Reader:
    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        piece = self.data[self.at : self.at + size].clone()  # a copy is aligned for its type
        self.at += size
        return piece.view(dtype)


def _unpack(data: Tensor, like: Batch) -> Batch:
    """The inverse of `_pack`; `like` has the columns and their types, and any number of rows."""
    reader = _Reader(data)
    n = int(reader.take(1, torch.int64))
    rows: dict[str, Tensor] = {}
    for name in sorted(map(str, like.rows.keys())):
        shape = like.rows[name].shape[1:]
        rows[name] = reader.take(n * int(np.prod(shape, dtype=int)), like.rows[name].dtype).reshape(n, *shape)
    ragged: dict[str, Ragged] = {}
    for name in sorted(like.ragged):
        lengths = reader.take(n, torch.int64)
        shape, total = like.ragged[name].values.shape[1:], int(lengths.sum())
        values = reader.take(total * int(np.prod(shape, dtype=int)), like.ragged[name].values.dtype)
        ragged[name] = Ragged(values.reshape(total, *shape), lengths)
    objects = {}
    for name in sorted(like.objects):
        size = int(reader.take(1, torch.int64))
        objects[name] = pickle.loads(reader.take(size, torch.uint8).numpy().tobytes())
    return Batch(TensorDict(rows, batch_size=[n]), ragged, objects)
