"""What the ranks of a test's world do with process groups and batches."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.ranked import plan_of
from spmd_rl.roles.model import merge_over, sum_over
from spmd_rl.runtime import exchange as exchanges
from spmd_rl.runtime import messages, peer_memory
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.bridge import Edge
from spmd_rl.runtime.environment import read_environment
from spmd_rl.runtime.exchange import exchange, gather, with_columns
from spmd_rl.runtime.messages import Outgoing
from spmd_rl.runtime.remote import Remote
from spmd_rl.topology.edges import ExchangeEdge
from spmd_rl.topology.layout import Layout, RoleLayout


@contextmanager
def runtime(*overrides: str) -> Iterator[Runtime]:
    config = compose(["experiment=tiny", *overrides])
    try:
        yield start(config, plan_of(config, read_environment()))
    finally:
        stop()


def some_batch(rng: random.Random, rows: int) -> Batch:
    """Columns of every kind; row_ids are neither consecutive nor in order."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    ids = rng.sample(range(1000), rows)
    batch = Batch(TensorDict({}, batch_size=[rows]))
    batch["row_id"] = torch.tensor(ids, dtype=torch.int64)
    batch["finished"] = torch.rand(rows, generator=generator) < 0.5
    batch["score"] = torch.randn(rows, generator=generator)
    batch["matrix"] = torch.randn(rows, 2, 3, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([rng.choice([0, 0, 1, 2, 7]) for _ in range(rows)], dtype=torch.int64)
    batch["tokens"] = Ragged(torch.randint(0, 1 << 40, (int(lengths.sum()),), generator=generator), lengths)
    longer = lengths + 1
    batch["hidden"] = Ragged(torch.randn(int(longer.sum()), 2, generator=generator).bfloat16(), longer)
    batch["text"] = [rng.choice(["", "é", "long " * 50, "𝄞"]) for _ in range(rows)]
    batch["extra"] = [{"id": i, "none": None, "deep": [1.5, (2,)]} for i in ids]
    return batch


def differences(got: Batch, expected: Batch) -> list[str]:
    """Names of the columns that are not the same to the last bit, type and order."""
    names = {*got.rows.keys(), *got.ragged, *got.objects} ^ {*expected.rows.keys(), *expected.ragged, *expected.objects}
    wrong = sorted(names) + ([] if len(got) == len(expected) else ["number of rows"])
    for name, column in expected.rows.items():
        wrong += [] if same(got.rows[name], column) else [name]
    for name, ragged in expected.ragged.items():
        mine = got.ragged[name]
        wrong += [] if same(mine.values, ragged.values) and same(mine.lengths, ragged.lengths) else [name]
    return wrong + [name for name, column in expected.objects.items() if got.objects[name] != column]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def foldings(size: int) -> list[tuple[int, int]]:
    """(dp, sp) of every layout of so many ranks."""
    return [(size // sp, sp) for sp in range(1, size + 1) if size % sp == 0]


def folded(role: str, pool: str, fold: tuple[int, int]) -> RoleLayout:
    layout = Layout(("dp", "sp"), fold)
    return RoleLayout(role, pool, "fsdp", layout, layout)


@contextmanager
def counted() -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Bytes that this rank really sends to each member over any group, and that it reads of each process's memory."""
    sent, read = Counter[int](), Counter[int]()
    isend, readv = dist.isend, peer_memory.read

    def send(tensor: Any, group: Any, group_dst: int) -> Any:
        sent[group_dst] += tensor.numel() * tensor.element_size()
        return isend(tensor, group=group, group_dst=group_dst)

    def reads(pid: int, sources: Any, targets: Any, sizes: Any) -> None:
        read[pid] += int(sizes.sum())
        readv(pid, sources, targets, sizes)

    dist.isend, peer_memory.read = send, reads
    try:
        yield sent, read
    finally:
        dist.isend, peer_memory.read = isend, readv


@contextmanager
def blind(ranks: Sequence[int]) -> Iterator[None]:
    """These ranks may read nobody's memory."""
    readv = peer_memory._readv
    if read_environment().rank in ranks:
        peer_memory._readv = lambda *_: -1
    try:
        yield
    finally:
        peer_memory._readv = readv


def move_batches(seeds: list[int], blinded: list[int], *overrides: str) -> list[str]:
    """Exchange random batches that every rank knows whole between all layouts of two pools; what came out wrong.

    Values, types and order must be those of the whole batch, and the bytes over each link the plan's: read from memory,
    but sent where one of the two is blinded.
    """
    wrong = []
    with runtime(*overrides) as here, blind(blinded):
        edge = here.edge("actor", "ref")
        for seed in seeds:
            for there, back in ((0, 1), (1, 0)):
                pools = edge.plan.pools[there], edge.plan.pools[back]
                for one in foldings(pools[0].size):
                    for other in foldings(pools[1].size):
                        layouts = folded("one", pools[0].name, one), folded("other", pools[1].name, other)
                        planned = Edge(ExchangeEdge("rows", *layouts, pools), edge.bridge, edge.inside)
                        case = f"seed {seed}, {pools[0].name} {one} to {pools[1].name} {other}"
                        wrong += [f"{case}: {what}" for what in move_one(random.Random(seed), planned, here, blinded)]
    return wrong


def move_one(rng: random.Random, edge: Edge, here: Runtime, blinded: list[int]) -> list[str]:
    """One exchange from random holders to random wants; what is wrong with it."""
    source, target = edge.plan.source, edge.plan.target
    whole = some_batch(rng, rng.choice([0, 1, 2, 5, 40]))
    if rng.random() < 0.5:
        whole.objects.clear()
    holders = [edge.plan.pools[0].ranks[int(r)] for r in source.collectors]
    holders = rng.sample(holders, rng.randint(1, len(holders)))
    owner = {int(row): rng.choice(holders) for row in whole["row_id"].tolist()}
    places = [rng.sample(range(len(whole)), rng.randint(0, len(whole))) for _ in range(target.dp_size)]
    parts = [[int(whole["row_id"][i]) for i in some] for some in places]
    me = here.env.rank
    batch: Batch | Remote = Remote(("one",))
    if me in edge.plan.pools[0]:
        batch = whole.select([i for i, row in enumerate(whole["row_id"].tolist()) if owner[row] == me])
    with counted() as (sent, read):
        got = exchange(batch, parts, edge)
    wrong = []
    if me in edge.plan.pools[1]:
        part = target.dp_rank(edge.plan.pools[1].pool_rank(me))
        wrong = differences(got, whole.select(places[part])) if isinstance(got, Batch) else ["nothing came"]
    elif not isinstance(got, Remote):
        wrong = ["rows came to a rank outside"]
    if not whole.objects:  # how many bytes the objects of a message take is pickle's affair
        links = edge.plan.route(parts).links(owner, row_bytes(whole))
        apart = {link: count for link, count in links.items() if set(link) & set(blinded)}
        handing_on = edge.plan.crosses and me not in edge.plan.pools[0]
        members = edge.inside.members if handing_on else edge.bridge.members
        over = {(me, members[place]): count for place, count in sent.items() if count}
        pids = {pid: b.members[place] for b in (edge.bridge, edge.inside) for place, pid in b.near.items()}
        into = {(pids[pid], me): count for pid, count in read.items()}
        planned = {link: count for link, count in apart.items() if link[0] == me}
        wrong += [] if over == planned else [f"sent {over}, planned {planned}"]
        planned = {link: count for link, count in links.items() if link[1] == me and link not in apart}
        wrong += [] if into == planned else [f"read {into}, planned {planned}"]
    return wrong


def row_bytes(batch: Batch) -> dict[int, int]:
    """The bytes of each row's tensors, one by one."""
    found = {}
    for i, row in enumerate(batch["row_id"].tolist()):
        one = batch.select([i])
        tensors = [*one.rows.values(), *(ragged.values for ragged in one.ragged.values())]
        found[row] = sum(t.numel() * t.element_size() for t in tensors)
    return found


def gather_batches(seeds: list[int], *overrides: str) -> list[str]:
    """Gather random batches over the meeting of two pools; what came out wrong."""
    wrong = []
    with runtime(*overrides) as here:
        bridge = here.bridge("actor", "ref")
        for seed in seeds:
            rng = random.Random(seed)
            whole = some_batch(rng, rng.choice([0, 1, 2, 5, 40]))
            home = here.plan.pools["global"].ranks
            owner = [rng.choice(home) for _ in range(len(whole))]
            mine: Batch | Remote = Remote(("ref",))
            if here.env.rank in home:
                mine = whole.select([i for i, r in enumerate(owner) if r == here.env.rank])
            columns = ["row_id", "score", "tokens", "text"]
            sorted_places = sorted(range(len(whole)), key=lambda i: int(whole["row_id"][i]))
            expected = with_columns(whole, columns).select(sorted_places)
            wrong += [f"seed {seed}, gather: {n}" for n in differences(gather(mine, columns[1:], bridge), expected)]
    return wrong


def move_in_pieces(limit: int, blinded: list[int]) -> list[str]:
    """One exchange of long rows, in many pieces or runs of at most `limit` bytes (but for a single row of a piece)."""
    with runtime() as here, blind(blinded):
        whole = some_batch(random.Random(5), 30)
        whole["long"] = Ragged(torch.arange(30 * 50), torch.full((30,), 50))
        size, me = here.pool.size, here.pool_rank
        mine = whole.select([i for i in range(30) if i % size == me])
        message = Outgoing(mine, range(1, len(mine)), limit)
        sizes = [p.end - p.start for p in message.form.pieces()]
        parts = [whole["row_id"][torch.randperm(30, generator=torch.Generator().manual_seed(d))] for d in range(size)]
        edge = here.edge("actor", "actor")
        before = exchanges.LIMIT, exchanges.LEAST, peer_memory.RUN, peer_memory.VECTORS, messages.COARSE
        exchanges.LIMIT = exchanges.LEAST = peer_memory.RUN = limit
        peer_memory.VECTORS, messages.COARSE = 3, 8
        try:
            got = exchange(mine, [p.tolist() for p in parts], edge)
        finally:
            exchanges.LIMIT, exchanges.LEAST, peer_memory.RUN, peer_memory.VECTORS, messages.COARSE = before
        place = {int(r): i for i, r in enumerate(whole["row_id"].tolist())}
        wrong = differences(got, whole.select([place[int(r)] for r in parts[me]])) if isinstance(got, Batch) else ["?"]
        if max(sizes) > max(limit, 50 * 8) or len(sizes) < len(mine):
            wrong.append(f"pieces of {sizes} bytes")
        return wrong


def talk(seeds: list[int]) -> list[str]:
    """Messages of all lengths around a frame's, over all meetings of a bridge; which did not arrive as they were."""
    wrong = []
    with runtime() as here:
        job, n = here.job, here.job.group.size()
        lengths = [0, 1, job.frame - 9, job.frame - 8, job.frame - 7, 3 * job.frame]
        for seed in seeds:
            rng = random.Random(seed)
            said = [
                [torch.full((rng.choice(lengths),), rng.randrange(256), dtype=torch.uint8) for _ in range(n)]
                for _ in range(n)
            ]
            got = job.all_to_all({peer: data for peer, data in enumerate(said[job.me]) if peer != job.me})
            to_me = {peer: said[peer][job.me] for peer in range(n) if peer != job.me and len(said[peer][job.me])}
            if got.keys() != to_me.keys() or not all(torch.equal(got[peer], data) for peer, data in to_me.items()):
                wrong.append(f"seed {seed}: all_to_all")
            if not all(map(torch.equal, job.all_gather(said[job.me][0]), [row[0] for row in said])):
                wrong.append(f"seed {seed}: all_gather")
            texts = [str(row[0].tolist()) for row in said]
            speakers = rng.sample(range(n), rng.randint(1, n))
            if job.hear(texts[job.me], speakers) != [texts[speaker] for speaker in speakers]:
                wrong.append(f"seed {seed}: hear")
    return wrong


def leave_nothing(times: int) -> dict[str, Any]:
    """What this process holds more of after twice so many exchanges than after so many, and the bytes it read."""
    with runtime() as here:
        edge, mine = here.edge("actor", "actor"), some_batch(random.Random(here.pool_rank), 4)
        mine["row_id"] = torch.arange(4) + 4 * here.pool_rank
        mine["long"] = Ragged(torch.zeros(2**20, dtype=torch.int64), torch.full((4,), 2**18))
        parts = [list(range(4 * here.pool.size))] * here.pool.size

        def held() -> dict[str, Any]:
            maps = Path("/proc/self/maps").read_text().splitlines()
            return {
                "fds": set(os.listdir("/proc/self/fd")),
                "shared": {line.split()[-1] for line in maps if "/dev/shm/" in line or "memfd:" in line},
                "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            }

        for _ in range(times):  # until the allocator has what it keeps
            exchange(mine, parts, edge)
        before = held()
        with counted() as (_, read):
            for _ in range(times):
                exchange(mine, parts, edge)
        return {name: now - before[name] for name, now in held().items()} | {"read": read.total()}


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def move_what_nobody_or_two_hold() -> list[str]:
    with runtime() as here:
        batch = some_batch(random.Random(0), 3)
        edge = here.edge("actor", "actor")
        lost = _said(lambda: exchange(batch.select([]), [[5]] * here.pool.size, edge))
        twice = _said(lambda: gather(batch, ["score"], edge.bridge))
        return [lost, twice]


def members(*overrides: str) -> dict[str, Any]:
    """The pool ranks of this rank's groups along each axis of the actor's layout, and what FSDP's mesh is."""
    with runtime(*overrides) as here:
        layout, groups = here.layout("actor"), here.groups
        ranks = {
            axis: dist.get_process_group_ranks(groups.along(fold, axis))
            for fold in (layout.mesh, layout.batch)
            for axis in fold.names
        }
        expected = {
            axis: list(fold.group_of(here.pool_rank, axis))
            for fold in (layout.mesh, layout.batch)
            for axis in fold.names
        }
        mesh = groups.mesh(layout.mesh)
        sums = {
            axis: sum_over(torch.tensor([here.pool_rank]), groups.along(layout.batch, axis)).item()
            for axis in ("dp", "sp")
        }
        assert groups.mesh(layout.mesh) is mesh
        return {
            "ranks": ranks,
            "expected": expected,
            "mesh": (mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate()),
            "sums": sums,
            "control": (here.control.size(), here.control.name()),
        }


def add_up() -> tuple[list[int], dict[str, Any]]:
    """A sum whose order shows in its last bits, as raw bits; and merged metrics."""
    from spmd_rl.observe.metrics import finish, largest, mean, total

    with runtime() as here:
        r = here.pool_rank
        part = torch.tensor([1e8, 1.0, -1e8, 3.14159])[r % 4] * (1 + r / 7)
        bits = sum_over(part.reshape(1), here.everyone).view(torch.int32).tolist()
        merged = merge_over({"a": mean(r * 2.0, 2.0 * (r > 0)), "b": total(r), "c": largest(-r)}, here.everyone)
        return bits, finish(merged)
