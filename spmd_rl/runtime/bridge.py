"""Where the ranks of one pool, or of two, meet: messages to all members, and tensors from one member to another."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from spmd_rl.topology.edges import ExchangeEdge


@dataclass
class Waits:
    """Seconds that this rank has waited for others at meetings."""

    seconds: float = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The block does next to nothing but wait."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@dataclass
class Bridge:
    """A process group and the job ranks of its members. All members make the same calls in the same order."""

    group: ProcessGroup
    members: tuple[int, ...]
    """Job ranks, in the group's order."""
    waits: Waits = field(default_factory=Waits)

    @cached_property
    def place(self) -> dict[int, int]:
        """Job rank -> its number in the group."""
        return {rank: place for place, rank in enumerate(self.members)}

    @property
    def me(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    def all_to_all(self, numbers: Sequence[int]) -> list[int]:
        """Give member i `numbers[i]`; what each of them gave this rank. Where ranks wait for each other."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        received = torch.empty_like(sent)
        with self.waits():
            dist.all_to_all_single(received, sent, group=self.group)
        return received.tolist()  # type: ignore[no-any-return]

    def all_gather(self, data: Tensor) -> list[Tensor]:
        """Every member's bytes (uint8, any length each), in the group's order. For small things."""
        size = torch.tensor([len(data)])
        sizes = [torch.empty_like(size) for _ in self.members]
        with self.waits():
            dist.all_gather(sizes, size, group=self.group)
        widest = max(int(s) for s in sizes)
        padded = torch.zeros(widest, dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=self.group)
        return [part[: int(s)] for part, s in zip(found, sizes, strict=True)]

    def any(self, here: bool) -> bool:
        """Whether it holds on some member."""
        flag = torch.tensor([int(here)])
        with self.waits():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def say(self, value: Any, speaker: int) -> Any:
        """The JSON value of the member `speaker` (a job rank), on every member; the others' values are left aside."""
        source = self.place[speaker]
        data = to_bytes(value) if self.me == source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(data)])
        with self.waits():
            dist.broadcast(size, group=self.group, group_src=source)
        if self.me != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=source)
        return from_bytes(data)

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Work]:
        """Start (tensor, member) sends and receives, all on one kind of device; wait for what is returned.

        Between two members tensors arrive in the order in which they were sent.
        """
        calls: list[tuple[Any, Tensor, dict[str, int]]] = [(dist.isend, t, {"group_dst": peer}) for t, peer in sends]
        calls += [(dist.irecv, t, {"group_src": peer}) for t, peer in receives]
        if not calls:
            return []
        device = calls[0][1].device
        if device.type == "cpu":
            works = [call(tensor, group=self.group, **peer) for call, tensor, peer in calls]
            return [work for work in works if work is not None]
        with _coalescing_manager(self.group, device, async_ops=True) as manager:  # what batch_isend_irecv does
            for call, tensor, peer in calls:
                call(tensor, group=self.group, **peer)
        return list(manager.works)


@dataclass(frozen=True)
class Edge:
    """An exchange of the plan with what carries it: the meeting of both pools, and that inside the receiving one."""

    plan: ExchangeEdge
    bridge: Bridge
    inside: Bridge


def to_bytes(value: Any) -> Tensor:
    """JSON as uint8; floats keep every bit."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """The inverse of `to_bytes`."""
    return json.loads(data.numpy().tobytes())
