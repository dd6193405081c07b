"""A batch moves from one layout to another, in a pool or between two: each row goes once to each rank that wants it.

Tensors travel as their bytes, never pickled, over gloo (CPU) or NCCL (CUDA), wherever they lie; Python objects (texts,
extra columns) as one byte tensor a message. Every rank of both pools makes these calls in the same order; a rank may
hold or want no row, and one that is outside of the batch's pool passes a `Remote`.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from spmd_rl.data.batch import Batch
from spmd_rl.runtime.bridge import Bridge, Edge
from spmd_rl.runtime.messages import Form, Incoming, Outgoing, Piece, read, whole
from spmd_rl.runtime.remote import Remote

LIMIT = 64 * 2**20
"""Bytes under way from one rank at a time, over all of its messages: what a sender copies together."""
LEAST = 2**20
"""Bytes of a piece, however many messages there are."""
AHEAD = 2
"""Rounds of pieces that are under way at a time."""


def exchange(
    batch: Batch | Remote, parts: Sequence[Sequence[int]], edge: Edge, device: torch.device | None = None
) -> Batch | Remote:
    """Give the ranks of part d of the target's layout the rows `parts[d]`, in that order; `Remote` on other ranks.

    `batch` holds this rank's rows with their `row_id`; a row lives on exactly one rank before, on any number after.
    All ranks pass the same `parts` (a pure function of plan and row lengths). `device`: where CUDA columns arrive.

    Raises: RuntimeError naming the rows that no rank held.
    """
    route, bridge = edge.plan.route(parts), edge.bridge
    job_rank = bridge.members[bridge.me]
    arrived = send_rows(batch, route.arrive, bridge, edge.plan.crosses, device)
    if job_rank not in route.want:
        return Remote((edge.plan.target.role,))
    assert arrived is not None, "every rank of the target hears of the columns at least"
    if any(route.peers.values()):
        wanted = {rank: [row for peer in peers for row in route.arrive[peer]] for rank, peers in route.peers.items()}
        others = send_rows(arrived, wanted, edge.inside, False, device)
        assert others is not None, "this rank has the columns"
        arrived = Batch.concat([arrived, others])
    return in_order(arrived, route.want[job_rank])


def send_rows(
    batch: Batch | Remote,
    wanted: Mapping[int, Sequence[int]],
    bridge: Bridge,
    crosses: bool,
    device: torch.device | None = None,
) -> Batch | None:
    """Give job rank r the rows `wanted[r]` from whoever holds them; in the senders' order. None where nothing came.

    When the rows cross to another pool, each rank there is told the columns at least, even if no row is for it.
    """
    outgoing = _outgoing(batch, wanted, bridge, crosses)
    mine = outgoing.pop(bridge.me, None)
    headers = {peer: message.form.pack() for peer, message in outgoing.items()}
    sizes = bridge.all_to_all([len(headers.get(peer, ())) for peer in range(len(bridge.members))])
    arriving = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in enumerate(sizes) if size}
    _wait(bridge.post([(h, peer) for peer, h in headers.items()], [(h, peer) for peer, h in arriving.items()]))
    incoming = {
        peer: Incoming(Form.unpack(header), device or torch.device("cuda")) for peer, header in arriving.items()
    }
    _transfer(outgoing, incoming, bridge)
    batches = {peer: message.batch() for peer, message in incoming.items()}
    if mine is not None:
        batches[bridge.me] = mine.batch.select(mine.rows.tolist())
    filled = [batches[peer] for peer in sorted(batches) if len(batches[peer])] or list(batches.values())[:1]
    return Batch.concat(filled) if len(filled) > 1 else next(iter(filled), None)


def _outgoing(
    batch: Batch | Remote, wanted: Mapping[int, Sequence[int]], bridge: Bridge, crosses: bool
) -> dict[int, Outgoing]:
    """This rank's messages by member; what stays here is one of them."""
    if isinstance(batch, Remote):
        return {}
    place = {int(row): i for i, row in enumerate(batch["row_id"].tolist())}
    rows = {bridge.place[rank]: [place[row] for row in want if row in place] for rank, want in wanted.items()}
    told = {bridge.me} if not crosses else _told_by(bridge, wanted)
    rows = {peer: here for peer, here in rows.items() if here or peer in told}
    limit = max(LEAST, LIMIT // max(1, AHEAD * len(rows)))
    return {peer: Outgoing(batch, here, limit) for peer, here in rows.items()}


def _told_by(bridge: Bridge, wanted: Mapping[int, Sequence[int]]) -> set[int]:
    """The members of the other pool that this rank tells the columns; each is told by one rank at least."""
    ours = [place for rank, place in bridge.place.items() if rank not in wanted]
    mine = ours.index(bridge.me)
    return {bridge.place[rank] for i, rank in enumerate(sorted(wanted)) if i % len(ours) == mine}


def _transfer(outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming], bridge: Bridge) -> None:
    """Send and receive all pieces; the k-th piece between two ranks goes in round k at both of them."""
    sends = {peer: message.form.pieces() for peer, message in sorted(outgoing.items())}
    receives = {peer: message.form.pieces() for peer, message in sorted(incoming.items())}
    rounds = max((len(pieces) for pieces in [*sends.values(), *receives.values()]), default=0)
    under_way: deque[tuple[list[Work], list[tuple[Tensor, int]]]] = deque()
    for number in range(rounds):
        for kind in ("cpu", "cuda"):
            out = [(outgoing[peer].bytes_of(p), peer) for peer, p in _nth(sends, number, kind)]
            into = [(incoming[peer].place(p), peer) for peer, p in _nth(receives, number, kind)]
            under_way.append((bridge.post(out, into), out))  # what is sent must live until it is
        while len(under_way) > 2 * AHEAD:
            _wait(under_way.popleft()[0])
    while under_way:
        _wait(under_way.popleft()[0])


def _nth(pieces: Mapping[int, list[Piece]], number: int, device: str) -> list[tuple[int, Piece]]:
    return [(peer, p[number]) for peer, p in pieces.items() if number < len(p) and p[number].device == device]


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def gather(batch: Batch | Remote, columns: Sequence[str], ranks: Bridge | ProcessGroup) -> Batch:
    """All rows of all ranks, with `columns` only, in `row_id` order, on every rank. A row must live on one rank.

    For what everybody has to know (headers, scores): rows that one rank wants go by `exchange`.
    """
    bridge = ranks if isinstance(ranks, Bridge) else Bridge(ranks, tuple(range(ranks.size())))
    data = torch.empty(0, dtype=torch.uint8)
    if not isinstance(batch, Remote):
        data = whole(with_columns(batch, ["row_id", *[c for c in columns if c != "row_id"]]))
    together = Batch.concat([read(part) for part in bridge.all_gather(data) if len(part)])
    return in_order(together, sorted(together["row_id"].tolist()))


def with_columns(batch: Batch, names: Sequence[str]) -> Batch:
    """The same rows with some of the columns."""
    out = Batch.empty_like(len(batch))
    for name in names:
        out[name] = batch[name]
    return out


def in_order(batch: Batch, row_ids: Sequence[int]) -> Batch:
    """The rows of these ids, which are all that there are, in that order."""
    here = batch["row_id"].tolist()
    if here == list(row_ids):
        return batch
    place = {int(r): i for i, r in enumerate(here)}
    lost = [r for r in row_ids if r not in place]
    if lost or len(place) != len(batch):
        raise RuntimeError(
            f"exchange: rows {lost[:8]} were held by no rank, or {len(batch) - len(place)} rows came twice"
        )
    return batch.select([place[r] for r in row_ids])
