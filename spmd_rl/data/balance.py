"""Who works on which row: balancing over dp ranks and micro-batches under a token cap.

Pure functions of the row lengths (tokens a row), so every rank computes the same answer by itself and nothing is sent.
Needs neither torch nor a tokenizer.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmd_rl.config import ConfigError

ATTENTION_EQUAL_LINEAR = 24576
"""Tokens at which a row's attention (quadratic) costs as much as its matrix products (linear): 6 × a hidden size of
4096, a 7B model. verl weighs rows by the same number, so partitions agree with it."""


def workload(lengths: Sequence[int]) -> list[int]:
    """Relative cost of each row: linear layers, where a token costs 24576 units, plus causal attention."""
    return [ATTENTION_EQUAL_LINEAR * n + n * n for n in lengths]


class _Bin(NamedTuple):
    """Rows of one partition. Tuple order (total, size, rows) also settles ties, so that the result is unique."""

    total: int
    size: int
    rows: list[int]

    def join(self, other: "_Bin") -> "_Bin":
        return _Bin(self.total + other.total, self.size + other.size, self.rows + other.rows)


class _Partial:
    """A partition of some of the rows into k bins; only the filled bins are kept, largest first."""

    def __init__(self, bins: list[_Bin], k: int):
        self.bins = sorted(bins, reverse=True)
        self.k = k
        self.spread = self.bins[0].total - (self.bins[-1].total if len(bins) == k else 0)

    def __lt__(self, other: "_Partial") -> bool:
        """Heap order: the widest spread first, then the largest bin."""
        return (self.spread, self.bins[0]) > (other.spread, other.bins[0])

    def merge(self, other: "_Partial") -> "_Partial":
        """Largest bins onto smallest: bin i of this one joins bin k-1-i of the other."""
        free = self.k - len(other.bins)  # bins of ours that meet an empty one
        mine, meeting = self.bins[:free], self.bins[free:]
        theirs = other.bins[::-1]  # smallest first
        joined = [a.join(b) for a, b in zip(meeting, theirs, strict=False)]
        return _Partial(mine + joined + theirs[len(meeting) :], self.k)


def balance(
    lengths: Sequence[int],
    parts: int,
    equal_size: bool = False,
    cost: Callable[[Sequence[int]], Sequence[int]] = workload,
) -> list[list[int]]:
    """Split rows of `lengths` tokens into `parts` lists of row indices with nearly equal summed `cost` (the largest
    differencing method of Karmarkar and Karp, 1982).

    Each list ascends. With `equal_size` every list has the same number of rows, so `parts` must divide them. Fewer rows
    than parts leave the last lists empty. O(N log N + N·parts/2) in the worst case.
    """
    if parts < 1:
        raise ValueError(f"balance: parts={parts}; at least 1 is needed")
    if equal_size and len(lengths) % parts:
        raise ValueError(f"balance: parts={parts} does not divide {len(lengths)} rows, so they cannot be of equal size")
    if not lengths:
        return [[] for _ in range(parts)]
    take = parts if equal_size else 1
    rows = [_Bin(c, 1, [i]) for c, i in sorted((c, i) for i, c in enumerate(cost(lengths)))]
    heap = [_Partial(rows[at : at + take], parts) for at in range(0, len(rows), take)]
    heapq.heapify(heap)
    while len(heap) > 1:
        widest = heapq.heappop(heap)
        heapq.heapreplace(heap, widest.merge(heap[0]))
    filled = [sorted(b.rows) for b in heap[0].bins]
    return filled + [[] for _ in range(parts - len(filled))]


def zigzag(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Order `rows` short, …, long, …, short: ascending by (length, row), every second one on the way down."""
    ordered = sorted(rows, key=lambda i: (lengths[i], i))
    return ordered[::2] + ordered[1::2][::-1]


