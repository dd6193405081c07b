"""Peak memory of the step's phases on the device, under verl's names and one more a phase. A GB is 2**30 bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

GIB = 2**30
ALLOCATED = "perf/max_memory_allocated_gb"
RESERVED = "perf/max_memory_reserved_gb"


class PeakMemory:
    """The most that was allocated in each phase and over all; nothing of the kind on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self._peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block; a phase may be entered several times a step, but phases must not nest."""
        self._fold()
        yield
        self._fold(f"{ALLOCATED}/{name}")

    def take(self, group: ProcessGroup) -> dict[str, float]:
        """The peaks since the last call, of the rank of `group` that has most, and the host's memory in use."""
        self._fold()
        taken, self._peaks = self._peaks | {"perf/cpu_memory_used_gb": host_memory_used()}, {}
        peaks = torch.tensor(list(taken.values()), dtype=torch.float64)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        return dict(zip(taken, (peaks / GIB).tolist(), strict=True))

    def _fold(self, name: str = ALLOCATED) -> None:
        """Put what the device has seen since the last call under `name`, too."""
        if not self.on_cuda:
            return
        found = {name: torch.cuda.max_memory_allocated(), RESERVED: torch.cuda.max_memory_reserved()}
        found[ALLOCATED] = found[name]
        for key, peak in found.items():
            self._peaks[key] = max(peak, self._peaks.get(key, 0))
        torch.cuda.reset_peak_memory_stats()


def host_memory_used() -> int:
    """Bytes of this host's memory that are not available to others; 0 where the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1024 * (kib.get("MemTotal", 0) - kib.get("MemAvailable", 0))
