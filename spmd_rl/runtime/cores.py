"""Which cores a rank runs on: near its GPU, and none that another rank of its host has."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from spmd_rl.config import ConfigError
from spmd_rl.runtime.environment import LaunchEnvironment

Core = tuple[int, ...]
"""A physical core's hardware threads, by the kernel's numbers."""
SYSTEM = Path("/sys")


def bind(how: str, store: Store, env: LaunchEnvironment, device: torch.device) -> list[int]:
    """Bind this process as cluster.bind says, and give torch as many threads as it has cores; its CPUs, sorted.

    Nothing changes where the launcher has bound the ranks already (their CPUs differ), where a rank is alone on its
    host, or where `auto` finds fewer cores than ranks. Raises ConfigError where `cores` does.
    """
    if how == "none" or not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    nodes = numa_nodes(allowed)
    wanted = gpu_node(device) if device.type == "cuda" else None
    if wanted is None or wanted not in nodes:
        wanted = sorted(nodes)[env.local_rank * len(nodes) // env.local_world_size]
    store.set(f"cores of {env.rank}", f"{allowed} {wanted}")
    others = [store.get(f"cores of {rank}").decode() for rank in env.on_host]
    seen = [text.rpartition(" ") for text in others]
    if env.local_world_size == 1 or len({mask for mask, _, _ in seen}) > 1:
        return allowed
    place, sharing = local_place([int(node) for _, _, node in seen], env.rank - env.on_host.start)
    mine = choose(how, nodes[wanted], place, sharing)
    if mine:
        os.sched_setaffinity(0, {thread for core in mine for thread in core})
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(mine))
    return sorted(os.sched_getaffinity(0))


def local_place(nodes: Sequence[int], local_rank: int) -> tuple[int, int]:
    """(place among the ranks that are on the same NUMA node, how many they are); `nodes`: every local rank's."""
    same = [rank for rank, node in enumerate(nodes) if node == nodes[local_rank]]
    return same.index(local_rank), len(same)


def choose(how: str, cores: Sequence[Core], place: int, sharing: int) -> list[Core]:
    """The cores of a NUMA node for one of `sharing` ranks; none where `auto` finds too few of them."""
    if how == "numa":
        return list(cores)
    if len(cores) < sharing:
        if how == "cores":
            raise ConfigError(f"cluster.bind=cores: {sharing} ranks share {len(cores)} cores; use cluster.bind=auto")
        return []
    begin, end = (len(cores) * p // sharing for p in (place, place + 1))
    return list(cores[begin:end])


def numa_nodes(allowed: Sequence[int]) -> dict[int, list[Core]]:
    """The physical cores of every NUMA node, of which only the allowed CPUs; one node where Linux names none."""
    lists = sorted((SYSTEM / "devices/system/node").glob("node[0-9]*/cpulist"))
    found = {int(file.parent.name[4:]): read_cpus(file.read_text()) for file in lists} or {0: list(allowed)}
    nodes = {}
    for node, cpus in found.items():
        cores = sorted({_siblings(cpu, allowed) for cpu in cpus if cpu in allowed})
        if cores:
            nodes[node] = cores
    return nodes or {0: [(cpu,) for cpu in allowed]}


def gpu_node(device: torch.device) -> int | None:
    """The NUMA node of a GPU; None where the system does not say."""
    card: Any = torch.cuda.get_device_properties(device)
    address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    file = SYSTEM / "bus/pci/devices" / address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def read_cpus(text: str) -> list[int]:
    """Linux's list of CPUs: `0-3,8`."""
    bounds = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for pair in bounds for cpu in range(int(pair[0]), int(pair[-1]) + 1)]


def _siblings(cpu: int, allowed: Sequence[int]) -> Core:
    file = SYSTEM / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    threads = read_cpus(file.read_text()) if file.exists() else [cpu]
    return tuple(thread for thread in threads if thread in allowed) or (cpu,)
