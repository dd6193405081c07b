"""The one module that reads the launcher's environment (torchrun's RANK, LOCAL_RANK, WORLD_SIZE, … or Slurm's)."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spmd_rl.config import ConfigError


@dataclass(frozen=True)
class LaunchEnvironment:
    """Who this process is, as its launcher says."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool
    """False when no launcher started this process: a job of one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_environment() -> LaunchEnvironment:
    """Read torchrun's variables, else Slurm's (`srun`, one task a rank), else be a job of one rank.

    For the latter two the variables that torch's `env://` rendezvous reads are filled in.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", rank))
        local_world = int(env.get("LOCAL_WORLD_SIZE", world))
        return LaunchEnvironment(rank, local, world, local_world, launched=True)
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        return _from_slurm()
    env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    return LaunchEnvironment(0, 0, 1, 1, launched=False)


def _from_slurm() -> LaunchEnvironment:
    env = os.environ
    rank, local, world = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_NTASKS"])
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise ConfigError(
            f"SLURM_NTASKS={world} ranks have no meeting point: MASTER_ADDR and MASTER_PORT are not set; "
            "export them in the job script, or start through `spmd-rl launch --on slurm`"
        )
    env.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world))
    return LaunchEnvironment(rank, local, world, int(env.get("SLURM_NTASKS_PER_NODE", world)), launched=True)


@contextmanager
def as_pool(pool_rank: int, size: int, local_rank: int) -> Iterator[None]:
    """For a library that reads the launcher's words itself (vLLM): a pool is its ranks' whole world."""
    kept = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    os.environ.update(RANK=str(pool_rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
