"""Runs of bytes of one process arrive in another, and what cannot be read is an error."""

import errno
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from spmd_rl.runtime import peer_memory
from spmd_rl.runtime.liveness import cause_of

HOLDER = """
import sys
from spmd_rl.runtime import peer_memory
peer_memory.allow()
mark = peer_memory.Mark()
print(mark.pid, mark.address, mark.text, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("seed", range(20))
def test_runs_arrive_where_they_belong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another part of this process; both ways of copying, calls of few and of many runs."""
    rng = random.Random(seed)
    monkeypatch.setattr(peer_memory, "RUN", rng.choice([1, 7, 2**20]))
    monkeypatch.setattr(peer_memory, "VECTORS", rng.choice([1, 3, 1024]))
    data = np.random.default_rng(seed).integers(0, 256, 5000, dtype=np.uint8)
    sizes = np.array([rng.choice([0, 0, 1, 3, 64]) for _ in range(60)])
    ends = sizes.cumsum()
    order = rng.sample(range(60), 60) if rng.random() < 0.7 else list(range(60))
    sources = np.array([rng.randrange(4900) for _ in order]) if rng.random() < 0.5 else ends - sizes
    targets = np.zeros(60, dtype=np.int64)
    targets[order] = (sizes[order].cumsum()) - sizes[order]
    expected = np.concatenate([data[sources[i] : sources[i] + sizes[i]] for i in order])
    for way in (lambda *runs: peer_memory.read(os.getpid(), *runs), peer_memory.copy):
        found = np.zeros(int(ends[-1]) + 1, dtype=np.uint8)
        way(data.ctypes.data + sources, found.ctypes.data + targets, sizes)
        assert np.array_equal(found[:-1], expected)
        assert found[-1] == 0


def test_another_process_is_read_until_it_ends() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        pid, address, text = holder.stdout.readline().split()
        assert peer_memory.readable(int(pid), int(address), text)
        assert not peer_memory.readable(int(pid), int(address), "00" * 16)
    finally:
        holder.kill()
        holder.communicate()
    assert not peer_memory.readable(int(pid), int(address), text)
    one = np.zeros(1, dtype=np.uint8)
    with pytest.raises(OSError, match=f"process {pid}: No such process") as found:
        peer_memory.read(int(pid), np.array([int(address)]), np.array([one.ctypes.data]), np.array([1]))
    assert found.value.errno == errno.ESRCH
    assert cause_of(found.value) == "collective"  # who reads it is not to blame


def test_memory_that_is_not_there() -> None:
    one = np.zeros(1, dtype=np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        peer_memory.read(os.getpid(), np.array([8]), np.array([one.ctypes.data]), np.array([1]))
