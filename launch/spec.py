"""What is to be started, on which hosts: one value that every launcher renders."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.cluster import ClusterConfig
from spmd_rl.topology.cluster import Cluster, gpu_counts
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.roles import only_sampling


@dataclass(frozen=True)
class HostGroup:
    """Consecutive hosts that are alike."""

    nodes: int
    ranks: int
    """Ranks on each of them."""
    gpus: int
    """GPUs to ask for on each of them; 0 for a run on CPUs."""
    tag: str = ""
    """Node class, as in cluster.node_tags."""


@dataclass(frozen=True)
class LaunchSpec:
    """One run: what every rank executes, and where."""

    name: str
    module: str
    """What Python runs on every rank, e.g. spmd_rl.train."""
    arguments: tuple[str, ...]
    """Its command line: what the user typed."""
    groups: tuple[HostGroup, ...]
    """Ranks are numbered through them in this order."""
    cluster: ClusterConfig
    """How to get there."""
    output_dir: Path
    """The run's folder (absolute): the launcher's logs go into it."""

    @classmethod
    def from_config(cls, config: Config, module: str, arguments: Sequence[str]) -> "LaunchSpec":
        """The spec of a run that can be planned. Raises ConfigError with what is impossible, before anything starts."""
        cluster = config.cluster
        if cluster.gpus_per_node is None:
            raise ConfigError(
                "cluster.gpus_per_node is not set: launching needs the number of ranks on each host; set it (and "
                "cluster.nodes), also for a run on CPUs"
            )
        sampling = module != "spmd_rl.train"
        _check_plans(only_sampling(config) if sampling else config)
        words = tuple(arguments)
        if cluster.min_nodes is not None:
            words += ("cluster.nodes=null",)  # how many there are is known at each start only
        output_dir = Path(config.trainer.output_dir).absolute()
        return cls(config.trainer.experiment_name, module, words, _groups(config), cluster, output_dir)

    @property
    def nodes(self) -> int:
        """Hosts."""
        return sum(group.nodes for group in self.groups)

    @property
    def size(self) -> int:
        """Ranks."""
        return sum(group.nodes * group.ranks for group in self.groups)

    @property
    def python(self) -> str:
        """The ranks' interpreter."""
        return self.cluster.python or ("python" if self.cluster.image else sys.executable)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that every rank gets."""
        threads = self.cluster.cpus_per_rank
        return ({"OMP_NUM_THREADS": str(threads)} if threads else {}) | dict(self.cluster.env)

    @property
    def program(self) -> list[str]:
        """The words after the interpreter, or after torchrun's own."""
        return ["-m", self.module, *self.arguments]

    def group_of(self, node: int) -> HostGroup:
        """The group of the host with this number."""
        return [group for group in self.groups for _ in range(group.nodes)][node]


@dataclass(frozen=True)
class Mount:
    """A folder of the host's inside the container."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


def mounts(cluster: ClusterConfig) -> Iterator[Mount]:
    """cluster.mounts, read. Raises ConfigError for one that is not source:target[:ro]."""
    for text in cluster.mounts:
        source, _, rest = text.partition(":")
        target, _, flag = rest.partition(":")
        if not source or not target or flag not in ("", "ro", "rw"):
            raise ConfigError(f"cluster.mounts: {text!r} is not source:target or source:target:ro")
        yield Mount(source, target, flag == "ro")


def refuse(mistakes: Sequence[str]) -> None:
    """Raise ConfigError when there are any."""
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _check_plans(config: Config) -> None:
    """Plan the run on all hosts, and where it may go on with fewer, on each number of them."""
    Plan.from_config(config, Cluster.from_config(config))
    fewest = config.cluster.min_nodes
    if fewest is None:
        return
    most = len(gpu_counts(config))
    if not isinstance(config.cluster.gpus_per_node, int) or config.cluster.node_tags:
        raise ConfigError(f"cluster.min_nodes={fewest}: hosts that may be missing must be all alike")
    if fewest > most:
        raise ConfigError(f"cluster.min_nodes={fewest} is more than cluster.nodes={most}")
    for nodes in range(fewest, most):
        fewer = replace(config, cluster=replace(config.cluster, nodes=nodes))
        try:
            Plan.from_config(fewer, Cluster.from_config(fewer))
        except ConfigError as error:
            raise ConfigError(f"cluster.min_nodes={fewest}, but on {nodes} of {most} hosts: {error}") from None


def _groups(config: Config) -> tuple[HostGroup, ...]:
    gpus = gpu_counts(config)
    tags = list(config.cluster.node_tags) or [""] * len(gpus)
    asked = 0 if config.trainer.device == "cpu" else 1
    alike = groupby(zip(gpus, tags, strict=True))
    shared = config.cluster.ranks_per_gpu
    return tuple(HostGroup(len(list(same)), n * shared, n * asked, tag) for (n, tag), same in alike)
