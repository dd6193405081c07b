"""Ranks on cores: the arithmetic on made-up hosts, the binding on this one."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmd_rl.config import ConfigError
from spmd_rl.runtime import cores
from spmd_rl.runtime.environment import read_environment
from tests.world import Worlds


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two NUMA nodes of four cores with two threads each, numbered as Linux does: siblings are 8 apart."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)


@pytest.mark.usefixtures("two_sockets")
def test_physical_cores_of_every_node() -> None:
    found = cores.numa_nodes(range(16))
    assert found == {0: [(0, 8), (1, 9), (2, 10), (3, 11)], 1: [(4, 12), (5, 13), (6, 14), (7, 15)]}
    assert cores.numa_nodes([0, 1, 9, 12]) == {0: [(0,), (1, 9)], 1: [(12,)]}


@pytest.mark.usefixtures("two_sockets")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_core_is_shared_and_none_is_left(ranks: int) -> None:
    node = cores.numa_nodes(range(16))[1]
    shares = [cores.choose("auto", node, place, ranks) for place in range(ranks)]
    assert [core for share in shares for core in share] == node
    assert {len(share) for share in shares} <= {len(node) // ranks, -(-len(node) // ranks)}


def test_too_few_cores() -> None:
    one = [(0, 1)]
    assert cores.choose("auto", one, 0, 2) == []
    assert cores.choose("numa", one, 1, 2) == one
    with pytest.raises(ConfigError, match="2 ranks share 1 cores"):
        cores.choose("cores", one, 0, 2)


def test_ranks_by_node() -> None:
    assert [cores.local_place([0, 1, 0, 1, 1], rank) for rank in range(5)] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_lists_of_cpus() -> None:
    assert cores.read_cpus("0-2,7,9-9\n") == [0, 1, 2, 7, 9]
    assert cores.read_cpus("\n") == []


def bound(how: str, allowed: tuple[list[int], list[int]]) -> tuple[list[int], int]:
    """(CPUs of this rank when it has been bound, torch's threads); `allowed`: what each rank might use before."""
    env, before, threads = read_environment(), os.sched_getaffinity(0), torch.get_num_threads()
    said = os.environ.pop("OMP_NUM_THREADS", None)
    store = next(iter(dist.rendezvous("env://")))[0]
    try:
        os.sched_setaffinity(0, allowed[env.rank])
        found = cores.bind(how, store, env, torch.device("cpu"))
        store.set(f"read {env.rank}", "yes")
        store.wait(["read 0", "read 1"])
        return found, torch.get_num_threads()
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
        if said is not None:
            os.environ["OMP_NUM_THREADS"] = said


needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


@needs_two
def test_two_ranks_here(worlds: Worlds) -> None:
    whole = sorted(os.sched_getaffinity(0))
    (first, threads), (second, _) = worlds[2].run(bound, "auto", (whole, whole))
    assert sorted(first + second) == whole
    assert first
    assert second
    assert 1 <= threads <= len(first)


@needs_two
def test_what_the_launcher_has_bound_stays(worlds: Worlds) -> None:
    whole = sorted(os.sched_getaffinity(0))
    (first, _), (second, _) = worlds[2].run(bound, "auto", (whole, whole[-1:]))
    assert first == whole
    assert second == whole[-1:]
