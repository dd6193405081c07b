"""A weight sync: copies into the rollout engine's own parameters, from this rank's shards and in buckets from others'.

Every rank of the group makes the same calls. After each sync the checksums of what was sent are compared with those of
what lies in the destination.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.weights.copies import Copies
from spmd_rl.weights.held import Held, TensorSpec
from spmd_rl.weights.table import Bucket, Manifest, Piece, SyncError, build_table

BUCKET_BYTES = 256 << 20
"""Bytes that a rank receives in one exchange, at most."""
ALIGNMENT = 16
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12


@dataclass
class _Exchange:
    """One bucket, made concrete. `block` is set where all ranks get the same: bytes that each rank gives to an
    all-gather; else `sent` and `received` bytes a peer go through an all-to-all."""

    pack: Copies
    unpack: Copies
    out: Tensor
    into: Tensor
    sent: list[int]
    received: list[int]
    block: int


class TableSync:
    """From `sources` to `targets`, the views that this rank holds of the same checkpoint tensors."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        sources: Sequence[Held],
        targets: Sequence[Held],
        group: ProcessGroup,
        control: ProcessGroup,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`control` is a gloo group over the same ranks: over it they tell each other what they hold. `specs`: the
        tensors that together they hold (parts of) and want."""
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()
        dtypes = tuple(h.view.dtype for h in targets)
        mine = Manifest(tuple(h.box for h in sources), tuple(h.box for h in targets), dtypes)
        everyone: list[Manifest] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, mine, group=control)
        self.table = build_table(specs, everyone, self.rank, bucket_bytes)
        self.blocks = self._blocks(control)
        self.bind(sources, targets)

    def _blocks(self, control: ProcessGroup) -> list[int]:
        """For each bucket, the bytes a rank gives to an all-gather, where one will do; 0 where it takes an all-to-all.

        It will do where every rank sends the same to all others: FSDP shards to whole copies.
        """
        alike = [int(b.sends_alike(self.rank)) for b in self.table.buckets]
        most = [max((_bytes(p) for p in b.send), default=0) for b in self.table.buckets]
        facts = torch.tensor([[-a for a in alike], most], dtype=torch.int64).reshape(2, -1)
        if facts.numel():
            dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=control)
        return [int(m) if a == -1 else 0 for a, m in facts.t().tolist()]

    def bind(self, sources: Sequence[Held], targets: Sequence[Held]) -> None:
        """Take the views as they lie now: at first, and after parameters were moved. No communication."""
        self._bound = (sources, targets)
        local = [(p, at, targets[p.at].part(p.box), sources[at].part(p.box)) for p, at in self.table.local]
        self.local = Copies([(target, source) for _, _, target, source in local])
        sizes = [(self._out_bytes(i), self._in_bytes(i)) for i in range(len(self.table.buckets))]
        buffers = [  # two of each: one bucket is on its way while the next one is packed
            (self._buffer(max((o for o, _ in sizes), default=0)), self._buffer(max((n for _, n in sizes), default=0)))
            for _ in range(min(2, len(sizes)))
        ]
        self.exchanges = [
            self._concrete(bucket, block, sources, targets, *buffers[i % 2])
            for i, (bucket, block) in enumerate(zip(self.table.buckets, self.blocks, strict=True))
        ]
        self.names = [p.box for p, _ in self.table.local]
        self.names += [p.box for b in self.table.buckets for pieces in b.recv for p in pieces]
        self._order_sums()

    def bound_to(self, sources: Sequence[Held], targets: Sequence[Held]) -> bool:
        """Whether these very lists were given to the last `bind`."""
        return self._bound[0] is sources and self._bound[1] is targets

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to others in a sync."""
        return sum(_bytes(pieces) for bucket in self.table.buckets for pieces in bucket.send)

    def run(self, verify: str = "checksum") -> None:
        """Sync; `verify` is checksum, full (every value, by sending it a second time) or off.

        Raises SyncError, on every rank, naming the first part that did not arrive.
        """
        sums = [self.local.run()]
        sent = self._through(lambda e: e.unpack.run())
        if verify == "off":
            return
        arrived = torch.cat([self.local.sums(), *[e.unpack.sums() for e in self.exchanges]])
        expected = torch.cat([*sums, self._tell(sent)])
        wrong = arrived != expected
        if verify == "full":
            wrong |= self._compare()
        self._raise_if(wrong, expected, arrived)

    def _through(self, take: Callable[[_Exchange], object]) -> list[Tensor]:
        """Send every bucket; the sums of what this rank packed. The next bucket is packed while one is on its way."""
        sums, pending = [], None
        for exchange in self.exchanges:
            sums.append(exchange.pack.run())
            work = self._send(exchange)
            if pending is not None:
                pending[0].wait()
                take(pending[1])
            pending = (work, exchange)
        if pending is not None:
            pending[0].wait()
            take(pending[1])
        return sums

    def _send(self, e: _Exchange) -> dist.Work:
        if e.block:
            work = _all_gather(e.into, e.out, group=self.group, async_op=True)
        else:
            work = dist.all_to_all_single(e.into, e.out, e.received, e.sent, group=self.group, async_op=True)
        assert work is not None
        return work

    def _tell(self, sums: list[Tensor]) -> Tensor:
        """Give each receiver the checksums of what it was sent: those of what this rank got, in its pieces' order."""
        if not self.exchanges:
            return torch.zeros(0, dtype=torch.int32, device=self.device)
        mine = torch.cat(sums)[self._sum_source]
        got = mine.new_empty(sum(self._sums_received))
        dist.all_to_all_single(got, mine, self._sums_received, self._sums_sent, group=self.group)
        return got[self._sum_order]

    def _compare(self) -> Tensor:
        """Which parts differ in any bit from what their source holds now, bool [parts]."""
        found = [not _same(t, s.to(t.dtype)) for t, s in zip(self.local.targets, self.local.sources, strict=True)]

        def take(e: _Exchange) -> None:
            found.extend(not _same(t, s) for t, s in zip(e.unpack.targets, e.unpack.sources, strict=True))

        self._through(take)
        return torch.tensor(found, dtype=torch.bool, device=self.device)

    def _raise_if(self, wrong: Tensor, expected: Tensor, arrived: Tensor) -> None:
        """Every rank learns whether any rank found a fault, so that all of them stop."""
        faults = wrong.sum().to(torch.int32).reshape(1)
        if self.size > 1:
            dist.all_reduce(faults, group=self.group)
        if not int(faults):
            return
        mine = wrong.nonzero().flatten().tolist()
        if not mine:
            raise SyncError("weight sync: another rank says which weights did not arrive")
        at = mine[0]
        raise SyncError(
            f"weight sync: {self.names[at]} did not arrive on rank {self.rank} of the pool: checksum of the source "
            f"{expected[at].item():#x} != {arrived[at].item():#x} of the rollout engine ({len(mine)} parts of "
            f"{len(self.names)} differ)"
        )

    def _out_bytes(self, i: int) -> int:
        return self.blocks[i] or sum(_bytes(p) for p in self.table.buckets[i].send)

    def _in_bytes(self, i: int) -> int:
        return self.blocks[i] * self.size or sum(_bytes(p) for p in self.table.buckets[i].recv)

    def _buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _concrete(
        self, bucket: Bucket, block: int, sources: Sequence[Held], targets: Sequence[Held], out: Tensor, into: Tensor
    ) -> _Exchange:
        """The bucket's copies into `out` and from `into`."""
        send = [bucket.send[0 if self.rank else 1]] if block else bucket.send
        sent, received = [_bytes(p) for p in bucket.send], [_bytes(p) for p in bucket.recv]
        starts = [block * r for r in range(self.size)] if block else [sum(received[:r]) for r in range(self.size)]
        packing, at = [], 0
        for pieces in send:
            packing += [(view, sources[p.at].part(p.box)) for p, view in _views(pieces, out, at)]
            at += _bytes(pieces)
        unpacking = [
            (targets[p.at].part(p.box), view)
            for pieces, start in zip(bucket.recv, starts, strict=True)
            for p, view in _views(pieces, into, start)
        ]
        wide = (block, block * self.size) if block else (sum(sent), sum(received))
        return _Exchange(Copies(packing), Copies(unpacking), out[: wide[0]], into[: wide[1]], sent, received, block)

    def _order_sums(self) -> None:
        """Where in the sums of all packed pieces lie those for each peer, and where the received ones belong."""
        where: list[list[int]] = [[] for _ in range(self.size)]
        belongs: list[list[int]] = [[] for _ in range(self.size)]
        packed = unpacked = 0
        for bucket, block in zip(self.table.buckets, self.blocks, strict=True):
            for peer, pieces in enumerate(bucket.send):
                where[peer] += range(packed, packed + len(pieces))
                packed += 0 if block else len(pieces)
            packed += len(bucket.send[0 if self.rank else 1]) if block else 0
            for peer, pieces in enumerate(bucket.recv):
                belongs[peer] += range(unpacked, unpacked + len(pieces))
                unpacked += len(pieces)
        self._sums_sent, self._sums_received = [len(w) for w in where], [len(b) for b in belongs]
        flat = [i for peer in where for i in peer]
        back = [i for peer in belongs for i in peer]
        self._sum_source = torch.tensor(flat, dtype=torch.int64, device=self.device)
        self._sum_order = torch.tensor(back, dtype=torch.int64, device=self.device).argsort()


def _views(pieces: Sequence[Piece], buffer: Tensor, start: int) -> list[tuple[Piece, Tensor]]:
    """Where each piece lies in a packed buffer, from byte `start` on."""
    found = []
    for p in pieces:
        found.append((p, buffer[start : start + p.nbytes].view(p.dtype).view(p.box.size)))
        start += _padded(p.nbytes)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes(pieces: Sequence[Piece]) -> int:
    return sum(_padded(p.nbytes) for p in pieces)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit (nan and -0 included)."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
