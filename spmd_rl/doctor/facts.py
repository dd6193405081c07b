"""What a rank finds out by itself, without the others: plain values that travel as JSON."""

import os
import platform
import socket
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from spmd_rl.doctor import devices
from spmd_rl.runtime.environment import LaunchEnvironment, meeting_point
from spmd_rl.runtime.roster import host_address

PACKAGES = (
    "spmd-rl", "torch", "transformers", "tokenizers", "safetensors", "tensordict", "numpy", "hydra-core", "vllm",
    "megatron-core", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-attn", "peft",
)  # fmt: skip
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "FI_", "UCX_")
"""Environment variables that change how ranks talk."""


@dataclass(frozen=True)
class Facts:
    """One rank's."""

    rank: int
    local_rank: int
    host: str
    pid: int
    address: str
    names: tuple[str, ...]
    """Addresses that the host's own name stands for; empty when for none."""
    master: tuple[str, ...]
    """Addresses that the meeting point's name stands for."""
    versions: dict[str, str]
    network: dict[str, str]
    """Interfaces with their speed, InfiniBand ports with their state."""
    settings: dict[str, str]
    """NCCL's and gloo's environment."""
    cores: int
    threads: int
    """That torch takes: OMP_NUM_THREADS, or one a core."""
    numa: int
    """NUMA nodes of the host."""
    bound: bool
    """The rank may not run on all of the host's cores."""
    gpu_numa: int = -1
    """The NUMA node of the rank's card; -1 when unknown."""
    device: str = ""
    """uuid of the rank's card."""
    cards: list[dict[str, Any]] = field(default_factory=list)
    apps: list[dict[str, Any]] = field(default_factory=list)
    links: tuple[str, ...] = ()
    device_trouble: str = ""

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"


def gather(env: LaunchEnvironment, ranks_per_gpu: int) -> Facts:
    """Look around."""
    found = devices.look()
    mine = devices.device_of(env.local_rank, ranks_per_gpu, found.gpus)
    host, cores = socket.gethostname(), cores_of_this_process()
    return Facts(
        rank=env.rank,
        local_rank=env.local_rank,
        host=host,
        pid=os.getpid(),
        address=host_address(meeting_point()),
        names=addresses(host),
        master=addresses(meeting_point()[0]),
        versions=versions(),
        network=network(),
        settings={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        cores=cores,
        threads=int(os.environ.get("OMP_NUM_THREADS") or cores),
        numa=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        bound=cores < (os.cpu_count() or 1),
        gpu_numa=_numa_of(mine.bus) if mine else -1,
        device=mine.uuid if mine else "",
        cards=[asdict(gpu) for gpu in found.gpus],
        apps=[asdict(app) for app in found.apps],
        links=found.links,
        device_trouble=found.trouble,
    )


def cores_of_this_process() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of the packages that are installed (none is imported), of Python and of the GPU driver's kernel module."""
    found = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver())}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def addresses(name: str) -> tuple[str, ...]:
    """What a name stands for here, each address once."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ()
    return tuple(dict.fromkeys(found))


def network() -> dict[str, str]:
    """`eth0: 25000 Mbit/s`, `mlx5_0: 4: ACTIVE`."""
    found = {}
    for folder in sorted(Path("/sys/class/net").glob("*")):
        if folder.name != "lo":
            speed = _read(folder / "speed")
            found[folder.name] = f"{speed} Mbit/s" if speed.isdigit() else _read(folder / "operstate")
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state")):
        found[port.parts[4]] = _read(port)
    return found


def reach(place: tuple[str, int], seconds: float) -> str:
    """Connect to the meeting point, again and again for so long; '' when that works, else why it does not."""
    end, why = time.monotonic() + seconds, ""
    while True:
        try:
            socket.create_connection(place, timeout=3.0).close()
            return ""
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
        if time.monotonic() > end:
            return why
        time.sleep(0.5)


def _numa_of(bus: str) -> int:
    """nvidia-smi writes 00000000:1B:00.0, the kernel 0000:1b:00.0."""
    text = _read(Path("/sys/bus/pci/devices") / bus.lower()[-12:] / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else -1


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
