"""Peaks of phases, on a device that says what the test makes it say."""

import pytest
import torch
import torch.distributed as dist

from spmd_rl.observe.console import memory_line
from spmd_rl.observe.memory import GIB, PeakMemory, against_plan


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


def test_what_sleeps_is_not_on_the_device_but_while_it_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    peaks = PeakMemory(torch.device("cuda", 0), asleep=lambda: 6 * GIB)
    device.now = 7
    device.use(2)
    peaks.take(dist.ProcessGroup)  # type: ignore[arg-type]
    with peaks.phase("generate"):
        device.use(3)
    with peaks.phase("update_actor"):
        device.use(4)
    found = peaks.take(dist.ProcessGroup)  # type: ignore[arg-type]
    assert found["perf/max_memory_allocated_gb/generate"] == 10
    assert found["perf/max_memory_allocated_gb/update_actor"] == 5
    assert found["perf/max_memory_allocated_gb"] == 10


def test_measured_peaks_stand_beside_the_plans() -> None:
    measured = {"perf/max_memory_allocated_gb/update_actor": 3.0, "perf/max_memory_allocated_gb/adv": 1.0}
    found = against_plan(measured, {"update_actor": 4 * GIB, "adv": 0, "generate": 9 * GIB})
    assert found == {"perf/planned_memory_gb/update_actor": 4.0, "perf/memory_of_plan/update_actor": 0.75}
    assert memory_line(measured | found) == "    peak GB of the plan's: update_actor 3.0 of 4.0 (0.75)"
    assert memory_line(measured) == ""


def test_a_cpu_says_nothing_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    peaks = PeakMemory(torch.device("cpu"))
    with peaks.phase("update"):
        pass
    assert list(peaks.take(dist.ProcessGroup)) == ["perf/cpu_memory_used_gb"]  # type: ignore[arg-type]
