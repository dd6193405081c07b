"""A rank that dies, stops, hangs or raises is named, with its stack, and no other rank outlives it for long."""

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from spmd_rl.observe.status import describe
from spmd_rl.runtime.liveness import LOST_RANK, Liveness
from tests.runtime.watched import KILL, STOP, Job
from tests.trainer.launched import wait_until

pytestmark = pytest.mark.slow
ROLLOUT = "rank 2 (pool rollout, host"
TRAIN = "rank 1 (pool train, host"


@pytest.mark.parametrize(("rank", "number"), [(1, KILL), (2, KILL), (2, STOP)])
def test_a_rank_that_is_killed_or_stopped(tmp_path: Path, rank: int, number: int) -> None:
    with Job(tmp_path, {}) as job:
        job.wait_for("working")
        time.sleep(1.0)
        job.send(rank, number)
        ends, seconds = job.ends(30)
        others = [other for other in range(3) if other != rank]
        assert ends[rank] == -9
        assert [ends[other] for other in others] == [LOST_RANK] * 2
        assert seconds < 30
        message = job.message()
        assert message.startswith({1: TRAIN, 2: ROLLOUT}[rank])
        assert {KILL: "died: its process is gone", STOP: "is stopped"}[number] in message.splitlines()[0]
        assert f"in phase {'generate' if rank == 2 else 'update_actor'} of step 7" in message.splitlines()[0]
        assert "watched.py" in message
        assert all(message.splitlines()[0] in job.said(other) for other in others)
        text, code, works = describe(tmp_path, time.time())
        assert (code, works) == (1, False)
        assert message.rstrip() in text
        if number == STOP:
            assert "State: T (stopped)" in message


@pytest.mark.parametrize("number", [KILL, STOP])
def test_the_rank_that_holds_the_store(tmp_path: Path, number: int) -> None:
    with Job(tmp_path, {}) as job:
        job.wait_for("working")
        time.sleep(1.0)
        job.send(0, number)
        for process in job.ranks[1:]:
            process.join(30)
        assert [process.exitcode for process in job.ranks[1:]] == [LOST_RANK] * 2
        assert job.message().startswith("rank 0 (pool train, host")
        assert "in phase update_actor of step 7" in job.message()


@pytest.mark.parametrize(
    ("act", "words", "stack"),
    [
        ("hang_in_python", "hangs: no movement for trainer.timeout_s=4 s", "hang_in_python"),
        ("spin_in_python", "does not come to the collective in which rank 0 waits", "spin_in_python"),
        ("hold_pythons_lock", "hangs: ", "hold_pythons_lock"),
        ("raise_an_error", "raised an error", "ZeroDivisionError: the reward divides by zero"),
    ],
)
def test_a_rank_that_hangs_or_raises(tmp_path: Path, act: str, words: str, stack: str) -> None:
    with Job(tmp_path, {1: act}, timeout_s=4.0) as job:
        job.wait_for("working")
        ends, _ = job.ends(120)
        assert [ends[0], ends[2]] == [LOST_RANK] * 2
        assert ends[1] == {"hold_pythons_lock": -9, "raise_an_error": 1}.get(act, LOST_RANK)
        message = job.message()
        assert message.startswith(TRAIN)
        assert words in message.splitlines()[0]
        assert stack in message
        assert message.count("last stack") == 1  # rank 0 waits in a collective, and is not to blame


@pytest.mark.parametrize("act", ["compile_for_long", "move_for_long"])
def test_a_long_phase_is_no_hang(tmp_path: Path, act: str) -> None:
    """Python's lock held for longer than a rank may be silent; a phase that is longer than the time-out, but moves."""
    timeout_s = 60.0 if act == "compile_for_long" else 3.0
    with Job(tmp_path, {0: "leave", 1: "leave", 2: act}, timeout_s=timeout_s, silence_s=2.0) as job:
        job.wait_for("working")
        time.sleep(9)
        assert job.ranks[2].is_alive()
        assert job.ranks[1].exitcode == 0
        assert not list((tmp_path / "failures").glob("*.txt"))


def test_ranks_that_are_done(tmp_path: Path) -> None:
    with Job(tmp_path, dict.fromkeys(range(3), "leave")) as job:
        job.wait_for("working")
        placed = [["0", "train"], ["1", "train"], ["2", "rollout"]]
        found: list[list[str]] = []
        deadline = time.monotonic() + 20
        while found != placed and time.monotonic() < deadline:
            if (tmp_path / "status.json").exists():
                text, code, works = describe(tmp_path, time.time())
                assert (code, works) == (0, True)
                found = [line.split()[:2] for line in text.splitlines()[1:]]
        assert found == placed
        assert job.ends(20)[0] == [0, 0, 0]
    text, code, works = describe(tmp_path, time.time())
    assert (code, works) == (0, False)
    assert text.splitlines()[-1] == "done"
    assert not (tmp_path / "failures").exists()


def test_a_disk_that_takes_no_status_is_no_reason_to_fall_silent(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()  # it cannot be replaced by a file
    (tmp_path / "failures").write_text("")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alive = Liveness(store, 0, 1, [0], stuck_s=60.0, folder=tmp_path)
    alive.beat_s = 0.05
    alive.begin()
    try:
        assert wait_until(lambda: json.loads(store.get("alive/0"))["beat"] > 8, 20)
    finally:
        alive.leave()
    assert json.loads(store.get("alive/0"))["ended"] == "done"
