"""The machines, and how a job gets onto them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ClusterConfig:
    """The machines. Under a launcher the sizes come from it and are checked against these, when these are set."""

    nodes: int | None = None
    """Hosts; unset means what the launcher started (1 when only planning)."""
    gpus_per_node: Any = None
    """GPUs (or CPU slots) a host, one number or a list with one a host; unset means what the launcher started."""
    ranks_per_gpu: int = 1
    """Ranks that share a GPU on purpose; memory is split among them."""
    gpu: str = "h100"
    """A name in topology's hardware table (memory, FLOP/s, links), for the memory estimate and the cost bound."""
    gpu_memory_gib: float | None = None
    """Memory of a card, instead of the table's."""
    host_memory_gib: float | None = None
    """Memory of a host, for what is offloaded to it; unset means what the table says."""
    node_tags: list[str] = field(default_factory=list)
    """One tag (node class) a host, e.g. [h100, h100, l40]; empty means that all hosts are alike."""
    bandwidth: dict[str, float] = field(default_factory=dict)
    """Overrides of the hardware table in GB/s: intra_node, inter_node, host."""
    launcher: str = "torchrun"
    """What `spmd-rl launch` uses unless --on says otherwise: torchrun | slurm | torchx."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank."""
    python: str | None = None
    """The ranks' interpreter; unset means the one that launches, or `python` where there is an image."""
    bind: str = "auto"
    """Cores of a rank: cores (its share of the host's, near its GPU) | numa (all of the GPU's NUMA node) | none |
    auto (cores where a host has one for each rank; none where the launcher has bound the ranks already)."""
    image: str | None = None
    """Container image."""
    mounts: list[str] = field(default_factory=list)
    """Into the container: source:target, or source:target:ro."""
    container: str = "pyxis"
    """slurm: how the image is entered: pyxis | apptainer | the words before the interpreter, in which {image} and
    {mounts} (comma-separated) are filled in, e.g. 'singularity exec --nv -B {mounts} {image}'."""
    time_h: float | None = None
    """slurm: time limit of the job in hours. At its end the run saves and is queued again."""
    warning_s: int = 180
    """slurm: seconds before the time limit in which a run may finish its step and save."""
    account: str | None = None
    """slurm: whom to charge."""
    partition: str | None = None
    """slurm: partition."""
    qos: str | None = None
    """slurm: quality of service."""
    queue: str | None = None
    """torchx: the queue of Kubernetes (Volcano) or AWS Batch."""
    retries: int = 0
    """How often a job that failed is started again, from its last checkpoint."""
    links: int = 1
    """slurm: one job array of so many links, one at a time, each going on where the one before ended; for sites where a
    job may not be queued again."""
    cpus_per_rank: int | None = None
    """Cores to ask for, and threads of a rank; unset asks for none."""
    memory_gib: float | None = None
    """Host memory to ask for, on each host; unset asks for none (torchx: 4 GiB a rank)."""
    exclusive: bool = False
    """slurm: whole hosts."""
    srun: str = "rank"
    """slurm: a task a rank | node (torchrun starts the ranks there)."""
    srun_args: list[str] = field(default_factory=list)
    """slurm: more arguments of srun."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """slurm: more options of sbatch, e.g. {nodelist: 'node[1-4]'}."""
    rendezvous: str = "c10d"
    """torchrun on several hosts: c10d | static (which needs --node-rank on each of them)."""
    master_addr: str | None = None
    """torchrun on several hosts: the first one's address."""
    master_port: int = 29500
    """The port there."""
    min_nodes: int | None = None
    """torchrun: go on with as few hosts as this (c10d); unset needs all of them."""
    scheduler: str = "local_cwd"
    """torchx: its scheduler: local_cwd | local_docker | slurm | kubernetes | aws_batch | lsf …."""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    """torchx: the scheduler's own settings, e.g. {namespace: rl}."""
