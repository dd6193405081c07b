"""Ranks that are watched over, without a launcher that would end them itself: three processes, pools `train` (0, 1) and
`rollout` (2), each doing what a test asks of it.
"""

import ast
import ctypes
import difflib
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.config.load import compose
from spmd_rl.observe.live import HERE
from spmd_rl.runtime import liveness
from spmd_rl.runtime.environment import read_environment
from spmd_rl.runtime.joining import joined
from spmd_rl.runtime.process_groups import start_pool
from tests.world import PRELOAD, free_port

POOLS = {"train": (0, 1), "rollout": (2,)}


class Job:
    """Three ranks; `acts` says by rank what a rank does instead of working on."""

    def __init__(self, folder: Path, acts: Mapping[int, str], timeout_s: float = 60.0, silence_s: float = 4.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = folder
        port = free_port()
        self.ranks = [
            context.Process(target=_rank, args=(rank, port, str(folder), acts.get(rank, "work"), timeout_s, silence_s))
            for rank in range(3)
        ]
        for process in self.ranks:
            process.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def wait_for(self, phase: str, timeout_s: float = 200.0) -> None:
        """Until every rank has begun to work."""
        end = time.monotonic() + timeout_s
        while not all((self.folder / f"{rank}.{phase}").exists() for rank in range(3)):
            assert time.monotonic() < end, f"not every rank came to {phase}"
            time.sleep(0.05)

    def send(self, rank: int, number: int) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def ends(self, timeout_s: float) -> tuple[list[int | None], float]:
        """Exit statuses of all ranks, and the seconds until the last one had ended; None for one that has not."""
        begun = time.monotonic()
        for process in self.ranks:
            process.join(max(0.0, begun + timeout_s - time.monotonic()))
        return [process.exitcode for process in self.ranks], time.monotonic() - begun

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def message(self) -> str:
        """What lies on the disk: exactly one message."""
        (file,) = (self.folder / "failures").glob("*.txt")
        return file.read_text()


def _rank(rank: int, port: int, folder: str, act: str, timeout_s: float, silence_s: float) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    liveness.SILENCE_S, liveness.BEAT_S = silence_s, 0.5
    config = compose(["experiment=tiny", f"trainer.output_dir={folder}", f"trainer.timeout_s={timeout_s}"])
    with joined(config, read_environment(), trains=True) as env:
        for pool, ranks in POOLS.items():
            if rank in ranks:
                HERE.pool = pool
                at, device = ranks.index(rank), torch.device("cpu")
                start_pool(env.store, pool, at, len(ranks), device, timeout_s + 60)
        _act(act, Path(folder))
    dist.destroy_process_group()
    sys.exit(0)


def _act(act: str, folder: Path) -> None:
    rank, steps = int(os.environ["RANK"]), 40 if act == "leave" else 10**6
    HERE.step = 7
    for step in range(steps):
        with HERE.phase("generate" if HERE.pool == "rollout" else "update_actor"):
            (folder / f"{rank}.working").touch()
            if step == 20 and act not in ("work", "leave"):
                ACTS[act]()
            time.sleep(0.05)
            dist.all_reduce(torch.ones(1), group=dist.group.WORLD)


def hang_in_python() -> None:
    threading.Event().wait()


def spin_in_python() -> None:
    while True:
        time.sleep(0.01)
        threading.Event().wait(0.01)


def hold_pythons_lock() -> None:
    re.match("(a+)+$", "a" * 64 + "b")


def compile_for_long() -> None:
    ctypes.PyDLL(None).sleep(5)


def raise_an_error() -> None:
    raise ZeroDivisionError("the reward divides by zero")


def move_for_long() -> None:
    """A phase of six seconds that does something all the time, in many places: a thread is looked at where it gives
    Python's lock away, which in one small loop is always the same instruction."""
    end = time.monotonic() + 6
    while time.monotonic() < end:
        [x * x for x in range(1000)]
        textwrap.wrap("a rank that moves " * 20)
        ast.dump(ast.parse("x = [a + b for a, b in c]\n" * 20))
        list(difflib.unified_diff("abcdef" * 8, "abcfed" * 8))
        sum(Fraction(1, x) for x in range(1, 30))


FAILS = (hang_in_python, spin_in_python, hold_pythons_lock, raise_an_error)
ACTS: dict[str, Any] = {f.__name__: f for f in (*FAILS, compile_for_long, move_for_long)}
STOP, KILL = signal.SIGSTOP, signal.SIGKILL
