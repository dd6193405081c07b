"""Packed rows: N rows of different lengths laid end to end as one row of T tokens, no padding computed.

With Ulysses (sp > 1) every rank of the sequence-parallel group holds one contiguous slice of T/sp tokens; when sp does
not divide the tokens, an extra row of padding at the end makes it so. All of it is a pure function of the lengths.

Shapes: N rows, T packed tokens (padding included), S = T/sp tokens of this rank, R response tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where each row starts and ends, and which slice of the tokens this rank holds. Made by `pack`."""

    lengths: list[int]
    """Tokens of each row; the padding row, if there is one, is the last."""
    cu_seqlens: Tensor
    """Row starts and the end: int32 [N+1], on the device of the model."""
    max_seqlen: int
    """The longest row."""
    tokens: int
    """Real tokens, without the padding row."""
    total: int
    """T: tokens of all ranks, padding included; kept, so that a compiled layer need not read `lengths`."""
    sp_size: int = 1
    """Ranks that share the tokens."""
    sp_rank: int = 0
    """This rank's place among them."""
    sp_group: dist.ProcessGroup | None = None
    """The process group of those ranks; None when sp_size is 1."""

    @classmethod
    def pack(
        cls,
        lengths: Sequence[int],
        sp_size: int = 1,
        sp_rank: int = 0,
        sp_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> "Packing":
        """Lay rows of these lengths (tokens, each > 0) end to end.

        Raises ValueError for no row, an empty row, or sp_size > 1 without a group of that size.
        """
        rows = [int(n) for n in lengths]
        if not rows or min(rows) < 1:
            raise ValueError(f"Packing: every row needs at least one token, got lengths {rows}")
        if sp_size > 1 and (sp_group is None or sp_group.size() != sp_size):
            size = "none" if sp_group is None else f"one of {sp_group.size()} ranks"
            raise ValueError(f"Packing: sp_size={sp_size} needs a process group of {sp_size} ranks, got {size}")
        tokens = sum(rows)
        padding = -tokens % sp_size
        rows += [padding] if padding else []
        cu_seqlens = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(rows, cu_seqlens.to(device), max(rows), tokens, tokens + padding, sp_size, sp_rank, sp_group)

    def slice_for(self, sp_rank: int) -> slice:
        """The packed tokens [start, stop) that a rank of the sequence-parallel group holds."""
        size = self.total // self.sp_size
        return slice(sp_rank * size, (sp_rank + 1) * size)

    def local(self, packed_T: Tensor, fill: int = 0) -> Tensor:
        """This rank's slice [S, ...] of a packed tensor [tokens, ...] without the padding row, which becomes `fill`."""
        if len(packed_T) != self.tokens:
            raise ValueError(f"Packing.local: {len(packed_T)} tokens given, the rows have {self.tokens}")
        if self.total > self.tokens:
            padding = packed_T.new_full((self.total - self.tokens, *packed_T.shape[1:]), fill)
            packed_T = torch.cat([packed_T, padding])
        return packed_T[self.slice_for(self.sp_rank)]

    def position_ids(self) -> Tensor:
        """Place of each of this rank's tokens inside its row, from 0: int64 [S]."""
        positions_T = torch.cat([torch.arange(n) for n in self.lengths])
        return positions_T[self.slice_for(self.sp_rank)].to(self.cu_seqlens.device)

    def local_positions(self, positions_R: Tensor) -> tuple[Tensor, slice]:
        """Of ascending packed positions [R], this rank's: (their places in its slice [R'], the slice of R)."""
        counts = self.counts(positions_R)
        start = sum(counts[: self.sp_rank])
        mine = slice(start, start + counts[self.sp_rank])
        return positions_R[mine] - self.slice_for(self.sp_rank).start, mine

    def counts(self, positions_R: Tensor) -> list[int]:
        """How many of the ascending packed positions [R] each rank of the sequence-parallel group holds."""
        if self.sp_size == 1:
            return [len(positions_R)]
        starts = torch.tensor([self.slice_for(r).start for r in range(1, self.sp_size)], device=positions_R.device)
        cuts = [0, *torch.searchsorted(positions_R, starts).tolist(), len(positions_R)]
        return [b - a for a, b in pairwise(cuts)]


def response_positions(prompt_lengths: Sequence[int], response_lengths: Sequence[int]) -> Tensor:
    """Packed positions whose outputs predict the response tokens: int64 [R], ascending, rows in order.

    Row i is prompt_lengths[i] prompt tokens (at least one) and then response_lengths[i] response tokens; the token
    before each response token predicts it.
    """
    pieces, start = [], 0
    for prompt, response in zip(prompt_lengths, response_lengths, strict=True):
        if prompt < 1:
            raise ValueError(
                "response_positions: a prompt without tokens has nothing to predict its first response token"
            )
        pieces.append(torch.arange(start + prompt - 1, start + prompt + response - 1))
        start += prompt + response
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
