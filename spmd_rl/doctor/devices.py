"""GPUs as `nvidia-smi` shows them: the one place that asks it. No GPU is touched, so nothing is left on one."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

GPU_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version,pci.bus_id"
APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"
TIMEOUT_S = 30


@dataclass(frozen=True)
class Gpu:
    """A card: memory in MiB."""

    index: int
    uuid: str
    name: str
    memory: int
    used: int
    driver: str
    bus: str


@dataclass(frozen=True)
class App:
    """A process with memory on a card, MiB."""

    uuid: str
    pid: int
    name: str
    used: int


@dataclass(frozen=True)
class Devices:
    """What a host has; `trouble` when nvidia-smi is there and fails."""

    gpus: tuple[Gpu, ...] = ()
    apps: tuple[App, ...] = ()
    links: tuple[str, ...] = ()
    """Kinds of links between its cards (NV18, PIX, SYS …), as in `nvidia-smi topo -m`."""
    trouble: str = ""


def look() -> Devices:
    """The host's cards, who is on them and how they are joined. Nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return Devices()
    try:
        gpus = [_gpu(row) for row in _query("--query-gpu=" + GPU_FIELDS)]
        apps = [_app(row) for row in _query("--query-compute-apps=" + APP_FIELDS)]
        return Devices(tuple(gpus), tuple(apps), tuple(_links(_run("topo", "-m"))))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)
        return Devices(trouble=" ".join(str(said).split()) or type(error).__name__)


def device_of(local_rank: int, ranks_per_gpu: int, gpus: Sequence[Gpu]) -> Gpu | None:
    """The card that this rank would take: as `bootstrap.choose_device`, among those that CUDA_VISIBLE_DEVICES shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        visible = list(gpus)
    else:
        names = [name.strip() for name in shown.split(",") if name.strip()]
        found = [next((g for g in gpus if name == str(g.index) or g.uuid.startswith(name)), None) for name in names]
        visible = [gpu for gpu in found if gpu is not None]
    at = local_rank // ranks_per_gpu if len(visible) > 1 else 0
    return visible[at] if at < len(visible) else None


def _run(*words: str) -> str:
    command = ["nvidia-smi", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout


def _query(what: str) -> list[list[str]]:
    lines = _run(what, "--format=csv,noheader,nounits").splitlines()
    return [[cell.strip() for cell in line.split(", ")] for line in lines if line.strip()]


def _gpu(row: Sequence[str]) -> Gpu:
    index, uuid, name, memory, used, driver, bus = row
    return Gpu(int(index), uuid, name, _mib(memory), _mib(used), driver, bus)


def _app(row: Sequence[str]) -> App:
    uuid, pid, *name, used = row
    return App(uuid, int(pid), ", ".join(name), _mib(used))


def _mib(text: str) -> int:
    """`[N/A]` where the driver does not say."""
    return int(text) if text.isdigit() else 0


def _links(matrix: str) -> list[str]:
    """The kinds of links between different GPUs, each once."""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    count = len(rows)
    return sorted({cell for at, row in enumerate(rows) for cell in row[1 : count + 1] if cell != "X" and at < count})
