"""Real ranks that stay: started once a test session, `World.run` has each of them call a function.

They fork from one server that has imported torch and transformers already. A rank that raises or hangs ends its whole
world (the others would wait for it in a collective); the next `run` starts a new one.
"""

import multiprocessing
import os
import pickle
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "spmd_rl.train",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "spmd_rl.engines.megatron.engine",  # passed over where megatron-core is not installed
]


class RankError(AssertionError):
    """What went wrong on which rank."""


class World:
    """`size` ranks as a launcher would start them on one host, without process groups: the function makes its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 400.0) -> list[Any]:
        """function(*args) on every rank, at the same time; what each returned, in rank order.

        The function and its arguments must suit pickle. Raises RankError with the first traceback.
        """
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(self.size)]
        call = pickle.dumps((free_port(), function, args))
        for _, pipe in self._ranks:
            pipe.send_bytes(call)
        try:
            return self._collect(time.monotonic() + timeout_s, getattr(function, "__name__", str(function)))
        except BaseException:
            self.close()
            raise

    def _collect(self, deadline: float, name: str) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"{name}: ranks {sorted(waiting.values())} of {self.size} did not answer in time")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    raise RankError(f"{name}: rank {rank} of {self.size} ended") from None
                if not good:
                    raise RankError(f"{name}: rank {rank} of {self.size} raised\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def _start(self, rank: int) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, self.size, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        """Kill the ranks and what they have started."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []


class Worlds:
    """One world a size, started when it is first asked for."""

    def __init__(self) -> None:
        self._by_size: dict[int, World] = {}

    def __getitem__(self, size: int) -> World:
        return self._by_size.setdefault(size, World(size))

    def close(self) -> None:
        """Kill all."""
        for world in self._by_size.values():
            world.close()


def free_port() -> int:
    """A port that nobody has, below those that the kernel gives to connections (from 32768 on): until rank 0 listens,
    one of these could take it, even another rank's to this very port."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise RankError("none of a hundred ports is free")


def _rank(rank: int, size: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    while True:
        try:
            port, function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a trainer's handlers must not outlive its run
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pipe.send_bytes(pickle.dumps(answer))
