"""Intervals of flattened matrices as boxes, and streams cut over context-parallel ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.engines.megatron.stream import Chunk, Stream
from spmd_rl.models.attention import Spans, attend
from spmd_rl.models.megatron_names import rectangles


@pytest.mark.parametrize("shape", [(7,), (4, 5), (1, 6), (6, 1)])
def test_rectangles_tile_an_interval_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    for low in range(whole.numel() + 1):
        for high in range(low, whole.numel() + 1):
            found = list(rectangles(shape, low, high))
            pieces = [whole[tuple(slice(a, a + n) for a, n in zip(s, z, strict=True))] for _, _, s, z in found]
            assert torch.cat([torch.empty(0), *(p.reshape(-1) for p in pieces)]).tolist() == list(range(low, high))
            assert [a for a, _, _, _ in found] == [int(p.reshape(-1)[0]) for p in pieces]
            assert len(found) <= 3


class Group:
    """What a stream asks of a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def streams(lengths: list[int], cp: int, tp: int = 1) -> list[Stream]:
    groups: list[Any] = [Group(cp, rank) for rank in range(cp)]
    return [Stream.of(lengths, group, tp, torch.device("cpu")) for group in groups]


LENGTHS = [[3, 9, 1, 6], [40], [1], [], [8, 8], [5, 30, 2]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_ranks_hold_the_stream_once(lengths: list[int], cp: int, tp: int) -> None:
    ranks = streams(lengths, cp, tp)
    tokens = torch.arange(1, sum(lengths) + 1)
    parts = [stream.local(tokens) for stream in ranks]
    assert all(len(part) == ranks[0].total // cp and len(part) % tp == 0 for part in parts)
    assert ranks[0].whole(parts)[: len(tokens)].tolist() == tokens.tolist()
    places = torch.arange(len(tokens))[::2]
    found = [stream.find(places, r) for r, stream in enumerate(ranks)]
    assert sorted(torch.cat([which for which, _ in found]).tolist()) == list(range(len(places)))
    for part, (which, at) in zip(parts, found, strict=True):
        assert part[at].tolist() == tokens[places[which]].tolist()
    rows = torch.cat([torch.arange(n) for n in ranks[0].lengths])
    assert ranks[0].whole([stream.position_ids() for stream in ranks]).tolist() == rows.tolist()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 4])
def test_attention_in_chunks_is_attention(lengths: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = streams(lengths, 1)[0]
    for cp in (2, 3):
        ranks = streams(lengths, cp)
        total = ranks[0].total
        q, k, v = (torch.randn(total, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
        rows = Spans.of(ranks[0].lengths, ranks[0].lengths, torch.device("cpu"))
        expected = attend(q, k, v, rows, 0.3, window)
        outs = [torch.cat([part(q, k, v, chunk, window) for chunk in stream.chunks]) for stream in ranks]
        assert torch.allclose(ranks[0].whole(outs), expected, atol=1e-12)
    assert [c.spans.queries for c in whole.chunks] == [whole.lengths]


def part(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, window: int | None) -> Tensor:
    """What one rank computes of one of its chunks."""
    keys = slice(chunk.keys_start, chunk.stop)
    return attend(q[chunk.start : chunk.stop], k[keys], v[keys], chunk.spans, 0.3, window)


def test_the_zigzag_shares_out_the_work_of_one_long_row() -> None:
    def pairs(stream: Stream) -> int:
        """(query, key) pairs of one row under the causal mask, twice."""
        spans = [(c.spans.queries[0], c.spans.keys[0]) for c in stream.chunks]
        return sum(queries * (2 * keys - queries + 1) for queries, keys in spans)

    assert {pairs(stream) for stream in streams([64], 4)} == {64 * 65 // 4}
