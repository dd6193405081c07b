"""Two hosts (network namespaces) under torchrun's c10d: who is which rank, a host that dies, a slow network."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.trainer.checkpoint import committed
from tests.cluster.hosts import Hosts, skip_without_namespaces
from tests.trainer.launched import lines

pytestmark = pytest.mark.netns
NAMES = ("zeta", "alpha")
"""zeta has the lower address; torchrun, which sorts names as text, puts alpha first."""
TINY = ["experiment=tiny", "observe.trackers=[jsonl]", "data.val.task=null", "trainer.save_freq=1"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    skip_without_namespaces()
    with Hosts(2, NAMES) as made:
        yield made


def start(hosts: Hosts, host: int, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """torchrun with one rank on a host; the meeting point is on the first one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    meeting += ["--rdzv-endpoint", f"{NAMES[0]}:29400", "--max-restarts", "3"]
    command = [sys.executable, "-m", "spmd_rl.torchrun", *meeting, "-m", "spmd_rl.train", *TINY]
    log = (folder.parent / f"{folder.name}.{NAMES[host]}.log").open("a", encoding="utf-8")
    with log:
        return hosts.start(host, [*command, f"trainer.output_dir={folder}", *words], env=env, stdout=log, stderr=log)


def run(hosts: Hosts, order: tuple[int, int], folder: Path, *words: str) -> None:
    """A whole run; the second host starts three seconds after the first one."""
    first = start(hosts, order[0], folder, *words)
    time.sleep(3)
    ends = [start(hosts, order[1], folder, *words).wait(300), first.wait(60)]
    assert ends == [0, 0], said(folder)


def said(folder: Path) -> str:
    return "\n".join(log.read_text()[-3000:] for log in sorted(folder.parent.glob(f"{folder.name}.*.log")))


def host_of_rank(folder: Path) -> list[str]:
    status: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return [report["host"] for report in status["ranks"]]


def reported_step(folder: Path, rank: int) -> int:
    """The step that the rank's last word is of, as rank 0 heard it; 0 before any."""
    file = folder / "status.json"
    return int(json.loads(file.read_text())["ranks"][rank]["step"]) if file.is_file() else 0


def test_either_order_and_fifty_megabit(hosts: Hosts, tmp_path: Path) -> None:
    """The same ranks and, to the last bit, the same run: started in either order, over a fast and a slow network."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    run(hosts, (0, 1), fast, "trainer.total_training_steps=3")
    hosts.limit(50)
    run(hosts, (1, 0), slow, "trainer.total_training_steps=3")
    assert host_of_rank(fast) == host_of_rank(slow) == list(NAMES)
    assert json.loads((slow / "roster.json").read_text())["seats"] == hosts.addresses
    assert lines(fast) == lines(slow)
    assert [row["step"] for row in lines(fast)] == [1, 2, 3]


def test_a_host_that_dies_and_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    """The other host's rank is ended by the watch, both meet again, and no step is lost."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    words = ["trainer.total_training_steps=40", "trainer.checkpoint.keep=0"]
    running = [start(hosts, host, folder, *words) for host in range(2)]
    wait_until(lambda: len(committed(folder)) >= 3 and reported_step(folder, 1) >= 1, 200, folder)
    hosts.kill(1)
    running[1].wait(20)
    died = time.monotonic()
    wait_until(lambda: bool(list((folder / "failures").glob("*.txt"))), 60, folder)
    assert time.monotonic() - died < 60
    again = start(hosts, 1, folder, *words)
    assert [running[0].wait(400), again.wait(60)] == [0, 0], said(folder)
    (message,) = [file.read_text() for file in (folder / "failures").glob("001-*.txt")]
    assert message.startswith("rank 1 (pool global, host alpha, pid")
    assert host_of_rank(folder) == list(NAMES)
    assert json.loads((folder / "roster.json").read_text())["seats"] == hosts.addresses
    assert [row["step"] for row in lines(folder)] == [*range(1, 41)]
    run(hosts, (1, 0), whole, "trainer.total_training_steps=40", "trainer.checkpoint.keep=0")
    assert lines(folder) == lines(whole)


def wait_until(good: Any, seconds: float, folder: Path) -> None:
    end = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < end, said(folder)
        time.sleep(0.2)
