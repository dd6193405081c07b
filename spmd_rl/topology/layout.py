"""Layouts: a pool's ranks folded into named axes. Pure data; numpy only.

Legend: P = ranks of the pool. Ranks here are pool ranks 0..P-1.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_rl.config import ConfigError


@dataclass(frozen=True)
class Layout:
    """P pool ranks folded in C order, the last axis fastest: rank = ((c0 · s1 + c1) · s2 + c2) …"""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ConfigError(f"Layout: axes {self.names} and sizes {self.sizes} do not name each axis once")
        if any(size < 1 for size in self.sizes):
            raise ConfigError(f"Layout: sizes {dict(zip(self.names, self.sizes, strict=True))} must be at least 1")

    @property
    def size(self) -> int:
        """P, the product of the axes' sizes."""
        return math.prod(self.sizes)

    def axis_size(self, *axes: str) -> int:
        """Ranks in one process group along the axis (or the joint axes); 1 for no axis."""
        return math.prod(self.sizes[self._index(axis)] for axis in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """The place of one pool rank on every axis. Raises IndexError outside 0..P-1."""
        if not 0 <= rank < self.size:
            raise IndexError(f"pool rank {rank} is outside 0..{self.size - 1}")
        place: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def coordinate(self, axis: str) -> np.ndarray:
        """The place of every pool rank on one axis, int64 [P]."""
        return np.arange(self.size) // self.stride(axis) % self.axis_size(axis)

    def stride(self, axis: str) -> int:
        """Distance in pool ranks between neighbours along the axis."""
        return math.prod(self.sizes[self._index(axis) + 1 :])

    def groups(self, *axes: str) -> np.ndarray:
        """Pool ranks of each process group along the axis, or the joint axes, int64 [P / size, size].

        Groups come in the order of their first member, members in ascending order (for joint axes the layout's outer
        axis varies slowest, whatever order the axes are named in).
        """
        chosen = sorted(self._index(axis) for axis in axes)
        rest = [i for i in range(len(self.names)) if i not in chosen]
        folded = np.arange(self.size).reshape(self.sizes)
        return folded.transpose(rest + chosen).reshape(-1, self.axis_size(*axes))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Pool ranks of the one process group along the axes that holds `rank`; without building the others."""
        place = self.coords(rank)
        members = np.array([rank - sum(place[axis] * self.stride(axis) for axis in axes)])
        for axis in sorted(axes, key=self._index):
            members = (members[:, None] + np.arange(self.axis_size(axis)) * self.stride(axis)).reshape(-1)
        return tuple(members.tolist())

    def formula(self, axis: str) -> str:
        """How the axis' coordinate is computed from the pool rank r, e.g. `r // 2 % 4`."""
        if self.axis_size(axis) == 1:
            return "0"
        text = "r" if self.stride(axis) == 1 else f"r // {self.stride(axis)}"
        outermost = self.stride(axis) * self.axis_size(axis) == self.size
        return text if outermost else f"{text} % {self.axis_size(axis)}"

    def __str__(self) -> str:
        return " · ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def _index(self, axis: str) -> int:
        if axis not in self.names:
            raise ConfigError(f"no axis {axis!r} in the layout {self}; it has {', '.join(self.names)}")
        return self.names.index(axis)


@dataclass(frozen=True)
class RoleLayout:
    """How one role sees its pool's ranks: `mesh` shards the weights, `batch` says which rows a rank works on.

    FSDP: mesh [fsdp] or [ddp, fsdp], batch (dp, sp). Megatron: mesh (pp, dp, cp, tp), which is the batch too, and the
    experts' own fold of the same ranks (pp, edp, ep, etp). Rollout: (dp, infer_tp, infer_pp) for both.
    """

    role: str
    pool: str
    engine: str
    mesh: Layout
    batch: Layout
    expert: Layout | None = None

    @property
    def size(self) -> int:
        """P, the ranks of the pool."""
        return self.mesh.size

    @property
    def dp_size(self) -> int:
        """How many parts a batch is cut into."""
        return self.batch.axis_size("dp")

    def dp_rank(self, pool_rank: int) -> int:
        """Which part of a batch the rank works on."""
        return self.batch.coords(pool_rank)["dp"]

    def collects(self, pool_rank: int) -> bool:
        """Whether the rank hands in its part's results; exactly one rank of each part does."""
        return all(c == self.collecting[axis] for axis, c in self.batch.coords(pool_rank).items() if axis != "dp")

    @cached_property
    def dp_ranks(self) -> np.ndarray:
        """dp_rank of every pool rank, int64 [P]."""
        return self.batch.coordinate("dp")

    @cached_property
    def collect_mask(self) -> np.ndarray:
        """collects of every pool rank, bool [P]."""
        mask = np.ones(self.size, dtype=bool)
        for axis, place in self.collecting.items():
            mask &= self.batch.coordinate(axis) == place
        return mask

    @cached_property
    def collectors(self) -> np.ndarray:
        """The collecting pool ranks in dp order, int64 [dp_size]."""
        ranks = np.flatnonzero(self.collect_mask)
        return ranks[np.argsort(self.dp_ranks[ranks], kind="stable")]

    @property
    def folds(self) -> dict[str, Layout]:
        """The distinct layouts of this role by what they are for: mesh, batch, expert."""
        folds = {"mesh": self.mesh}
        if self.batch != self.mesh:
            folds["batch"] = self.batch
        if self.expert is not None:
            folds["expert"] = self.expert
        return folds

    @property
    def collecting(self) -> dict[str, int]:
        """Where on each axis besides dp the results are: the first rank, but the last pipeline stage of Megatron."""
        return {
            axis: self.batch.axis_size("pp") - 1 if axis == "pp" else 0 for axis in self.batch.names if axis != "dp"
        }


def split_rows(rows: int, parts: int) -> np.ndarray:
    """Row offsets of `parts` consecutive chunks, int64 [parts + 1]; sizes differ by one row at most, longer first."""
    size, longer = divmod(rows, parts)
    return np.concatenate([[0], np.cumsum(np.full(parts, size) + (np.arange(parts) < longer))])
