"""The one module that reads the launcher's environment (torchrun's RANK, LOCAL_RANK, WORLD_SIZE, … or Slurm's)."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.topology.cluster import Node


@dataclass(frozen=True)
class LaunchEnvironment:
    """Who this process is, as its launcher says."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool
    """False when no launcher started this process: a job of one rank."""
    node: str = ""
    """Which of its nodes the launcher says this is."""
    launcher_holds_store: bool = False
    """The meeting point is the launcher's (torchrun's agent), else it is in the process of its rank 0."""
    nodes: tuple[Node, ...] = field(default=(), compare=False)
    """The job's hosts in rank order; known once the ranks have met."""
    store: Any = field(default=None, compare=False, repr=False)
    """Where the job's ranks have met (a torch Store); None before that."""
    attempt: str = field(default="", compare=False)
    """Name of this start of the job, on all ranks; known once they have met."""
    store_rank: int | None = field(default=None, compare=False)
    """The rank whose process holds the store; None when the launcher does."""
    tag: str = field(default_factory=lambda: os.environ.get("SPMD_RL_NODE_TAG", ""), compare=False)
    """This node's class, where `spmd-rl launch` asked for one."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def on_host(self) -> range:
        """The ranks of this rank's node."""
        first = 0
        for node in self.nodes:
            if self.rank < first + node.ranks:
                return range(first, first + node.ranks)
            first += node.ranks
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def renumbered(self, rank: int, nodes: tuple[Node, ...], **met: Any) -> "LaunchEnvironment":
        """The same process with the job's own numbers, which whoever reads the environment sees from now on, too."""
        env = replace(self, rank=rank, nodes=nodes, **met)
        env = replace(env, local_world_size=len(env.on_host))
        os.environ.update(RANK=str(rank), LOCAL_WORLD_SIZE=str(env.local_world_size))
        return env


def read_environment() -> LaunchEnvironment:
    """Read torchrun's variables, else Slurm's (`srun`, one task a rank), else be a job of one rank.

    For the latter two the variables that torch's `env://` rendezvous reads are filled in.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", rank))
        local_world = int(env.get("LOCAL_WORLD_SIZE", world))
        node = env.get("GROUP_RANK", env.get("SLURM_NODEID", str(rank - local)))
        agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return LaunchEnvironment(rank, local, world, local_world, True, node, agents)
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
    return LaunchEnvironment(rank, local, world, _tasks_here(), launched=True, node=env.get("SLURM_NODEID", ""))


def meeting_point() -> tuple[str, int]:
    """Address and port at which the job's ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _tasks_here() -> int:
    """The tasks on this node: as many as were asked for, or read off every node's, as in `4(x2),2`."""
    env = os.environ
    if "SLURM_NTASKS_PER_NODE" in env:  # in a heterogeneous job, that of this node's part
        return int(env["SLURM_NTASKS_PER_NODE"])
    lots = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
    return [int(n) for n, times in lots for _ in range(int(times or 1))][int(env["SLURM_NODEID"])]


@contextmanager
def as_pool(pool_rank: int, size: int, local_rank: int) -> Iterator[None]:
    """For a library that reads the launcher's words itself, and changes them (vLLM): a pool is its whole world."""
    kept = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ.update(RANK=str(pool_rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
