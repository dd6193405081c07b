"""A micro-batch's tokens as one stream, and which of them a context-parallel rank holds.

Rows lie end to end, padded by one more row so that everything divides. The stream is cut into 2·cp chunks, and rank r
holds chunks r and 2·cp-1-r: under a causal mask each pair costs about the same, whether the stream is one long row or
many short ones (the zigzag of ring attention, over the stream instead of each row).

Shapes: T tokens of the stream, padding included, S = T/cp of this rank, R response tokens of all rows, D head size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.models.attention import Spans


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of the stream that one rank asks about: its queries, and the keys these may see."""

    start: int
    stop: int
    keys_start: int
    """Where the row of the first query starts; keys are keys_start..stop."""
    spans: Spans
    """Each row inside the chunk; only the first may have keys before its queries."""


@dataclass
class Stream:
    """Where each row starts, and this rank's part. Made by `Stream.of`; goes through megatron-core's layers as their
    `packed_seq_params`, so that a recomputed layer has it too."""

    lengths: list[int]
    """Tokens of each row, the padding row last."""
    tokens: int
    """Without padding."""
    total: int
    """T"""
    cp_group: ProcessGroup
    cp_size: int
    cp_rank: int
    device: torch.device
    cos: Tensor | None = None
    """Rotary cosines of this rank's tokens, [1, S, D]."""
    sin: Tensor | None = None
    routes: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> experts of this rank's tokens, [S/tp, k]: routing decided elsewhere (router replay), -1 where not."""
    qkv_format: str = "stream"
    """megatron-core asks; anything but "thd" leaves query, key and value as they are."""

    @classmethod
    def of(cls, lengths: Sequence[int], cp_group: ProcessGroup, tp_size: int, device: torch.device) -> "Stream":
        """Rows of these lengths (each > 0; there may be none). With sequence parallelism S must be a multiple of tp."""
        cp = cp_group.size()
        unit = tp_size * (2 * cp if cp > 1 else 1)
        tokens = sum(lengths)
        total = max(-(-tokens // unit), 1) * unit
        rows = [*lengths, total - tokens] if total > tokens else list(lengths)
        return cls(rows, tokens, total, cp_group, cp, cp_group.rank(), device)

    def held(self, rank: int) -> list[tuple[int, int]]:
        """[start, stop) of the chunks that a rank of the cp group holds, ascending."""
        if self.cp_size == 1:
            return [(0, self.total)]
        size = self.total // (2 * self.cp_size)
        return [(at * size, (at + 1) * size) for at in (rank, 2 * self.cp_size - 1 - rank)]

    @cached_property
    def chunks(self) -> list[Chunk]:
        """This rank's chunks, cut at row ends."""
        ends = list(accumulate(self.lengths))
        return [_chunk(start, stop, ends, self.device) for start, stop in self.held(self.cp_rank)]

    def local(self, packed_T: Tensor, fill: int = 0) -> Tensor:
        """This rank's part [S, ...] of a column [tokens, ...], padded with `fill`."""
        padding = packed_T.new_full((self.total - len(packed_T), *packed_T.shape[1:]), fill)
        padded = torch.cat([packed_T, padding])
        return torch.cat([padded[a:b] for a, b in self.held(self.cp_rank)])

    def position_ids(self) -> Tensor:
        """Place of each of this rank's tokens in its row: int64 [S]."""
        places_T = torch.cat([torch.arange(n) for n in self.lengths])
        return torch.cat([places_T[a:b] for a, b in self.held(self.cp_rank)])

    def find(self, positions_R: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Of ascending places in the stream [R], those that a rank holds: (which of R, their places in its S)."""
        which, places, before = [], [], 0
        for start, stop in self.held(rank):
            inside = ((positions_R >= start) & (positions_R < stop)).nonzero()[:, 0]
            which.append(inside)
            places.append(positions_R[inside] - start + before)
            before += stop - start
        return torch.cat(which), torch.cat(places)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Every rank's [S, ...] -> [T, ...] in the order of the stream."""
        pieces = [(a, part[i * (b - a) : (i + 1) * (b - a)]) for r, part in enumerate(parts)
                  for i, (a, b) in enumerate(self.held(r))]  # fmt: skip
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])])


def _chunk(start: int, stop: int, ends: list[int], device: torch.device) -> Chunk:
    """Cut [start, stop) at the row ends in `ends`."""
    row = bisect_right(ends, start)
    row_start = ends[row - 1] if row else 0
    cuts = [start, *(end for end in ends[row:] if end < stop), stop]
    queries = [b - a for a, b in pairwise(cuts)]
    keys = [queries[0] + start - row_start, *queries[1:]]
    return Chunk(start, stop, row_start, Spans.of(queries, keys, device))
