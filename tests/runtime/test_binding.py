"""One rank, one GPU: what each rank of a node says of its device is compared before there are process groups."""

import pytest
import torch
from torch.distributed import HashStore

from spmd_rl.config import ConfigError
from spmd_rl.runtime.bootstrap import check_binding, choose_device
from spmd_rl.runtime.environment import LaunchEnvironment


def bind(rank: int, devices: list[str], ranks_per_gpu: int = 1, local_world_size: int = 2) -> None:
    """check_binding on `rank` of hosts with `local_world_size` ranks each, the others having spoken."""
    store = HashStore()
    for other, device in enumerate(devices):
        store.set(f"device of {other}", device)
    env = LaunchEnvironment(rank, rank % local_world_size, len(devices), local_world_size, launched=True)
    check_binding(store, env, devices[rank], ranks_per_gpu)


def test_a_gpu_of_its_own_for_each_rank() -> None:
    bind(0, ["a", "b"])
    bind(3, ["a", "b", "a", "b"])  # the hosts' devices are not compared with each other


@pytest.mark.parametrize("rank", [2, 3])
def test_two_ranks_on_one_gpu(rank: int) -> None:
    with pytest.raises(ConfigError) as error:
        bind(rank, ["a", "b", "c", "c"])
    assert str(error.value) == (
        "ranks 2, 3 are on one GPU (c), and cluster.ranks_per_gpu=1: start one rank a GPU (--nproc-per-node, "
        "CUDA_VISIBLE_DEVICES), or set cluster.ranks_per_gpu=2"
    )


def test_shared_when_asked_for() -> None:
    bind(1, ["a", "a"], ranks_per_gpu=2)
    with pytest.raises(ConfigError, match="ranks 0, 1, 2 are on one GPU"):
        bind(0, ["a", "a", "a"], ranks_per_gpu=2, local_world_size=3)


@pytest.mark.parametrize(("local_rank", "ranks_per_gpu", "seen", "index"), [(3, 1, 4, 3), (3, 2, 2, 1), (5, 1, 1, 0)])
def test_which_device(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, ranks_per_gpu: int, seen: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert choose_device("auto", local_rank, ranks_per_gpu) == torch.device("cuda", index)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="local_rank=2 >= 2: this node has 2 CUDA devices"):
        choose_device("cuda", 2)
