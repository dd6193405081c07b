"""Start of a rank: environment -> plan -> device -> process groups; and its end."""

import ctypes
import os
import random
import signal
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.config import Config, ConfigError
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment
from spmd_rl.runtime.process_groups import ProcessGroups, start_pool
from spmd_rl.topology.cluster import Pool
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.plan import Plan


@dataclass
class Runtime:
    """What a rank knows of its place: its pool, its device and its process groups."""

    env: LaunchEnvironment
    plan: Plan
    pool: Pool
    pool_rank: int
    device: torch.device
    groups: ProcessGroups
    control: ProcessGroup
    """All ranks of the pool on gloo, for agreement and checkpoints only (they may run beside training)."""

    @property
    def is_first(self) -> bool:
        """Rank 0 of the job: the one that prints, tracks and commits."""
        return self.env.is_first

    @property
    def everyone(self) -> ProcessGroup:
        """The pool's own group."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def layout(self, role: str) -> RoleLayout:
        return self.plan.roles[role]

    def barrier(self) -> None:
        dist.barrier(group=self.everyone)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` takes CUDA where there is one. The binding is local_rank = device index."""
    kind = wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"trainer.device={wanted}; use auto, cpu or cuda")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device; use trainer.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local_rank={local_rank} >= {torch.cuda.device_count()} CUDA devices of this node: start at most one rank "
            "per device (--nproc-per-node), or set trainer.device=cpu"
        )
    return torch.device("cuda", local_rank)


def start(config: Config, plan: Plan, env: LaunchEnvironment | None = None) -> Runtime:
    """Bind the device, make the pool's default group and register every group of the plan, in its order."""
    env = env or read_environment()
    device = choose_device(config.trainer.device, env.local_rank)
    die_with_parent()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pool = plan.pool_of(env.rank)
    pool_rank = pool.pool_rank(env.rank)
    start_pool(pool.name, pool_rank, pool.size, device, config.trainer.timeout_s)
    groups = ProcessGroups(pool_rank, pool.size, device.type)
    for planned in plan.process_groups.values():
        if planned.kind == "axis" and pool in planned.pools:
            groups.register(planned.layout, *planned.axes)
    seed_everything(config.trainer.seed)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    return Runtime(env, plan, pool, pool_rank, device, groups, groups.control())


def stop() -> None:
    """Leave the process groups. Safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """The same seed on every rank: what must differ between rows is keyed by row, never by rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def die_with_parent() -> None:
    """Ask Linux to end this rank when its launcher's process ends, so that none is left behind."""
    if os.name == "posix" and os.uname().sysname == "Linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
