"""Weight syncs between real gloo ranks: every pair of layouts, bit by bit; and what a fault does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmd_rl.weights.copies import Copies, checksum
from spmd_rl.weights.held import Box, Held
from spmd_rl.weights.sync import TableSync
from spmd_rl.weights.table import SyncError
from tests.weights.layouts import LAYOUTS, SPECS, boxes
from tests.world import Worlds

PAIRS = [(s, t) for s in LAYOUTS for t in LAYOUTS]


def values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]


def hold(layout: str, rank: int, ranks: int, dtype: torch.dtype, padded: bool) -> list[Held]:
    """Memory for a layout's boxes, full of nan; padded: rows of a wider tensor, as a fused or padded parameter's."""
    held = []
    for box in boxes(layout, rank, ranks):
        wide = (*box.size[:-1], box.size[-1] + 3) if padded else box.size
        memory = torch.full(wide, float("nan"), dtype=dtype)
        held.append(Held(box, memory[..., : box.size[-1]]))
    return held


def fill(held: list[Held], step: int) -> None:
    whole = values(step)
    for h in held:
        h.view.copy_(part(whole[h.box.name], h.box))


def is_filled(held: list[Held], step: int) -> bool:
    whole = values(step)
    return all(torch.equal(h.view, part(whole[h.box.name], h.box).to(h.view.dtype)) for h in held)


def start() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def sync_all_pairs(bucket_bytes: int) -> list[bool]:
    rank, ranks = start()
    group, good = dist.group.WORLD, []
    for at, (source, target) in enumerate(PAIRS):
        sources = hold(source, rank, ranks, torch.float32, padded=False)
        targets = hold(target, rank, ranks, torch.bfloat16, padded=bool(at % 2))
        path = TableSync(SPECS, sources, targets, group, group, torch.device("cpu"), bucket_bytes)
        for step, verify in ((1, "checksum"), (2, "full"), (3, "off")):
            fill(sources, step)
            path.run(verify)
            good.append(is_filled(targets, step))
    dist.destroy_process_group()
    return good


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_pair_of_layouts_bit_by_bit(worlds: Worlds, ranks: int, bucket_bytes: int) -> None:
    for good in worlds[ranks].run(sync_all_pairs, bucket_bytes):
        assert good == [True] * (3 * len(PAIRS))


def sync_after_a_move() -> tuple[bool, bool, bool]:
    rank, ranks = start()
    group = dist.group.WORLD
    sources, targets = (hold(layout, rank, ranks, torch.float32, False) for layout in ("fsdp", "tp2"))
    path = TableSync(SPECS, sources, targets, group, group, torch.device("cpu"))
    stayed = path.bound_to(sources, targets)
    elsewhere = hold("fsdp", rank, ranks, torch.float32, False)
    moved = not path.bound_to(elsewhere, targets)
    path.bind(elsewhere, targets)
    fill(elsewhere, 5)
    path.run()
    dist.destroy_process_group()
    return stayed, moved, is_filled(targets, 5)


def test_after_tensors_were_moved_the_table_is_bound_to_where_they_are(worlds: Worlds) -> None:
    assert worlds[2].run(sync_after_a_move) == [(True, True, True)] * 2


def plant(fault: str, verify: str) -> str:
    """A sync with a fault between the copy and the proof, on the last rank only; what was raised."""
    rank, ranks = start()
    group = dist.group.WORLD
    sources, targets = (hold(layout, rank, ranks, torch.float32, False) for layout in ("fsdp", "whole"))
    path = TableSync(SPECS, sources, targets, group, group, torch.device("cpu"))
    fill(sources, 1)
    q = next(h.view for h in targets if h.box.name == "q")
    kept = path.local.sums

    def faulty() -> torch.Tensor:  # the first thing that looks at what has arrived
        if rank == ranks - 1:
            if fault == "swapped rows":
                q[[0, 1]] = q[[1, 0]]
            elif fault == "swapped halves":
                q[:4], q[4:] = q[4:].clone(), q[:4].clone()
            elif fault == "one bit":
                q.view(torch.int32)[2, 3] ^= 1
            elif fault == "stale":
                q[1].zero_()
        return kept()

    path.local.sums = faulty  # type: ignore[method-assign]
    try:
        path.run(verify)
        said = ""
    except SyncError as error:
        said = str(error)
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("verify", ["checksum", "full"])
@pytest.mark.parametrize("fault", ["swapped rows", "swapped halves", "one bit", "stale"])
def test_a_fault_stops_every_rank_with_the_tensors_name(worlds: Worlds, fault: str, verify: str) -> None:
    first, last = worlds[2].run(plant, fault, verify)
    assert "weight sync: q[" in last
    assert "did not arrive on rank 1 of the pool: checksum of the source" in last
    assert "another rank says" in first


def test_without_a_fault_nothing_is_raised(worlds: Worlds) -> None:
    assert worlds[2].run(plant, "none", "full") == ["", ""]


def test_checksum_depends_on_place_value_and_dtype_and_not_on_strides() -> None:
    x = torch.randn(7, 5)
    assert checksum(x) == checksum(x.t().contiguous().t()) == checksum(torch.cat([x, x], 1)[:, :5])
    swapped = x.clone()
    swapped[[0, 1]] = x[[1, 0]]
    others = [swapped, x.t().contiguous(), x * (1 + 2**-23), x.bfloat16(), torch.cat([x, torch.zeros(1, 5)])]
    assert len({int(checksum(o)) for o in [x, *others]}) == 6


def test_a_checksum_by_hand() -> None:
    """bits 1.0f = 0x3f800000, 2.0f = 0x40000000; weights (i · 2654435761 + 2654435769) | 1."""
    by_hand = (0x3F800001 * (2654435769 | 1) + 0x40000001 * ((2654435761 + 2654435769) % 2**32 | 1)) % 2**32
    assert int(checksum(torch.tensor([1.0, 2.0]))) % 2**32 == by_hand


def test_copies_give_the_sums_of_what_arrives() -> None:
    pairs: list[tuple[Any, Any]] = [
        (torch.zeros(3, 4, dtype=torch.bfloat16), torch.randn(3, 4)),
        (torch.zeros(4, 6)[:, 1:5], torch.randn(4, 4)),
        (torch.zeros(0, 4), torch.zeros(0, 4)),
    ]
    copies = Copies(pairs)
    assert torch.equal(copies.run(), copies.sums())
    assert all(torch.equal(t, s.to(t.dtype)) for t, s in pairs)
    assert Copies([]).run().numel() == 0
