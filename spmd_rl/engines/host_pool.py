"""Hot swap: what a piece holds on the device goes to pinned memory of the host and comes back, on a stream of its own.

Storages are emptied and filled again, never replaced: parameters, optimizer state and FSDP's own views of them stay
the objects that they are. Device and host both hold a piece in one exactly sized allocation, so that copies run at the
link's rate and nothing is lost to rounding. On a CPU the same code moves a piece between two places of the host.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.observe.memory import GIB, host_memory_available

ALIGN = 512
"""Bytes: every storage starts at a multiple, as in the device's allocator."""


class HostMemoryError(RuntimeError):
    """The host has not the memory, or does not lock it, that a hot swap needs."""


@dataclass
class Moves:
    """What was copied one way: bytes, seconds that the copies took, seconds for which the rank stood still."""

    bytes: int = 0
    copying: float = 0.0
    waiting: float = 0.0

    def add(self, other: "Moves") -> None:
        """Count `other` in."""
        self.bytes += other.bytes
        self.copying += other.copying
        self.waiting += other.waiting


class HostPool:
    """`size` bytes of the host, in whole pages; page-locked for copies from and to a CUDA device.

    torch's own pinned memory comes in powers of two: up to twice what is asked for.
    """

    def __init__(self, size: int, name: str, pinned: bool) -> None:
        """Raises HostMemoryError with the figures where the host lacks `size` bytes or does not lock them."""
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        free = host_memory_available()
        if free is not None and self.size > free:
            raise self._lacking(name, f"{free / GIB:.2f} GiB are free")
        try:
            pages = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._lacking(name, str(error)) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        """uint8 [size]; keeps the pages."""
        self.bytes.zero_()  # by several threads: locking would fault the pages in with one
        self.pinned = pinned
        refused = self._lock(True) if pinned else ""
        if refused:
            raise self._lacking(name, f"locking it gave {refused}")

    def close(self) -> None:
        """Unlock the pages; they go with the last tensor that looks at them."""
        if self.pinned:
            self._lock(False)
            self.pinned = False

    def _lock(self, on: bool) -> str:
        """Register the pages with CUDA, or take that back; the error's words, or none."""
        runtime, address = torch.cuda.cudart(), self.bytes.data_ptr()
        code = runtime.cudaHostRegister(address, self.size, 0) if on else runtime.cudaHostUnregister(address)
        return "" if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    def _lacking(self, name: str, why: str) -> HostMemoryError:
        return HostMemoryError(
            f"hot swap: {name} needs {self.size / GIB:.2f} GiB of pinned host memory on this rank, but {why}; raise "
            "the job's memory limit, shard over more ranks, or set offload_params, offload_optimizer to false"
        )


class CopyStream:
    """Copies behind the rank's back: on a CUDA stream of their own; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.seconds: Callable[[], float] = float
        """How long the last copies took; waits for them."""

    def start(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor to its first, after all that the current stream was given so far."""
        if self.stream is None:
            began = time.perf_counter()
            for target, source in copies:
                target.copy_(source)
            took = time.perf_counter() - began
            self.seconds = lambda: took
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            first.record()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            last.record()

        def seconds() -> float:
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        self.seconds = seconds

    def finish(self) -> None:
        """The rank waits for the copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def join(self) -> None:
        """What the current stream is given from now on waits for the copies; the rank does not."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Swap:
    """One piece: `here`, `leaving` (being copied, still here), `away`, `coming` (being copied, may not be read yet)."""

    def __init__(self, name: str, tensors: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        """`tensors`: what the piece holds now; asked each time that it leaves."""
        self.name, self.tensors, self.device = name, tensors, device
        self.copies = CopyStream(device)
        self.pool: HostPool | None = None
        self.state = "here"
        self.out, self.back = Moves(), Moves()
        """Both ways, since the last `take`."""
        self._places: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Storages that leave or are away, each with its bytes in the pool."""
        self._unread: list[tuple[Moves, Callable[[], float]]] = []

    def leave(self) -> None:
        """Start copying to the host. The device's copy stays valid, and must not be written, until `free`."""
        if self.state in ("leaving", "away"):
            return
        self.settle()
        began = time.perf_counter()
        storages = distinct_storages(self.tensors())
        self._places = list(zip(storages, self._rooms([s.nbytes() for s in storages]), strict=True))
        self._copy(self.out, [(room, bytes_of(storage)) for storage, room in self._places])
        self.state = "leaving"
        self.out.waiting += time.perf_counter() - began

    def free(self) -> None:
        """Wait until the host has it all, then give up the device's memory."""
        if self.state != "leaving":
            return
        began = time.perf_counter()
        self.copies.finish()
        for storage, _ in self._places:
            storage.resize_(0)
        self.state = "away"
        self.out.waiting += time.perf_counter() - began

    def come(self) -> None:
        """Start copying back. Nothing may read the piece before `settle`."""
        if self.state == "leaving":  # the device's copy is as good as ever
            self.state = "here"
        if self.state != "away":
            return
        began = time.perf_counter()
        self._reserve(sum(aligned(len(room)) for _, room in self._places))
        for storage, room in self._places:
            storage.resize_(len(room))
        self._copy(self.back, [(bytes_of(storage), room) for storage, room in self._places])
        self.state = "coming"
        self.back.waiting += time.perf_counter() - began

    def settle(self) -> None:
        """From here on the current stream may read the piece: it waits for the copies, the rank does not."""
        if self.state == "coming":
            self.copies.join()
            self.state, self._places = "here", []

    def take(self) -> tuple[Moves, Moves]:
        """What went out and came back since the last call."""
        for moves, seconds in self._unread:
            moves.copying += seconds()
        taken = self.out, self.back
        self.out, self.back, self._unread = Moves(), Moves(), []
        return taken

    def _copy(self, moves: Moves, copies: list[tuple[Tensor, Tensor]]) -> None:
        self.copies.start(copies)
        moves.bytes += sum(len(source) for _, source in copies)
        if copies:
            self._unread.append((moves, self.copies.seconds))

    def _rooms(self, sizes: Sequence[int]) -> list[Tensor]:
        """A part of the pool for each storage; the pool is made anew where it is too small."""
        total = sum(map(aligned, sizes))
        if self.pool is None or self.pool.size < total:
            if self.pool is not None:
                self.pool.close()
                self.pool = None
            self.pool = HostPool(total, self.name, self.device.type == "cuda") if total else None
        rooms, start = [], 0
        for size in sizes:
            assert self.pool is not None, "a storage that is not empty has a room"
            rooms.append(self.pool.bytes[start : start + size])
            start += aligned(size)
        return rooms

    def _reserve(self, size: int) -> None:
        """One allocation that the storages are cut from: one by one they would be as many calls of cudaMalloc."""
        if self.device.type == "cuda" and size:
            torch.empty(size, dtype=torch.uint8, device=self.device)  # back in the allocator's cache at once


def aligned(size: int) -> int:
    """`size`, up to the next place where a storage may start."""
    return -(-size // ALIGN) * ALIGN


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind local tensors, each once, without empty ones."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as uint8 [nbytes]; shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
