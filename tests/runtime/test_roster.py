"""Ranks are numbered by address and local rank, whoever comes first, and hosts keep their seats."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from spmd_rl.config import ConfigError
from spmd_rl.config.load import compose
from spmd_rl.ranked import plan_of
from spmd_rl.runtime import roster
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment
from spmd_rl.runtime.joining import joined
from spmd_rl.runtime.roster import Card, number, save_roster
from tests.world import Worlds

A, B, C, D = "10.0.0.9", "10.0.0.10", "10.0.1.2", "10.0.0.11"


def cards(*hosts: str, ranks: int = 2) -> list[Card]:
    """The launcher's order: host after host, as they came."""
    return [Card(host, str(node), local) for node, host in enumerate(hosts) for local in range(ranks)]


def by_place(hosts: list[Card], seats: tuple[str, ...] = ()) -> dict[tuple[str, int], int]:
    return {(c.address, c.local_rank): r for c, r in zip(hosts, number(hosts, seats).ranks, strict=True)}


def test_numeric_order_whoever_came_first() -> None:
    expected = {(A, 0): 0, (A, 1): 1, (B, 0): 2, (B, 1): 3, (C, 0): 4, (C, 1): 5}
    assert by_place(cards(A, B, C)) == by_place(cards(C, B, A)) == by_place(cards(B, C, A)) == expected
    assert number(cards(C, A)).seats == (A, C)
    assert number(cards(C, A)).nodes == ((A, 2), (C, 2))
    shuffled = cards(B, A, C)
    random.Random(0).shuffle(shuffled)  # Slurm's cyclic distribution: a host's ranks are not consecutive
    assert by_place(shuffled) == expected


def test_a_host_that_is_back_sits_where_it_sat() -> None:
    assert number(cards(B, A), seats=(B, A)).ranks == (0, 1, 2, 3)
    assert number(cards(A, B), seats=(B, A)).ranks == (2, 3, 0, 1)


def test_a_new_host_takes_the_vacancy() -> None:
    found = number(cards(D, C, A), seats=(A, B, C))
    assert found.ranks == (2, 3, 4, 5, 0, 1)
    assert found.seats == (A, D, C)
    more = number(cards(D, C, "10.0.0.1", B, A), seats=(A, B, C))
    assert more.seats == (A, B, C, "10.0.0.1", D)


def test_a_seat_is_kept_for_a_host_that_is_missing() -> None:
    shrunk = number(cards(C, B), seats=(A, B, C))
    assert shrunk.ranks == (2, 3, 0, 1)
    assert shrunk.seats == (A, B, C)
    assert number(cards(C, B, A), shrunk.seats).ranks == (4, 5, 2, 3, 0, 1)
    lent = number(cards(C, D), shrunk.seats)
    assert lent.seats == (D, B, C)


def test_several_nodes_of_one_address_and_uneven_hosts() -> None:
    assert number(cards(A, A)).seats == (A, f"{A}#1")
    assert number(cards(A, A)).ranks == (0, 1, 2, 3)
    uneven = [Card(B, "0", 0), Card(A, "1", 0), Card(A, "1", 1)]
    assert number(uneven).ranks == (2, 0, 1)
    assert number(uneven).nodes == ((A, 2), (B, 1))


def meet_as(addresses: list[str], folder: str, *overrides: str, trains: bool = True) -> tuple[int, list[int], str, str]:
    """This rank of the world meets the others as if on a host of its own."""
    here = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    rank, address_of = int(here["RANK"]), roster.host_address
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    roster.host_address = lambda towards: addresses[rank]  # type: ignore[assignment]
    try:
        config = compose(["experiment=tiny", f"trainer.output_dir={folder}", *overrides])
        with joined(config, read_environment(), trains) as env:
            nodes = [node.address for node in plan_of(config, env).cluster.nodes]
            return env.rank, list(env.on_host), os.environ["RANK"], " ".join(nodes)
    finally:
        roster.host_address = address_of
        os.environ.update(here)


def test_ranks_that_meet(worlds: Worlds, tmp_path: Path) -> None:
    def meet(addresses: list[str], *overrides: str, trains: bool = True) -> list[int]:
        found = worlds[3].run(meet_as, addresses, str(tmp_path), *overrides)
        assert [(str(r), [r]) for r, *_ in found] == [(said, on_host) for _, on_host, said, _ in found]
        assert len({nodes for *_, nodes in found}) == 1
        return [rank for rank, *_ in found]

    assert meet([B, C, A]) == [1, 2, 0]
    assert json.loads((tmp_path / "roster.json").read_text()) == {"start": 1, "seats": [A, B, C]}
    assert meet([A, D, C]) == [0, 1, 2]
    assert meet([C, A, D]) == [2, 0, 1]
    assert meet([B, C, A]) == [1, 2, 0]
    assert json.loads((tmp_path / "roster.json").read_text()) == {"start": 4, "seats": [A, B, C]}
    assert meet([D, A, "10.0.0.1"], "trainer.resume=never") == [2, 1, 0]


def come_late(folder: str) -> str:
    """Only rank 0 comes."""
    if os.environ["RANK"] != "0":
        return ""
    with pytest.raises(ConfigError) as error:
        meet_as([A] * 2, folder, "trainer.timeout_s=1")
    return str(error.value)


def test_a_rank_that_does_not_come(worlds: Worlds, tmp_path: Path) -> None:
    said, _ = worlds[2].run(come_late, str(tmp_path))
    assert said.startswith("the 2 ranks do not meet at 127.0.0.1:")
    assert "1/2 clients joined; see the ranks' logs, or run spmd-rl doctor" in said


def env_of(rank: int) -> LaunchEnvironment:
    return LaunchEnvironment(rank, rank, 3, 3, launched=True)


def test_a_store_that_has_seen_an_earlier_start() -> None:
    """A launcher's store holds the hellos of ranks that are gone, of a start that perhaps never came about."""
    store = HashStore()
    for rank in range(3):
        store.set(f"hello/{rank}", f"gone {rank}")
    for _ in range(2):
        with ThreadPoolExecutor(3) as ranks:
            found = list(ranks.map(lambda rank: roster._this_start(store, env_of(rank), 20.0), range(3)))
        assert found[0].add("count", 1) == 1
        assert found[1].add("count", 1) == 2
        assert found[2].add("count", 1) == 3
    with pytest.raises(ConfigError, match="ranks 1, 2 of 3 did not come within"):
        roster._this_start(store, env_of(0), 0.5)
    with pytest.raises(ConfigError, match="rank 0 did not come within"):
        roster._this_start(store, env_of(1), 0.5)


def test_a_folder_that_cannot_be_written_to_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer.output_dir=.*/file/run cannot be written to \(Not a directory: "):
        save_roster(tmp_path / "file" / "run", ["node0"], 1)
