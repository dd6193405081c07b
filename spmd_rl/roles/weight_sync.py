"""Weight sync to a rollout on another pool: each byte crosses once, in buckets of bounded size.

Shards are copied into place where they lie on both sides (`weights/`): each rank of the rollout gets one share of what
it wants, its replicas the other shares; then they hand on inside their pool, over its fast links. An engine that can
only load whole tensors gets them so: a bucket's bytes are cut into as many slices as the rollout's pool has ranks, each
slice goes to one of them, and there the slices are gathered.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.engines.base import Engine
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.bridge import from_bytes, to_bytes
from spmd_rl.topology.layout import split_rows
from spmd_rl.weights.held import Box, Held, TensorSpec
from spmd_rl.weights.sync import BUCKET_BYTES, TableSync

Spec = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


class WeightSync:
    """Called at the same point by every rank of the actor's pool and of the rollout's."""

    def __init__(
        self, runtime: Runtime, dtype: torch.dtype, verify: str, actor: Engine | None, rollout: Rollout | None
    ) -> None:
        """`dtype`: what whole tensors travel in (the rollout's); `verify`: see `TableSync.run`. One of `actor` and
        `rollout` is here."""
        self.runtime, self.dtype, self.verify, self.actor, self.rollout = runtime, dtype, verify, actor, rollout
        self.edge = runtime.edge("actor", "rollout")
        self.whole, self.specs = False, list[Spec]()
        self.hops: list[TableSync] | None = None

    def __call__(self) -> None:
        """Send the weights if the actor has moved on, or the rollout has dropped them."""
        if self.rollout is not None:
            self.rollout.engine.wake("weights")
        mine = self.actor.version if self.actor is not None else self._there.synced_at
        versions = [from_bytes(said) for said in self.edge.bridge.all_gather(to_bytes(mine))]
        if len(set(versions)) == 1:
            return
        self._send_parts() if self._by_parts() else self._send_whole()
        if self.rollout is not None:
            self.rollout.engine.weights_changed()
            first = self.edge.bridge.place[self.edge.plan.pools[0].ranks[0]]
            self.rollout.synced_at = versions[first]

    @property
    def _there(self) -> Rollout:
        assert self.rollout is not None, "a rank of one of the two pools"
        return self.rollout

    def _by_parts(self) -> bool:
        """Whether shards can be copied into place; whole tensors travel where an engine can only load them."""
        if self.hops is None and not self.whole:
            held = self.actor.held() if self.actor is not None else self._there.engine.held
            self.whole = self.edge.bridge.any(held is None)
        return not self.whole

    def _send_parts(self) -> None:
        """First each rank of the rollout gets a part of what it wants, its replicas the others; then they hand on."""
        sources = (self.actor.held() if self.actor is not None else None) or []
        targets = (self.rollout.engine.held if self.rollout is not None else None) or []
        mine, others = self._shares(targets)
        if self.hops is None:
            self.hops = list(self._connect(sources, mine, others))
        self.hops[0].bind(sources, mine)
        for hop in self.hops:
            hop.run(self.verify)

    def _connect(self, sources: list[Held], mine: list[Held], others: list[Held]) -> Iterator[TableSync]:
        r, bridge = self.runtime, self.edge.bridge
        specs = self.rollout.engine.specs if self.rollout is not None else []
        said = bridge.say([[s.name, list(s.shape)] for s in specs], self.edge.plan.pools[1].ranks[0])
        specs = [TensorSpec(name, tuple(shape)) for name, shape in said]
        yield TableSync(specs, sources, mine, bridge.group, bridge.group, r.device)
        if self.rollout is not None and self.rollout.layout.dp_size > 1:
            yield TableSync(specs, mine, others, r.everyone, r.control, r.device)

    def _shares(self, targets: list[Held]) -> tuple[list[Held], list[Held]]:
        """Of what this rank of the rollout wants: its share of the rows, and those that its replicas get."""
        if self.rollout is None:
            return [], []
        layout = self.rollout.layout
        part, parts = layout.dp_rank(self.runtime.pool_rank), layout.dp_size
        mine, others = [], []
        for held in targets:
            cuts = split_rows(held.box.size[0], parts).tolist()
            mine += rows_of(held, cuts[part], cuts[part + 1])
            others += [*rows_of(held, 0, cuts[part]), *rows_of(held, cuts[part + 1], cuts[-1])]
        return mine, others

    def _send_whole(self) -> None:
        if self.actor is not None:
            self._send(self.actor)
        else:
            self._receive(self._there)

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

    def _receive(self, rollout: Rollout) -> None:
        if not self.specs:
            said = self.edge.bridge.say(None, self.edge.plan.pools[0].ranks[0])
            self.specs = [(name, dtype, tuple(shape)) for name, dtype, shape in said]
        rollout.engine.load_weights(self._arriving())

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


def rows_of(held: Held, first: int, end: int) -> list[Held]:
    """Rows first..end-1 of a held box; none when that is nothing."""
    if first == end:
        return []
    box = Box(held.box.name, (held.box.start[0] + first, *held.box.start[1:]), (end - first, *held.box.size[1:]))
    return [Held(box, held.part(box))]


def _spec(name: str, tensor: Tensor, dtype: torch.dtype) -> Spec:
    return name, str(dtype).removeprefix("torch."), tuple(tensor.shape)


def size_of(spec: Spec) -> int:
    """Bytes of a tensor."""
    _, dtype, shape = spec
    return prod(shape) * int(getattr(torch, dtype).itemsize)


def buckets(specs: Sequence[Spec]) -> Iterator[list[Spec]]:
    """Consecutive tensors, as many as fit BUCKET_BYTES; one at least."""
    bucket: list[Spec] = []
    for spec in specs:
        if bucket and sum(map(size_of, bucket)) + size_of(spec) > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(spec)
    if bucket:
        yield bucket
