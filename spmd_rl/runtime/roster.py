"""Which rank is which: numbered by (node address as a number, local rank), and the same again after a restart.

Launchers number hosts in their own ways (torchrun's c10d by the text of their names, others by who comes first). So
the ranks of a job first meet on the launcher's numbers, and get their own from the cards that all of them show. The
roster, <output_dir>/roster.json, lists the hosts' seats: a host that is back sits where it sat, a new one takes the
seat of one that is missing.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.folders import writing
from spmd_rl.runtime.environment import LaunchEnvironment, meeting_point
from spmd_rl.runtime.process_groups import job_store
from spmd_rl.topology.cluster import Node, address_key

SEE = "; see the ranks' logs, or run spmd-rl doctor through the same launcher"


@dataclass(frozen=True)
class Card:
    """What a rank shows of itself: its host, which of the launcher's nodes there, its place on it."""

    address: str
    node: str
    local_rank: int


@dataclass(frozen=True)
class Roster:
    """The job's ranks: `ranks[r]` is the rank of who the launcher calls r; `nodes` in rank order; `seats` of hosts."""

    ranks: tuple[int, ...]
    nodes: tuple[tuple[str, int], ...]
    """(address, ranks there)."""
    seats: tuple[str, ...]
    """Who sits where; more than nodes when hosts are missing."""


def number(cards: Sequence[Card], seats: Sequence[str] = ()) -> Roster:
    """The roster of the ranks that showed `cards`, in the launcher's order; `seats` of the job's earlier start."""
    hosts = _hosts(cards)
    taken = [seat if seat in hosts else None for seat in seats]
    for host in [host for host in hosts if host not in seats]:  # in numeric order into the first vacancies
        vacancy = taken.index(None) if None in taken else len(taken)
        taken[vacancy : vacancy + 1] = [host]
    present = [host for host in taken if host is not None]
    order = [at for host in present for at in sorted(hosts[host], key=lambda at: (cards[at].local_rank, at))]
    ranks = {at: rank for rank, at in enumerate(order)}
    nodes = tuple((host.partition("#")[0], len(hosts[host])) for host in present)
    remembered = [host or seat for host, seat in zip(taken, [*seats, *[""] * len(taken)], strict=False)]
    return Roster(tuple(ranks[at] for at in range(len(cards))), nodes, tuple(remembered))


def _hosts(cards: Sequence[Card]) -> dict[str, list[int]]:
    """Places in `cards` by host, hosts in numeric order. Several nodes of one address are `address`, `address#1` …."""
    nodes: dict[tuple[str, str], list[int]] = {}
    for at, card in enumerate(cards):
        nodes.setdefault((card.address, card.node), []).append(at)
    found: dict[str, list[int]] = {}
    for address, node in sorted(nodes, key=lambda key: (address_key(key[0]), address_key(key[1]))):
        nth = sum(host.partition("#")[0] == address for host in found)
        found[address if nth == 0 else f"{address}#{nth}"] = nodes[address, node]
    return found


def meet(config: Config, env: LaunchEnvironment, keeps_roster: bool) -> LaunchEnvironment:
    """All ranks of the job meet; each learns its rank, its hosts and the job's store.

    `keeps_roster`: hosts keep their seats from start to start (training). A collective of all ranks, before there are
    process groups. Raises ConfigError that names the ranks that did not come.
    """
    folder = Path(config.trainer.output_dir)
    try:
        store = _this_start(job_store(config.trainer.timeout_s), env, config.trainer.timeout_s)
    except dist.DistError as error:
        place, why = ":".join(map(str, meeting_point())), str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"the {env.world_size} ranks do not meet at {place}: {why}{SEE}") from error
    card = Card(host_address(meeting_point()), env.node, env.local_rank)
    reads = keeps_roster and env.local_rank == 0 and config.trainer.resume != "never"
    shown = {"card": asdict(card), "tag": env.tag, "saved": read_roster(folder) if reads else None}
    store.set(f"card/{env.rank}", json.dumps(shown))
    if env.rank == 0:
        store.set("roster", json.dumps(_lead(store, env, config.trainer.timeout_s)))
    agreed = json.loads(store.get("roster"))
    roster = Roster(tuple(agreed["ranks"]), tuple(map(tuple, agreed["nodes"])), tuple(agreed["seats"]))
    rank = roster.ranks[env.rank]
    if keeps_roster and rank == 0:
        save_roster(folder, roster.seats, agreed["start"])
    return env.renumbered(
        rank=rank,
        nodes=tuple(Node(address, ranks, agreed["tags"][address]) for address, ranks in roster.nodes),
        store=store,
        attempt=agreed["attempt"],
        store_rank=None if env.launcher_holds_store else roster.ranks[0],
    )


