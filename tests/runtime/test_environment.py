"""Who a rank is, as its launcher says."""

import pytest
import torch

from spmd_rl.config import ConfigError
from spmd_rl.runtime.bootstrap import choose_device
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
SPREAD = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES + SLURM + SPREAD:
        monkeypatch.setenv(name, "")  # so that what the code sets is undone, too
        monkeypatch.delenv(name)


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("5", "1", "8", "4"), strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "0")  # torchrun under Slurm: torchrun's word counts
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert read_environment() == LaunchEnvironment(5, 1, 8, 4, launched=True, node="4")


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(SLURM, ("3", "1", "4", "2"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not set"):
        read_environment()
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert read_environment() == LaunchEnvironment(3, 1, 4, 2, launched=True)
    assert read_environment().rank == 3  # the variables that torch reads are filled in


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 2), (3, 1)])
def test_srun_on_hosts_of_different_size(monkeypatch: pytest.MonkeyPatch, node: int, tasks: int) -> None:
    for name, value in zip(SLURM[:3] + SPREAD, ("0", "0", "11", "4(x2),2,1", str(node)), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert read_environment().local_world_size == tasks


def test_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_environment()
    assert found == LaunchEnvironment(0, 0, 1, 1, launched=False)
    assert found.is_first


@pytest.mark.skipif(torch.cuda.is_available(), reason="of hosts without a GPU")
def test_devices_without_a_gpu() -> None:
    assert choose_device("auto", 3) == choose_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device("cuda", 0)
    with pytest.raises(ConfigError, match=r"trainer\.device=tpu; use auto, cpu or cuda"):
        choose_device("tpu", 0)
