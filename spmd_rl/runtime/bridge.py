"""Where the ranks of one pool, or of two, meet: messages to all members, and tensors from one member to another."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from spmd_rl.observe.processes import machine
from spmd_rl.runtime import peer_memory
from spmd_rl.topology.edges import ExchangeEdge

FRAME, FRAMES = 8 * 2**10, 2**20
"""Bytes of one member's frame at most, and about those of all of them together."""


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

    @cached_property
    def near(self) -> dict[int, int]:
        """Members that read this rank's memory and whose memory it reads -> their process number. All members ask it
        first at the same time."""
        peer_memory.allow()
        mark = peer_memory.Mark()
        said = [from_bytes(m) for m in self.all_gather(to_bytes([machine(), mark.pid, mark.address, mark.text]))]
        others = [(peer, it) for peer, it in enumerate(said) if peer != self.me and it[0] == machine()]
        mine = [peer for peer, it in others if peer_memory.readable(*it[1:])]
        reads = [from_bytes(m) for m in self.all_gather(to_bytes(mine))]  # after it, nobody reads the mark any more
        return {peer: said[peer][1] for peer in mine if self.me in reads[peer]}

    @cached_property
    def frame(self) -> int:
        """Bytes of a frame: the length of a message and its first bytes; only what is longer takes a second call."""
        return max(64, min(FRAME, FRAMES // len(self.members) // 8 * 8))

    def all_to_all(self, messages: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Give each of these members its bytes (uint8, any length); what was given to this rank, by member.

        Where ranks wait for each other. A message of no bytes is none.
        """
        sent = torch.zeros(len(self.members), self.frame, dtype=torch.uint8)
        for peer, data in messages.items():
            _fill(sent[peer], data)
        received = torch.empty_like(sent)
        with self.waits():
            dist.all_to_all_single(received, sent, group=self.group)
        found = {peer: _begun(received[peer]) for peer in received[:, :8].any(1).nonzero().flatten().tolist()}
        short = self.frame - 8
        rest = [(data[short:], peer) for peer, data in found.items() if len(data) > short]
        wait(self.post([(data[short:], peer) for peer, data in messages.items() if len(data) > short], rest))
        return found

    def all_gather(self, data: Tensor) -> list[Tensor]:
        """Every member's bytes (uint8, any length each), in the group's order. For small things."""
        others = [peer for peer in range(len(self.members)) if peer != self.me]
        found = self.all_to_all(dict.fromkeys(others, data)) | {self.me: data}
        return [found.get(peer, NOTHING) for peer in range(len(self.members))]

    def any(self, here: bool) -> bool:
        """Whether it holds on some member."""
        flag = torch.tensor([int(here)])
        with self.waits():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def say(self, value: Any, speaker: int) -> Any:
        """The JSON value of the member `speaker` (a job rank), on every member; the others' values are left aside."""
        return self.hear(value, [speaker])[0]

    def hear(self, value: Any, speakers: Sequence[int]) -> list[Any]:
        """The same of several members, at one time; in the order of `speakers`."""
        places = [self.place[speaker] for speaker in speakers]
        mine = to_bytes(value) if self.me in places else NOTHING
        frames = [_fill(torch.zeros(self.frame, dtype=torch.uint8), mine) for _ in places]  # others' are written over
        with self.waits():
            works = [
                dist.broadcast(frame, group=self.group, group_src=place, async_op=True)
                for frame, place in zip(frames, places, strict=True)
            ]
            wait(works)
        found = [mine if place == self.me else _begun(f) for f, place in zip(frames, places, strict=True)]
        for data, place in zip(found, places, strict=True):
            if len(data) > self.frame - 8:
                dist.broadcast(data[self.frame - 8 :], group=self.group, group_src=place)
        return [from_bytes(data) for data in found]

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


NOTHING = torch.empty(0, dtype=torch.uint8)


def _fill(frame: Tensor, data: Tensor) -> Tensor:
    """The frame, with how long the data is and as many of its bytes as fit."""
    frame[:8] = torch.tensor([len(data)]).view(torch.uint8)
    frame[8 : 8 + len(data)] = data[: len(frame) - 8]
    return frame


def _begun(frame: Tensor) -> Tensor:
    """The data, of which the bytes that did not fit are still to come."""
    data = torch.empty(int(frame[:8].view(torch.int64)), dtype=torch.uint8)
    data[: len(frame) - 8] = frame[8 : 8 + len(data)]
    return data


def wait(works: Sequence[Work]) -> None:
    """Until all of them are done."""
    for work in works:
        work.wait()


def to_bytes(value: Any) -> Tensor:
    """JSON as uint8; floats keep every bit."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """The inverse of `to_bytes`."""
    return json.loads(data.numpy().tobytes())
