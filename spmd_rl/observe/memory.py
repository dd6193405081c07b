"""Peak memory of the step's phases on the device, under verl's names and one more a phase. A GB is 2**30 bytes."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

GIB = 2**30
ALLOCATED = "perf/max_memory_allocated_gb"
PLANNED, OF_PLAN = "perf/planned_memory_gb", "perf/memory_of_plan"
RESERVED = "perf/max_memory_reserved_gb"


class PeakMemory:
    """The most that was allocated in each phase and over all; nothing of the kind on a CPU."""

    def __init__(self, device: torch.device, asleep: Callable[[], int] = int) -> None:
        """`asleep`: bytes that torch's allocator counts although they are not on the device just now."""
        self.on_cuda, self._asleep = device.type == "cuda", asleep
        self._peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block; a phase may be entered several times a step, but phases must not nest.

        In `generate` nothing counts as asleep: who sleeps at its end is who was awake at its peak.
        """
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
        asleep = 0 if name == f"{ALLOCATED}/generate" else self._asleep()
        found = {name: torch.cuda.max_memory_allocated() - asleep, RESERVED: torch.cuda.max_memory_reserved() - asleep}
        found[ALLOCATED] = found[name]
        for key, peak in found.items():
            self._peaks[key] = max(peak, self._peaks.get(key, 0))
        torch.cuda.reset_peak_memory_stats()


def against_plan(measured: Mapping[str, float], planned: Mapping[str, int]) -> dict[str, float]:
    """For every phase with a measured peak (as `take` gives them) and a planned one in bytes: the plan's GB, and
    measured / planned. Above 1 the plan promised too much room."""
    found: dict[str, float] = {}
    for phase, size in planned.items():
        peak = measured.get(f"{ALLOCATED}/{phase}")
        if peak is not None and size:
            found |= {f"{PLANNED}/{phase}": size / GIB, f"{OF_PLAN}/{phase}": peak * GIB / size}
    return found


def host_memory_used() -> int:
    """Bytes of this host's memory that are not available to others; 0 where the system does not say."""
    found = _figures(Path("/proc/meminfo"))
    return 1024 * (found.get("MemTotal", 0) - found.get("MemAvailable", 0))


def host_memory_available(cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: the host's, or its control group's where that has a limit.

    None where the system does not say. File pages that can be dropped count as free.
    """
    found = _figures(Path("/proc/meminfo"))
    free = [1024 * found["MemAvailable"]] if "MemAvailable" in found else []
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        folder = cgroups if limit == "memory.max" else cgroups / "memory"
        words = [(folder / name).read_text().strip() if (folder / name).is_file() else "" for name in (limit, used)]
        if all(word.isdigit() for word in words):
            stat = _figures(folder / "memory.stat")
            dropped = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            free.append(int(words[0]) - int(words[1]) + dropped)
    return min(free, default=None)


def _figures(file: Path) -> dict[str, int]:
    """A file of the kernel's with a name and a number a line; empty where there is none."""
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = (re.split(r":?\s+", line.strip()) for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
