"""A batch moves from one layout to another, in a pool or between two: each row goes once to each rank that wants it.

Tensors travel as their bytes, never pickled. CPU tensors: a rank of the same host reads them where they lie
(`peer_memory.py`), to others they go over gloo. CUDA tensors go over NCCL. Python objects (texts, extra columns) are
one byte tensor a message. Every rank of both pools makes these calls in the same order; a rank may hold or want no row,
and one that is outside of the batch's pool passes a `Remote`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.distributed import ProcessGroup, Work

from spmd_rl.data.batch import Batch
from spmd_rl.runtime.arrival import Arrival, places
from spmd_rl.runtime.bridge import NOTHING, Bridge, Edge, wait
from spmd_rl.runtime.messages import Form, Message, Outgoing, Piece, read, whole
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
        part = {rank: route.want[rank] for rank in (job_rank, *route.peers[job_rank])}
        arrived = send_rows(arrived, part, edge.inside, False, device)
        assert arrived is not None, "this rank has the columns"
    return arrived


def send_rows(
    batch: Batch | Remote,
    wanted: Mapping[int, Sequence[int]],
    bridge: Bridge,
    crosses: bool,
    device: torch.device | None = None,
) -> Batch | None:
    """Give job rank r the rows `wanted[r]`, in that order, from whoever holds them. None where nothing came.

    When the rows cross to another pool, each rank there is told the columns at least, even if no row is for it.
    """
    near = {*bridge.near, bridge.me}
    outgoing = _outgoing(batch, wanted, bridge, crosses)
    said = {peer: rows.message(peer in near) for peer, rows in outgoing.items()}
    own, mine = outgoing.pop(bridge.me, None), said.pop(bridge.me, None)
    headers = bridge.all_to_all({peer: message.pack() for peer, message in said.items()})
    told = {peer: Message.unpack(header) for peer, header in headers.items()}
    here = told | ({bridge.me: mine} if mine is not None else {})
    want = wanted.get(bridge.members[bridge.me], ())
    arrival = Arrival(want, dict(sorted(here.items())), device or torch.device("cuda")) if here else None
    if arrival is not None and own is not None:
        arrival.keep(bridge.me, own)
    read = _read_near(arrival, told, bridge)
    _transfer(outgoing, arrival, told, bridge)
    wait([*read, *bridge.post([], [(NOTHING.clone(), peer) for peer in _near(said, bridge)])])
    return arrival.batch() if arrival is not None else None


def _near(messages: Mapping[int, Message], bridge: Bridge) -> list[int]:
    """Peers that a message reaches by their reading of memory."""
    return [peer for peer, it in sorted(messages.items()) if peer in bridge.near and it.form.sizes().get("cpu")]


def _read_near(arrival: Arrival | None, told: Mapping[int, Message], bridge: Bridge) -> list[Work]:
    """Read what peers on this host hold, and tell each of them, with an empty message, that it has been read."""
    works = []
    for peer in _near(told, bridge):
        assert arrival is not None, "this rank was told of rows"
        try:
            arrival.read(peer, bridge.near[peer])
        except OSError as error:
            raise RuntimeError(f"exchange: rows of rank {bridge.members[peer]} could not be read: {error}") from error
        works += bridge.post([(NOTHING, peer)], [])
    return works


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


def _transfer(
    outgoing: Mapping[int, Outgoing], arrival: Arrival | None, told: Mapping[int, Message], bridge: Bridge
) -> None:
    """Send and receive all pieces; the k-th piece between two ranks goes in round k at both of them."""
    sends = {peer: _pieces(rows.form, peer, bridge) for peer, rows in sorted(outgoing.items())}
    receives = {peer: _pieces(message.form, peer, bridge) for peer, message in sorted(told.items())}
    rounds = max((len(pieces) for pieces in [*sends.values(), *receives.values()]), default=0)
    under_way: deque[Callable[[], None]] = deque()
    for number in range(rounds):
        for kind in ("cpu", "cuda"):
            under_way.append(_round(_nth(sends, number, kind), _nth(receives, number, kind), outgoing, arrival, bridge))
        while len(under_way) > 2 * AHEAD:
            under_way.popleft()()
    while under_way:
        under_way.popleft()()


def _round(
    sends: list[tuple[int, Piece]],
    receives: list[tuple[int, Piece]],
    outgoing: Mapping[int, Outgoing],
    arrival: Arrival | None,
    bridge: Bridge,
) -> Callable[[], None]:
    """Start a round; call what is returned to end it."""
    out = [(outgoing[peer].bytes_of(piece), peer) for peer, piece in sends]  # must live until it is sent
    into = [] if arrival is None else [(arrival.place(peer, piece), peer) for peer, piece in receives]
    works = bridge.post(out, into)

    def end() -> None:
        wait(works)
        out.clear()
        for (peer, piece), (data, _) in zip(receives, into, strict=True):
            assert arrival is not None, "this rank was told of rows"
            arrival.put(peer, piece, data)

    return end


def _pieces(form: Form, peer: int, bridge: Bridge) -> list[Piece]:
    """Those that are sent: CPU columns are read by peers on this host."""
    return [piece for piece in form.pieces() if piece.device == "cuda" or peer not in bridge.near]


def _nth(pieces: Mapping[int, list[Piece]], number: int, device: str) -> list[tuple[int, Piece]]:
    return [(peer, p[number]) for peer, p in pieces.items() if number < len(p) and p[number].device == device]


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
    return batch.select(np.argsort(places(row_ids, {0: here})[0]).tolist())
