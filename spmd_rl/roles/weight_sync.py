"""Weight sync to a rollout on another pool: each byte crosses once, in buckets of bounded size.

A bucket's bytes are cut into as many slices as the rollout's pool has ranks. Each slice goes to one of them, and there
the slices are gathered: the fast links inside a pool do the fanning out.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.engines.base import Engine
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime

BUCKET = 256 * 2**20
"""Bytes of a bucket, but for a tensor that is larger."""
Spec = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


class WeightSync:
    """Called at the same point by every rank of the actor's pool and of the rollout's."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype, actor: Engine | None, rollout: Rollout | None) -> None:
        """`dtype`: what the weights travel in (the rollout's). One of `actor` and `rollout` is here."""
        self.runtime, self.dtype, self.actor, self.rollout = runtime, dtype, actor, rollout
        self.edge = runtime.edge("actor", "rollout")
        self.synced_at, self.specs = -1, list[Spec]()

    def __call__(self) -> None:
        """Send the weights if the actor has moved on since the last time."""
        first = self.edge.plan.pools[0].ranks[0]
        version = self.edge.bridge.say(self.actor.version if self.actor else None, first)
        if version == self.synced_at:
            return
        if self.actor is not None:
            self._send(self.actor)
        else:
            assert self.rollout is not None, "a rank of one of the two pools"
            self._receive(self.rollout, version)
        self.synced_at = version

    def _send(self, actor: Engine) -> None:
        first = self.edge.plan.pools[0].ranks[0]
        if not self.specs:
            self.specs = [_spec(name, tensor, self.dtype) for name, tensor in actor.weights()]
            self.edge.bridge.say(self.specs, first)
        tensors = (tensor.to(self.dtype) for _, tensor in actor.weights())
        for bucket in buckets(self.specs):
            flat = torch.cat([next(tensors).reshape(-1).view(torch.uint8) for _ in bucket])
            self._wait(self._slices(flat), ())
        for _ in tensors:
            raise RuntimeError("weight sync: the actor has more tensors than at the first sync")

    def _receive(self, rollout: Rollout, version: int) -> None:
        if not self.specs:
            said = self.edge.bridge.say(None, self.edge.plan.pools[0].ranks[0])
            self.specs = [(name, dtype, tuple(shape)) for name, dtype, shape in said]
        rollout.engine.wake("weights")
        rollout.engine.load_weights(self._arriving())
        rollout.engine.weights_changed()
        rollout.synced_at = version

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets(self.specs):
            flat = torch.empty(sum(map(size_of, bucket)), dtype=torch.uint8, device=self.runtime.device)
            slices = flat.tensor_split(self.runtime.pool.size)
            self._wait((), self._from(slices[self.runtime.pool_rank]))
            if self.runtime.pool.size > 1:
                self._fan_out(flat)
            at = 0
            for name, dtype, shape in bucket:
                size = size_of((name, dtype, shape))
                yield name, flat[at : at + size].view(getattr(torch, dtype)).reshape(shape)
                at += size

    def _slices(self, flat: Tensor) -> list[tuple[Tensor, int]]:
        """What this rank of the actor sends of a bucket: the slices of every A-th rank of the rollout."""
        edge, mine = self.edge, self.runtime.pool_rank
        receivers = edge.plan.pools[1].ranks
        slices = flat.tensor_split(len(receivers))
        return [
            (slices[i], edge.bridge.place[rank])
            for i, rank in enumerate(receivers)
            if i % self.runtime.pool.size == mine and len(slices[i])
        ]

    def _from(self, mine: Tensor) -> list[tuple[Tensor, int]]:
        """Where this rank of the rollout gets its slice from."""
        senders = self.edge.plan.pools[0].ranks
        sender = senders[self.runtime.pool_rank % len(senders)]
        return [(mine, self.edge.bridge.place[sender])] if len(mine) else []

    def _fan_out(self, flat: Tensor) -> None:
        """Every rank of the rollout hands its slice of the bucket to the others."""
        slices = list(flat.tensor_split(self.runtime.pool.size))
        for owner, part in enumerate(slices):
            dist.broadcast(part, group=self.runtime.everyone, group_src=owner)

    def _wait(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        for work in self.edge.bridge.post(sends, receives):
            work.wait()


def _spec(name: str, tensor: Tensor, dtype: torch.dtype) -> Spec:
    return name, str(dtype).removeprefix("torch."), tuple(tensor.shape)


def size_of(spec: Spec) -> int:
    """Bytes of a tensor."""
    _, dtype, shape = spec
    return prod(shape) * int(getattr(torch, dtype).itemsize)


def buckets(specs: Sequence[Spec]) -> Iterator[list[Spec]]:
    """Consecutive tensors, as many as fit a bucket; one at least."""
    bucket: list[Spec] = []
    for spec in specs:
        if bucket and sum(map(size_of, bucket)) + size_of(spec) > BUCKET:
            yield bucket
            bucket = []
        bucket.append(spec)
    if bucket:
        yield bucket