def _lead(store: Store, env: LaunchEnvironment, timeout_s: float) -> dict[str, Any]:
    """Done by one rank: read all cards, number them after the newest roster that any host has."""
    cards = [f"card/{rank}" for rank in range(env.world_size)]
    store.wait(cards, timedelta(seconds=timeout_s))
    shown = [json.loads(text) for text in store.multi_get(cards)]
    saved: list[dict[str, Any]] = [s["saved"] for s in shown if s["saved"]]
    newest: dict[str, Any] = max(saved, key=lambda s: int(s["start"]), default={"start": 0, "seats": []})
    roster, start = number([Card(**s["card"]) for s in shown], newest["seats"]), newest["start"] + 1
    tags = {s["card"]["address"]: s["tag"] for s in shown}
    return {**asdict(roster), "tags": tags, "start": start, "attempt": f"{start:03d}-{uuid.uuid4().hex[:6]}"}


def _this_start(store: Store, env: LaunchEnvironment, timeout_s: float) -> Store:
    """A part of the store that only the ranks of this start of the job write to: a launcher's store outlives them.

    Nothing that the launcher says names a start (each of its agents counts its own restarts), so rank 0 thinks of a
    name, and tells it to who answers: whoever said hello in an earlier start does not.
    """
    me, ends = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"hello/{env.rank}", me)
    if env.rank == 0:
        start = PrefixStore(f"start/{me}", store)
        start.set("here/0", "")
        _welcome(store, start, me, env.world_size, ends, timeout_s)
        return start
    try:
        store.wait([f"welcome/{me}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ConfigError(f"rank 0 did not come within trainer.timeout_s={timeout_s:g} s{SEE}") from error
    start = PrefixStore(f"start/{store.get(f'welcome/{me}').decode()}", store)
    start.set(f"here/{env.rank}", "")
    return start


def _welcome(store: Store, start: Store, name: str, size: int, ends: float, timeout_s: float) -> None:
    """Tell the start's name to who says hello, until all have answered."""
    told: dict[int, bytes] = {}
    missing = [rank for rank in range(size) if rank > 0]
    while missing := [rank for rank in missing if not start.check([f"here/{rank}"])]:
        for rank in missing:
            if store.check([f"hello/{rank}"]) and told.get(rank) != (who := store.get(f"hello/{rank}")):
                store.set(f"welcome/{who.decode()}", name)
                told[rank] = who
        if time.monotonic() > ends:
            shown = ", ".join(map(str, missing[:16]))
            raise ConfigError(f"ranks {shown} of {size} did not come within trainer.timeout_s={timeout_s:g} s{SEE}")
        time.sleep(0.01)


def host_address(towards: tuple[str, int]) -> str:
    """This host's address on the way to the meeting point; of a job on one host, 127.0.0.1."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing, but picks the route
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    return "127.0.0.1"


def read_roster(folder: Path) -> dict[str, Any] | None:
    """roster.json; None when there is none."""
    file = folder / "roster.json"
    if not file.is_file():
        return None
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return saved


def save_roster(folder: Path, seats: Sequence[str], start: int) -> None:
    """Replace roster.json at once. It is the first that a run writes: ConfigError when it cannot."""
    fresh = folder / f".roster.json.{os.getpid()}"
    with writing("trainer.output_dir", folder):
        fresh.write_text(json.dumps({"start": start, "seats": list(seats)}, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, folder / "roster.json")