def micro_batches(
    lengths: Sequence[int], max_tokens: int, at_least: int = 1, multiple_of: int = 1, small_ends: bool = True
) -> list[list[int]]:
    """Split one dp rank's rows into micro-batches of at most `max_tokens` tokens each, with balanced `workload`.

    As few as the cap allows, but `at_least` so many, and a multiple of `multiple_of` (interleaved pipelines need it).
    `small_ends` puts the lighter ones first and last, where a pipeline fills and drains; else the order is the split's.
    More micro-batches than rows: the rest are empty lists, at the end.

    Raises `ConfigError` for a row longer than the cap. (verl's main branch lets a micro-batch exceed the cap when the
    balanced split does not fit; here the number of micro-batches grows until it fits, as in its release 0.9.1.)
    """
    check_cap(lengths, max_tokens)
    cost = workload(lengths)
    count = _round_up(max(at_least, -(-sum(lengths) // max_tokens), 1), multiple_of)
    split = balance(lengths, count)
    while any(sum(lengths[i] for i in rows) > max_tokens for rows in split):
        count += multiple_of
        split = balance(lengths, count)
    filled = [rows for rows in split if rows]
    if small_ends:
        filled.sort(key=lambda rows: (sum(cost[i] for i in rows), rows[0]), reverse=True)
        filled = filled[::2][::-1] + filled[1::2]
    return filled + [[] for _ in range(count - len(filled))]


def check_cap(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise `ConfigError` when some row alone is over the micro-batch cap."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a row of {longest} tokens > max_tokens_per_micro_batch={max_tokens}; raise the cap, or lower "
            "data.max_prompt_length + data.max_response_length to it"
        )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Assignment:
    """Which dp rank works on which rows of a step's global batch, and in which micro-batches."""

    dp_of_row: list[int]
    """[N]: each row's dp rank."""
    micro: list[list[list[list[int]]]]
    """[mini-batch][dp rank] -> micro-batches, each a list of row indices of the global batch; the same number of
    them on every dp rank of a mini-batch (empty lists pad)."""

    def rows(self, dp_rank: int) -> list[int]:
        """All rows of a dp rank, ascending."""
        return [i for i, owner in enumerate(self.dp_of_row) if owner == dp_rank]

    def mini_rows(self, mini: int, dp_rank: int) -> list[int]:
        """Rows of a dp rank in one mini-batch, in micro-batch order."""
        return [i for rows in self.micro[mini][dp_rank] for i in rows]


def assign(
    lengths_N: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    dp_size: int,
    max_tokens: int,
    multiple_of: int = 1,
    owner: Sequence[int] | None = None,
) -> Assignment:
    """Deal a global batch of N rows out to dp ranks and micro-batches.

    `lengths_N` in tokens; `mini_batches`: the rows of each (see `consecutive`), over all epochs in order of the update;
    together they must name every row. Inside a mini-batch the rows are balanced over the dp ranks (their numbers may
    differ, down to none), then each rank's rows go into micro-batches of at most `max_tokens` tokens, as many on every
    rank. A row that comes again (another PPO epoch) stays on its rank, so that no data moves. `owner` [N] gives every
    row's dp rank where the rows have been dealt out before.
    """
    check_cap(lengths_N, max_tokens)
    owner = [-1] * len(lengths_N) if owner is None else list(owner)
    micro = []
    for rows in mini_batches:
        fresh = [row for row in rows if owner[row] < 0]
        for rank, part in enumerate(balance([lengths_N[row] for row in fresh], dp_size)):
            for at in part:
                owner[fresh[at]] = rank
        per_rank: list[list[int]] = [[] for _ in range(dp_size)]
        for row in rows:
            per_rank[owner[row]].append(row)
        micro.append(_equal_counts(lengths_N, per_rank, max_tokens, multiple_of))
    if -1 in owner:
        raise ValueError(f"assign: row {owner.index(-1)} of {len(owner)} is in no mini-batch")
    return Assignment(owner, micro)


def _equal_counts(
    lengths: Sequence[int], per_rank: list[list[int]], max_tokens: int, multiple_of: int
) -> list[list[list[int]]]:
    """Micro-batches of each rank's rows; all ranks get as many as the rank that needs most."""

    def split(rows: list[int], at_least: int) -> list[list[int]]:
        local = micro_batches([lengths[i] for i in rows], max_tokens, at_least, multiple_of)
        return [[rows[i] for i in batch] for batch in local]

    counts = [len(split(rows, 1)) for rows in per_rank]
    while True:  # asking a rank for more may, rarely, give still more; settled after a round or two
        most = max(counts)
        out = [split(rows, most) for rows in per_rank]
        counts = [len(batches) for batches in out]
        if max(counts) == most:
            return out


def consecutive(n_rows: int, mini_batch_rows: int) -> list[list[int]]:
    """Mini-batches of consecutive rows of the global batch; the last one may be smaller."""
    return [list(range(at, min(at + mini_batch_rows, n_rows))) for at in range(0, n_rows, mini_batch_rows)]


def balance_report(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """verl's `global_seqlen/*` metrics, in tokens a dp rank: min and max of consecutive chunks (the last takes what is
    left) against those of `parts`."""
    size = max(1, len(lengths) // len(parts))
    before = [sum(lengths[at : at + size]) for at in range(0, size * len(parts), size)]
    after = [sum(lengths[i] for i in rows) for rows in parts]
    return {
        "global_seqlen/min": min(before),
        "global_seqlen/max": max(before),
        "global_seqlen/minmax_diff": max(before) - min(before),
        "global_seqlen/balanced_min": min(after),
        "global_seqlen/balanced_max": max(after),
        "global_seqlen/mean": sum(lengths) / len(parts),
    }
