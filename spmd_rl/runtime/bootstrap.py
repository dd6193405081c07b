"""Start of a rank: environment -> plan -> device -> process groups; and its end."""

import ctypes
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from spmd_rl.config import Config, ConfigError
from spmd_rl.observe.live import HERE
from spmd_rl.runtime.bridge import Bridge, Edge, Waits
from spmd_rl.runtime.cores import bind
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment
from spmd_rl.runtime.process_groups import ProcessGroups, job_store, join, start_pool
from spmd_rl.topology.cluster import Pool
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.plan import Plan

WATCH_S = 60.0
"""Collectives give up so much later than trainer.timeout_s, when the watch has named the rank that they wait for."""


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
    """All ranks of the pool on gloo, for checkpoints only (they may run beside training)."""
    job: Bridge
    """All ranks of the job on gloo, for agreement at the borders of a step."""
    bridges: dict[frozenset[str], Bridge]
    """By the pools that meet: this rank's own, and those over which it meets another one."""
    store: Store
    """Where all ranks of the job can leave words for each other."""

    @property
    def is_first(self) -> bool:
        """The first rank of the actor's pool, which is the batch's home: the one that prints and tracks."""
        return self.env.rank == self.plan.pools[self.layout("actor").pool].ranks[0]

    @property
    def waits(self) -> Waits:
        """How long this rank has waited at meetings."""
        return self.job.waits

    def plays(self, *roles: str) -> bool:
        """Whether one of these roles lives on this rank's pool. A role that the run does not have lives nowhere."""
        return any(self.plan.roles[role].pool == self.pool.name for role in roles if role in self.plan.roles)

    def bridge(self, one: str, other: str) -> Bridge:
        """Where the ranks of two roles meet; this rank's pool has one of them."""
        return self.bridges[frozenset((self.layout(one).pool, self.layout(other).pool))]

    def edge(self, source: str, target: str) -> Edge:
        """The way of a batch from one role to another; this rank's pool has one of them."""
        inside = self.bridges[frozenset((self.pool.name,))]
        return Edge(self.plan.exchange(source, target), self.bridge(source, target), inside)

    @property
    def everyone(self) -> ProcessGroup:
        """The pool's own group."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def layout(self, role: str) -> RoleLayout:
        return self.plan.roles[role]

    def barrier(self) -> None:
        dist.barrier(group=self.everyone)


def choose_device(wanted: str, local_rank: int, ranks_per_gpu: int = 1) -> torch.device:
    """`auto` takes CUDA where there is one. The binding is local_rank = device index.

    Where a launcher shows each rank one GPU only (Slurm's --gpus-per-task), that one; `check_binding` sees to the rest.
    """
    kind = wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"trainer.device={wanted}; use auto, cpu or cuda")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device; use trainer.device=cpu")
    seen, index = torch.cuda.device_count(), local_rank // ranks_per_gpu
    if index >= seen > 1:
        raise ConfigError(
            f"local_rank={local_rank} >= {seen * ranks_per_gpu}: this node has {seen} CUDA devices, and "
            f"cluster.ranks_per_gpu={ranks_per_gpu}; start fewer ranks (--nproc-per-node), or set trainer.device=cpu"
        )
    return torch.device("cuda", index if seen > 1 else 0)


def check_binding(store: Store, env: LaunchEnvironment, device_id: str, ranks_per_gpu: int) -> None:
    """One rank, one process, one GPU: ConfigError on every rank of a node where more ranks share one than asked for.

    `device_id` is this rank's GPU, the same text in every process that uses it. Comes before NCCL, which would hang or
    fail in its own words.
    """
    store.set(f"device of {env.rank}", device_id)
    found = {rank: store.get(f"device of {rank}").decode() for rank in env.on_host}
    for shared, count in Counter(found.values()).items():
        if count > ranks_per_gpu:
            ranks = ", ".join(str(rank) for rank, device in found.items() if device == shared)
            raise ConfigError(
                f"ranks {ranks} are on one GPU ({shared}), and cluster.ranks_per_gpu={ranks_per_gpu}: start one rank a "
                f"GPU (--nproc-per-node, CUDA_VISIBLE_DEVICES), or set cluster.ranks_per_gpu={count}"
            )


def start(config: Config, plan: Plan, env: LaunchEnvironment | None = None) -> Runtime:
    """Bind the device, make the pool's default group, those across pools, and every group of the plan, in its order."""
    env = env or read_environment()
    shared = config.cluster.ranks_per_gpu
    device = choose_device(config.trainer.device, env.local_rank, shared)
    if env.launched:
        die_with_parent()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pool = plan.pool_of(env.rank)
    pool_rank = pool.pool_rank(env.rank)
    HERE.pool = pool.name
    HERE.begin("groups")
    store = env.store if env.store is not None else job_store(config.trainer.timeout_s)
    bind(config.cluster.bind, store, env, device)
    if device.type == "cuda":
        check_binding(store, env, str(torch.cuda.get_device_properties(device).uuid), shared)
    start_pool(store, pool.name, pool_rank, pool.size, device, config.trainer.timeout_s + WATCH_S)
    job, bridges = meetings(config, plan, env.rank, device, store)
    groups = ProcessGroups(pool_rank, pool.size, device.type)
    for planned in plan.process_groups.values():
        if planned.kind == "axis" and pool in planned.pools:
            groups.register(planned.layout, *planned.axes)
    seed_everything(config.trainer.seed)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    control = groups.control()
    HERE.begin("models")
    return Runtime(env, plan, pool, pool_rank, device, groups, control, job, bridges, store)


def meetings(
    config: Config, plan: Plan, rank: int, device: torch.device, store: Store
) -> tuple[Bridge, dict[frozenset[str], Bridge]]:
    """The job's control group, and every bridge of which this rank is a member, by the names of its pools."""
    waits, timeout_s, pool = Waits(), config.trainer.timeout_s + WATCH_S, plan.pool_of(rank)
    assert dist.group.WORLD is not None
    job, bridges = None, {frozenset((pool.name,)): Bridge(dist.group.WORLD, pool.ranks, waits)}
    for planned in plan.process_groups.values():
        members = planned.members_of(rank) if planned.kind in ("control", "bridge") else ()
        if members:
            nccl = planned.kind == "bridge" and device.type == "cuda"
            place, size = members.index(rank), len(members)
            group = join(store, planned.name, place, size, device, timeout_s, nccl=nccl)
            found = Bridge(group, members, waits)
            if planned.kind == "control":
                job = found
            else:
                bridges[frozenset(p.name for p in planned.pools)] = found
    assert job is not None, "every plan has a control group over all ranks"
    return job, bridges


_closers: list[Callable[[], None]] = []


def on_stop(close: Callable[[], None]) -> None:
    """Have `stop` call `close` before the process groups end: for what made groups of its own."""
    _closers.append(close)


def stop() -> None:
    """Close what asked for it, last one first, and leave the process groups. Safe to call twice."""
    while _closers:
        _closers.pop()()
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
