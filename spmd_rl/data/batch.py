"""The typed batch: N rows with row tensors, ragged token columns and Python objects.

Shapes: N rows, L_i tokens in row i, T = sum of L_i. Token columns are packed without padding (`Ragged`), so what moves
between ranks and what the engines compute is exactly the tokens that exist.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


@dataclass
class Ragged:
    """N rows of different lengths, packed: `values` [T, ...] and `lengths` int64 [N] on the CPU."""

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if total != self.values.shape[0]:
            raise ValueError(f"Ragged: sum(lengths)={total} != len(values)={self.values.shape[0]}")

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> "Ragged":
        """Pack row tensors [L_i, ...]. `dtype` is needed only when there may be no row at all."""
        lengths = torch.tensor([len(r) for r in rows], dtype=torch.int64)
        values = torch.cat(list(rows)) if rows else torch.empty(0, dtype=dtype)
        return cls(values if dtype is None else values.to(dtype), lengths)

    @classmethod
    def from_padded(cls, padded_NL: Tensor, lengths: Tensor) -> "Ragged":
        """Take the first lengths[i] entries of each row of a right-padded [N, L, ...] tensor."""
        return cls(padded_NL[length_mask(lengths, padded_NL.shape[1]).to(padded_NL.device)], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        return list(self.values.split(self.lengths.tolist()))

    def select(self, index: Sequence[int] | Tensor) -> "Ragged":
        if not len(index):
            return Ragged(self.values[:0], self.lengths[:0])
        rows = self.rows()
        return Ragged.from_rows([rows[int(i)] for i in index], dtype=self.values.dtype)

    def padded(self, value: float = 0, length: int | None = None) -> Tensor:
        """Right-padded [N, L]; L is the longest row unless given."""
        width = length if length is not None else (int(self.lengths.max()) if len(self) else 0)
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), value)
        out[length_mask(self.lengths, width).to(out.device)] = self.values
        return out

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Ragged":
        return Ragged(fn(self.values), self.lengths)

    def row_sums(self) -> Tensor:
        """Sum of each row [N]; an empty row sums to 0."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.lengths).to(self.values.device)
        return self.values.new_zeros(len(self)).index_add_(0, owner, self.values)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """True for the first lengths[i] of `width` places: bool [N, width]."""
    return torch.arange(width)[None] < lengths[:, None]


@dataclass
class Batch:
    """N rows. Every column has exactly N rows; `select` and `concat` keep all columns together.

    The columns of a finished rollout (see docs/architecture.md for who writes which):
      rows:    uid, sample, row_id, score …
      ragged:  prompts, responses (token ids), rollout_log_probs, response_mask …
      objects: data_source, ground_truth, text, …
    """

    rows: TensorDict
    ragged: dict[str, Ragged] = field(default_factory=dict)
    objects: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def empty_like(cls, n: int = 0) -> "Batch":
        return cls(TensorDict({}, batch_size=[n]))

    def __len__(self) -> int:
        return int(self.rows.batch_size[0])

    def __post_init__(self) -> None:
        n = len(self)
        for kind in (self.ragged, self.objects):
            for name, column in kind.items():
                if len(column) != n:
                    raise ValueError(f"Batch: column '{name}' has {len(column)} rows, the batch has {n}")

    def __getitem__(self, name: str) -> Any:
        for kind in (self.ragged, self.objects):
            if name in kind:
                return kind[name]
        return self.rows[name]

    def __contains__(self, name: str) -> bool:
        return name in self.ragged or name in self.objects or name in self.rows.keys()  # noqa: SIM118 - a TensorDict refuses `in`

    def __setitem__(self, name: str, column: "Ragged | Tensor | list[Any]") -> None:
        if len(column) != len(self):
            raise ValueError(f"Batch: column '{name}' has {len(column)} rows, the batch has {len(self)}")
        if isinstance(column, Ragged):
            self.ragged[name] = column
        elif isinstance(column, Tensor):
            self.rows[name] = column
        else:
            self.objects[name] = column

    def select(self, index: Sequence[int] | Tensor) -> "Batch":
        """The rows `index`, in that order, of every column."""
        at = torch.as_tensor(index, dtype=torch.int64)
        picked = at.tolist()
        return Batch(
            self.rows[at],
            {k: r.select(picked) for k, r in self.ragged.items()},
            {k: [o[i] for i in picked] for k, o in self.objects.items()},
        )

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Rows of all batches in order. All must have the same columns."""
        first = batches[0]
        return Batch(
            torch.cat([b.rows for b in batches]),  # type: ignore[arg-type]
            {
                k: Ragged(
                    torch.cat([b.ragged[k].values for b in batches]), torch.cat([b.ragged[k].lengths for b in batches])
                )
                for k in first.ragged
            },
            {k: [o for b in batches for o in b.objects[k]] for k in first.objects},
        )
