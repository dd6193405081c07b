"""The machines and the pools cut from them.

Job ranks are numbered by (node, local rank); nodes stand in the order of `Cluster.nodes`.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spmd_rl.config import Config, ConfigError


@dataclass(frozen=True)
class Node:
    """One host: its address, how many ranks it runs, its class."""

    address: str
    ranks: int
    tag: str = ""


@dataclass(frozen=True)
class Cluster:
    """The hosts in the order in which their ranks are numbered."""

    nodes: tuple[Node, ...]

    @classmethod
    def from_counts(cls, counts: Sequence[int], addresses: Sequence[str] = (), tags: Sequence[str] = ()) -> "Cluster":
        """Hosts in the given order with `counts` ranks each; addresses default to node0, node1 …."""
        addresses = addresses or [f"node{i}" for i in range(len(counts))]
        tags = tags or [""] * len(counts)
        if not len(counts) == len(addresses) == len(tags):
            raise ConfigError(f"{len(counts)} hosts, but {len(addresses)} addresses and {len(tags)} tags")
        return cls(tuple(Node(a, int(n), t) for a, n, t in zip(addresses, counts, tags, strict=True)))

    @classmethod
    def from_hosts(cls, counts: dict[str, int], tags: dict[str, str] | None = None) -> "Cluster":
        """Hosts by address, put into numeric order (10.0.0.9 before 10.0.0.10)."""
        ordered = sorted(counts, key=address_key)
        return cls(tuple(Node(a, counts[a], (tags or {}).get(a, "")) for a in ordered))

    @classmethod
    def from_config(cls, config: Config) -> "Cluster":
        """The cluster to plan for: cluster.nodes hosts of gpus_per_node · ranks_per_gpu ranks (1 · 1 when unset)."""
        mistakes = cluster_mistakes(config)
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        counts = [gpus * config.cluster.ranks_per_gpu for gpus in gpu_counts(config)]
        return cls.from_counts(counts, tags=list(config.cluster.node_tags))

    @cached_property
    def counts(self) -> np.ndarray:
        """Ranks a node, int64 [nodes]."""
        return np.array([node.ranks for node in self.nodes], dtype=np.int64)

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return int(self.counts.sum())

    @cached_property
    def node_of(self) -> np.ndarray:
        """The node's index of every job rank, int64 [size]."""
        return np.repeat(np.arange(len(self.nodes)), self.counts)

    @cached_property
    def local_ranks(self) -> np.ndarray:
        """local_rank of every job rank, int64 [size]."""
        return np.arange(self.size) - self.first_ranks[self.node_of]

    @cached_property
    def first_ranks(self) -> np.ndarray:
        """The first job rank of every node, int64 [nodes]."""
        return np.cumsum(self.counts) - self.counts


@dataclass(frozen=True)
class Pool:
    """A named, ordered set of job ranks; `ranks[pool_rank]` is the job rank."""

    name: str
    ranks: tuple[int, ...]
    counts: tuple[int, ...] = field(default=(), compare=False)
    """Ranks on each host that it spans, in host order."""

    @property
    def size(self) -> int:
        """P."""
        return len(self.ranks)

    @cached_property
    def array(self) -> np.ndarray:
        """`ranks` as int64 [P]."""
        return np.array(self.ranks, dtype=np.int64)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.ranks)}

    def __contains__(self, job_rank: int) -> bool:
        return job_rank in self._place

    def pool_rank(self, job_rank: int) -> int:
        """The rank's place in the pool. Raises KeyError outside it."""
        if job_rank not in self._place:
            raise KeyError(f"rank {job_rank} is not in pool {self.name!r}")
        return self._place[job_rank]

    def split(self, size: int) -> tuple["Pool", ...]:
        """Consecutive sub-pools of `size` ranks (rollout replicas). Raises ConfigError if size does not divide P."""
        if size < 1 or self.size % size:
            raise ConfigError(f"sub-pools of {size} ranks do not divide the {self.size} ranks of pool {self.name!r}")
        starts = range(0, self.size, size)
        return tuple(Pool(f"{self.name}/{i}", self.ranks[at : at + size]) for i, at in enumerate(starts))


def address_key(address: str) -> tuple[object, ...]:
    """Sort key: IP addresses by value, names with their numbers read as numbers (node2 before node10)."""
    try:
        ip = ipaddress.ip_address(address)
        return (0, ip.version, int(ip))
    except ValueError:
        parts = re.split(r"(\d+)", address)
        return (1, 0, tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if p))


def gpu_counts(config: Config) -> list[int]:
    """GPUs of every host that the config asks for."""
    gpus = config.cluster.gpus_per_node
    if gpus is None or isinstance(gpus, int):
        nodes = config.cluster.nodes or 1
        return [1 if gpus is None else gpus] * nodes
    return list(gpus)


def is_counts(value: Any) -> bool:
    """Whether it is a whole number or a list of whole numbers."""
    items = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def cluster_mistakes(config: Config) -> list[str]:
    """What is wrong with cluster.*, before any pool is cut."""
    c, mistakes = config.cluster, []
    if c.nodes is not None and c.nodes < 1:
        return [f"cluster.nodes={c.nodes} must be at least 1"]
    if c.ranks_per_gpu < 1:
        return [f"cluster.ranks_per_gpu={c.ranks_per_gpu} must be at least 1"]
    gpus = c.gpus_per_node
    if gpus is not None and not is_counts(gpus):
        return [f"cluster.gpus_per_node={gpus} must be a whole number, or a list with one a host such as [8,4]"]
    counts = gpu_counts(config)
    if not counts or min(counts) < 1:
        return [f"cluster.gpus_per_node={gpus if isinstance(gpus, int) else counts} must be at least 1 on every host"]
    if c.nodes is not None and len(counts) != c.nodes:
        mistakes.append(f"cluster.gpus_per_node={counts} lists {len(counts)} hosts, but cluster.nodes={c.nodes}")
    if c.node_tags and len(c.node_tags) != len(counts):
        mistakes.append(
            f"cluster.node_tags={list(c.node_tags)} names {len(c.node_tags)} hosts, but there are {len(counts)}"
        )
    return mistakes
