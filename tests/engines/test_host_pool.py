"""Hot swap on a CPU, where both ends of a move are the host's: storages empty and fill, objects and bits stay."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import swap as benchmark
from spmd_rl.engines import host_pool
from spmd_rl.engines.host_pool import ALIGN, HostMemoryError, HostPool, Swap, distinct_storages
from spmd_rl.observe.memory import host_memory_available
from tests.engines import ranks
from tests.world import Worlds

CPU = torch.device("cpu")


def swap_of(*tensors: Tensor) -> Swap:
    return Swap("actor.optimizer", lambda: tensors, CPU)


def go(swap: Swap, *calls: str) -> None:
    for call in calls:
        getattr(swap, call)()


def test_what_comes_back_is_what_left_to_the_bit() -> None:
    odd = torch.randn(33)
    special = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    half, view = torch.randn(7, 5).bfloat16(), odd[3:9]
    before = [x.clone().view(torch.uint8) for x in (odd, special, half)]
    swap = swap_of(odd, special, half, view)
    go(swap, "leave", "free")
    assert [x.untyped_storage().nbytes() for x in (odd, special, half, view)] == [0, 0, 0, 0]
    assert odd.shape == (33,)
    go(swap, "come", "settle")
    assert all(torch.equal(x.view(torch.uint8), was) for x, was in zip((odd, special, half), before, strict=True))
    odd[3] = 5.0
    assert view[0] == 5.0


def test_until_it_is_free_the_device_has_it_and_may_keep_it() -> None:
    x = torch.arange(1000.0)
    swap = swap_of(x)
    swap.leave()
    assert swap.state == "leaving"
    assert torch.equal(x, torch.arange(1000.0))
    swap.come()  # nothing was freed: nothing has to be copied back
    swap.settle()
    went, came = swap.take()
    assert (went.bytes, came.bytes) == (4000, 0)
    x += 1
    go(swap, "leave", "free", "come", "leave", "free", "come", "settle")
    assert torch.equal(x, torch.arange(1000.0) + 1)


def test_calls_may_be_repeated_and_each_way_is_counted_once() -> None:
    x = torch.zeros(2**20)
    swap = swap_of(x, x[5:])
    go(swap, "settle", "come", "free", "leave", "leave", "free", "free", "leave", "come", "come", "settle", "settle")
    went, came = swap.take()
    assert went.bytes == came.bytes == 2**22
    assert 0 < went.copying <= went.waiting
    assert 0 < came.copying <= came.waiting
    assert swap.take()[0].bytes == 0


def test_the_pool_is_exact_and_kept_and_made_anew_only_to_grow() -> None:
    held = [torch.zeros(1000), torch.zeros(3)]
    swap = Swap("actor.optimizer", lambda: held, CPU)
    go(swap, "leave", "free", "come", "settle")
    pool = swap.pool
    assert pool is not None
    assert pool.size == len(pool.bytes) == 2 * 4096
    assert 4000 + 12 <= 2 * ALIGN * 4 + ALIGN <= pool.size
    held.pop()
    go(swap, "leave", "free", "come", "settle")
    assert swap.pool is pool
    held.append(torch.ones(5000))
    go(swap, "leave", "free", "come", "settle")
    assert swap.pool is not pool
    assert torch.equal(held[1], torch.ones(5000))


def test_nothing_to_hold_needs_no_pool() -> None:
    swap = swap_of(torch.empty(0))
    go(swap, "leave", "free", "come", "settle")
    assert swap.pool is None
    assert distinct_storages([torch.empty(0)]) == []


def test_a_host_that_lacks_the_memory_is_told_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "host_memory_available", lambda: 2**20)
    swap = swap_of(torch.zeros(2**19))
    with pytest.raises(HostMemoryError, match=r"actor\.optimizer needs 0\.00 GiB .* but 0\.00 GiB are free; raise"):
        swap.leave()
    assert HostPool(2**20, "x", pinned=False).size == 2**20


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_counts(tmp_path: Path, version: int) -> None:
    whole = host_memory_available(tmp_path)
    assert whole is not None
    assert whole > 2**20
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text("1000000\n")
    (folder / names[1]).write_text("700000\n")
    (folder / "memory.stat").write_text("anon 600000\ninactive_file 90000\n")
    assert host_memory_available(tmp_path) == 390_000
    (folder / names[0]).write_text("max\n")
    assert host_memory_available(tmp_path) == pytest.approx(whole, rel=0.5)


LAYOUTS = {
    "alone": (1, []),
    "fsdp 2, kept after forward": (2, ["actor.engine.fsdp.reshard_after_forward=false"]),
    "ddp 2 x fsdp 2": (4, ["actor.engine.fsdp.fsdp_size=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_as_if_nothing_had_moved(worlds: Worlds, layout: str) -> None:
    size, overrides = LAYOUTS[layout]
    swapped, plain = (worlds[size].run(ranks.swapped_updates, overrides, swaps) for swaps in (True, False))
    for mine, expected in zip(swapped, plain, strict=True):
        assert len(mine) == len(expected) > 100
        assert all(map(torch.equal, mine, expected))
        assert not torch.equal(expected[1], expected[-1])


def test_gradients_go_and_come_where_there_are_some(worlds: Worlds) -> None:
    for without, moved, equal in worlds[2].run(ranks.swapped_gradients):
        assert without == 0
        assert moved > 10_000
        assert equal


def test_the_benchmark_measures_both_ways() -> None:
    found = benchmark.measure("smollm2-135m", 40_000_000, 1, CPU)
    assert found["bytes"] == 40_000_000
    assert all(found[f"swap {way}"]["GB/s"] > 0 for way in ("out", "in", "out whole", "in whole"))
    assert found["plain copy bytes"] == 40_000_000
