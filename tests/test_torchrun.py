"""Ranks that are forked from one set of imports behave as those that torchrun starts by itself."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spmd_rl.observe import processes
from tests.trainer.launched import wait_until

RANK = """
import gc, json, os, signal, sys, time
IMPORTED_BY = os.getpid()
if __name__ != "__main__":
    import atexit, gc
    atexit.register(lambda: open("frozen", "w").write(str(gc.get_freeze_count())))
if __name__ == "__main__":
    import torch
    wanted, *argv = sys.argv[1:]
    rank = os.environ["RANK"]
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    said = {
        "argv": argv,
        "world": os.environ["WORLD_SIZE"],
        "parent": os.getppid(),
        "imported_by": __import__("ranks_module").IMPORTED_BY,
        "handlers": [getattr(h := signal.getsignal(getattr(signal, n)), "name", str(h)) for n in names],
        "threads": torch.get_num_threads(),
        "collects_garbage": gc.isenabled(),
    }
    open(rank, "w").write(json.dumps(said))
    print(f"rank {rank} speaks")
    if wanted == "raise" and rank == "1":
        raise ArithmeticError("rank 1 has had enough")
    if wanted == "status" and rank == "1":
        sys.exit(3)
    if wanted == "mistake" and rank == "0":
        sys.exit(2)
    if wanted == "fails when asked":
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
        open(f"polite{rank}", "w").write(str(os.getpid()))
    if wanted == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        open(f"polite{rank}", "w").write(str(os.getpid()))
    time.sleep(60 if wanted != "end" else 0)
    sys.exit(0)
"""


def open_(folder: Path, launcher: str, *words: str, options: Sequence[str] = ()) -> "subprocess.Popen[str]":
    (folder / "ranks_module.py").write_text(RANK, encoding="utf-8")
    (folder / "tmp").mkdir(exist_ok=True)
    path, temporary = f"{folder}:{os.environ.get('PYTHONPATH', '')}", str(folder / "tmp")
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
    command = [
        sys.executable,
        "-m",
        launcher,
        "--standalone",
        "--nproc-per-node",
        "2",
        *options,
        "-m",
        "ranks_module",
        *words,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def start(folder: Path, launcher: str, *words: str) -> "subprocess.CompletedProcess[str]":
    with open_(folder, launcher, *words) as process:
        try:
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def said(folder: Path) -> list[dict[str, object]]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def test_ranks_share_the_imports_and_are_new_otherwise(tmp_path: Path) -> None:
    done = start(tmp_path, "spmd_rl.torchrun", "end", "--word", "key=value")
    assert done.returncode == 0, done.stderr
    ours = said(tmp_path)
    for rank in ours:
        assert rank.pop("imported_by") == rank.pop("parent")  # torchrun's agent
    start(tmp_path, "torch.distributed.run", "end", "--word", "key=value")
    theirs = said(tmp_path)
    for rank in theirs:
        assert rank.pop("imported_by") != rank.pop("parent")
    assert ours == theirs


@pytest.mark.parametrize(("wanted", "says"), [("raise", "ArithmeticError: rank 1 has had enough"), ("status", "3")])
def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path, wanted: str, says: str) -> None:
    done = start(tmp_path, "spmd_rl.torchrun", wanted)
    assert done.returncode == 1
    assert says in done.stderr
    assert not list((tmp_path / "tmp").iterdir())
    assert (tmp_path / "frozen").read_text() == "0"  # else extension modules print that they leak
    assert "rank 1 speaks" in done.stdout  # though its buffers were not flushed by an orderly end


def test_a_mistake_is_left_to_the_ranks_own_words(tmp_path: Path) -> None:
    done = start(tmp_path, "spmd_rl.torchrun", "mistake")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ChildFailedError" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_end_well_do_not_wait_for_an_agent_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    """torchrun's own forked ranks stay for 30 s, or for ever."""
    marks = [tmp_path / f"polite{rank}" for rank in range(2)]
    with open_(tmp_path, "spmd_rl.torchrun", "polite") as agent:
        try:
            assert wait_until(lambda: all(mark.exists() and mark.read_text() for mark in marks), 60)
            ranks = {pid: processes.born(pid) for pid in (int(mark.read_text()) for mark in marks)}
            agent.send_signal(number)
            if number == signal.SIGKILL:
                agent.wait()
                for rank in ranks:
                    os.kill(rank, signal.SIGTERM)
            assert wait_until(lambda: all(processes.state(*rank) == processes.GONE for rank in ranks.items()), 15)
        finally:
            agent.kill()


def test_ranks_that_fail_as_they_are_asked_to_end_are_not_started_again(tmp_path: Path) -> None:
    """One Ctrl-C may also come twice, from a terminal and from a wrapper."""
    marks = [tmp_path / f"polite{rank}" for rank in range(2)]
    with open_(tmp_path, "spmd_rl.torchrun", "fails when asked", options=["--max-restarts", "3"]) as agent:
        try:
            assert wait_until(lambda: all(mark.exists() and mark.read_text() for mark in marks), 60)
            ranks = [mark.read_text() for mark in marks]
            agent.send_signal(signal.SIGINT)
            agent.send_signal(signal.SIGINT)
            _, err = agent.communicate(timeout=60)
        finally:
            agent.kill()
    assert agent.returncode == 128 + signal.SIGINT
    assert [mark.read_text() for mark in marks] == ranks, err
