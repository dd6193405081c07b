"""Peaks of phases, on a device that says what the test makes it say."""

import pytest
import torch
import torch.distributed as dist

from spmd_rl.observe.memory import GIB, PeakMemory


class Device:
    """An allocator: how much is allocated, and the most since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak * GIB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * self.peak * GIB)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

    def use(self, amount: int) -> None:
        """Take so many GiB for a moment."""
        self.peak = max(self.peak, self.now + amount)

    def reset(self) -> None:
        self.peak = self.now


def test_each_phase_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    device, group = Device(monkeypatch), dist.ProcessGroup
    peaks = PeakMemory(torch.device("cuda", 0))
    device.now = 1
    device.use(9)  # between phases
    for amount in (4, 2):
        with peaks.phase("update"):
            device.use(amount)
    with peaks.phase("generate"):
        device.use(3)
    found = peaks.take(group)  # type: ignore[arg-type]
    assert found.pop("perf/cpu_memory_used_gb") > 0
    assert found == {
        "perf/max_memory_allocated_gb": 10,
        "perf/max_memory_reserved_gb": 20,
        "perf/max_memory_allocated_gb/update": 5,
        "perf/max_memory_allocated_gb/generate": 4,
    }
    assert peaks.take(group)["perf/max_memory_allocated_gb"] == 1  # type: ignore[arg-type]


def test_a_cpu_says_nothing_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    peaks = PeakMemory(torch.device("cpu"))
    with peaks.phase("update"):
        pass
    assert list(peaks.take(dist.ProcessGroup)) == ["perf/cpu_memory_used_gb"]  # type: ignore[arg-type]
