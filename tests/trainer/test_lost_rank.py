"""A rank of one pool that ends or stops in the middle of a real run: the other pools' ranks say so, and end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_rl.runtime.liveness import LOST_RANK
from tests.world import free_port

pytestmark = pytest.mark.slow
POOLS = {0: "global", 1: "rollout"}
WORDS = {signal.SIGKILL: "died", signal.SIGSTOP: "is stopped"}


def wait_until(true: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


@pytest.mark.parametrize("number", WORDS, ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", POOLS, ids=["an actor's rank", "a rollout's rank"])
def test_a_rank_of_one_pool_takes_the_others_with_it(tmp_path: Path, lost: int, number: signal.Signals) -> None:
    run = tmp_path / "run"
    settings = [
        "+pools.rollout.n_gpus_per_node=1",
        "rollout.pool=rollout",
        "trainer.schedule=one_step_off",
        "trainer.total_training_steps=10000",
        "observe.trackers=[jsonl]",
        f"trainer.output_dir={run}",
    ]
    port = str(free_port())
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "spmd_rl.train", "experiment=tiny", "trainer.device=cpu", *settings]
    logs = [tmp_path / f"{rank}.log" for rank in POOLS]
    ranks = []
    for rank, log in enumerate(logs):
        place = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("wb") as file:
            ranks.append(subprocess.Popen(command, env=place, stdout=file, stderr=file))
    try:
        metrics = run / "metrics.jsonl"
        trains = wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, 300)
        assert trains, [log.read_text()[-2000:] for log in logs]
        ranks[lost].send_signal(number)
        other = ranks[1 - lost]
        assert wait_until(lambda: other.poll() is not None, 30), logs[1 - lost].read_text()[-2000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert other.returncode == LOST_RANK
    (message,) = (run / "failures").glob("*.txt")
    first = message.read_text().splitlines()[0]
    assert first.startswith(f"rank {lost} (pool {POOLS[lost]}, ")
    assert WORDS[number] in first
    assert "in phase " in first
    assert first in logs[1 - lost].read_text()
