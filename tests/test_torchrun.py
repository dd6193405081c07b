"""Ranks that are forked from one set of imports behave as those that torchrun starts by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import gc, json, os, signal, sys, time
IMPORTED_BY = os.getpid()
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
    time.sleep(60 if wanted != "end" else 0)
    sys.exit(0)
"""


def start(folder: Path, launcher: str, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "ranks_module.py").write_text(RANK, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2", "-m", "ranks_module", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)


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
    assert "rank 1 speaks" in done.stdout  # though its buffers were not flushed by an orderly end
