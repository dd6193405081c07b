"""Rows are read from the memory of another rank of this host, in place: one copy, from where they lie to where they go.

Linux's process_vm_readv ("cross memory attach", as MPI and UCX have it). There is no file and no buffer between two
ranks, so nothing has to be bounded, and nothing is left behind by a rank that is killed.
"""

import ctypes
import os
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RUN = 2**20
"""Bytes of a run at most, so that one call (it takes VECTORS of them) stays below Linux's 2 GiB."""
VECTORS = 1024
"""Runs of a call: IOV_MAX."""
HUGE = 4 * 2**20
PR_SET_PTRACER = 0x59616D61

Places = NDArray[np.int64]


def allow() -> None:
    """Let processes of the same launcher read this one where Linux asks for it (Yama, ptrace_scope=1)."""
    with suppress(AttributeError):  # no Linux; then nobody reads anything here
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, os.getppid(), 0, 0, 0)


def read(pid: int, sources: Places, targets: Places, sizes: Places) -> None:
    """Copy runs of bytes from addresses of another process to addresses of this one.

    Raises: OSError with what Linux says, ESRCH where the process has ended, EPERM where it may not be read.
    """
    cuts = _cut(*joined(sources, targets, sizes))
    remote, local = (np.stack([start, cuts[2]], 1).astype(np.uint64) for start in cuts[:2])
    for at in range(0, len(remote), VECTORS):
        there, here = remote[at : at + VECTORS], local[at : at + VECTORS]
        wanted, got = int(here[:, 1].sum()), 0
        ctypes.set_errno(0)
        got = _readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there))
        if got != wanted:
            why = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {wanted} bytes"
            raise OSError(ctypes.get_errno(), f"process_vm_readv from process {pid}: {why}")


def copy(sources: Places, targets: Places, sizes: Places) -> None:
    """The same inside this process."""
    for source, target, size in zip(*(part.tolist() for part in joined(sources, targets, sizes)), strict=True):
        ctypes.memmove(target, source, size)


def joined(sources: Places, targets: Places, sizes: Places) -> tuple[Places, Places, Places]:
    """Runs that follow each other at both ends as one, empty ones left out."""
    filled = sizes > 0
    sources, targets, sizes = sources[filled], targets[filled], sizes[filled]
    apart = (sources[:-1] + sizes[:-1] != sources[1:]) | (targets[:-1] + sizes[:-1] != targets[1:])
    first = np.flatnonzero(np.concatenate([np.ones(min(len(sizes), 1), dtype=bool), apart]))
    return sources[first], targets[first], np.add.reduceat(sizes, first) if len(first) else sizes


def _cut(sources: Places, targets: Places, sizes: Places) -> tuple[Places, Places, Places]:
    parts = -(-sizes // RUN)
    inside = (np.arange(int(parts.sum())) - np.repeat(parts.cumsum() - parts, parts)) * RUN
    start, to, size = (np.repeat(numbers, parts) for numbers in (sources, targets, sizes))
    return start + inside, to + inside, np.minimum(size - inside, RUN)


def _readv(pid: int, local: int, n_local: int, remote: int, n_remote: int) -> int:
    """Bytes that were read; -1 and errno where none were. The GIL is released meanwhile."""
    return int(_call()(pid, local, n_local, remote, n_remote, 0))


@cache
def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    number, address = ctypes.c_ulong, ctypes.c_void_p
    call.argtypes, call.restype = [ctypes.c_int, address, number, address, number, number], ctypes.c_ssize_t
    return call


class Mark:
    """Bytes in this process that nobody can know who does not read them here."""

    def __init__(self) -> None:
        self.data = np.frombuffer(os.urandom(16), dtype=np.uint8).copy()
        self.pid, self.address = os.getpid(), self.data.ctypes.data

    @property
    def text(self) -> str:
        return self.data.tobytes().hex()


def readable(pid: int, address: int, text: str) -> bool:
    """Whether another process's `Mark` can be read here."""
    found = np.zeros(16, dtype=np.uint8)
    try:
        read(pid, *(np.array([number], dtype=np.int64) for number in (address, found.ctypes.data, len(found))))
    except (OSError, AttributeError):  # no permission, or no such call
        return False
    return found.tobytes().hex() == text


def fresh(size: int) -> Tensor:
    """uint8 [size] on the CPU, in huge pages where Linux gives them: NumPy asks for them from HUGE bytes on.

    The first touch of each page of 4 KiB costs more than the copy into it.
    """
    if size < HUGE:
        return torch.empty(size, dtype=torch.uint8)
    return torch.from_numpy(np.empty(size, dtype=np.uint8))
