"""Do the ranks sum right, and how fast do they send? A small all-reduce, then one message over each link."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import Store

from spmd_rl.doctor.checks import GREEN, RED, YELLOW, Finding
from spmd_rl.doctor.facts import Facts
from spmd_rl.runtime.bootstrap import stop
from spmd_rl.runtime.environment import LaunchEnvironment
from spmd_rl.runtime.process_groups import start_pool

MIB = 2**20
ROUNDS = 3
SLOW = 0.5
"""A link with less than this part of the median of its kind is worth a line."""


def measure(env: LaunchEnvironment, ranks: Sequence[Facts], store: Store, seconds: float) -> list[Finding]:
    """Findings on rank 0, of all ranks together."""
    if env.world_size == 1:
        return []
    gpu = bool(ranks[env.rank].device) and torch.cuda.is_available()
    device = torch.device("cuda", _index(env)) if gpu else torch.device("cpu")
    try:
        if gpu:
            torch.cuda.set_device(device)
        start_pool(store, "doctor", env.rank, env.world_size, device, seconds)
        return [_sum(env, device), *_links(env, ranks, device)]
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        mend = "see the lines on host names and NICs; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME pick an interface"
        return [Finding(RED, "links", f"rank {env.rank}", f"the ranks cannot talk: {why}", mend)]
    finally:
        stop()


def _index(env: LaunchEnvironment) -> int:
    return env.local_rank if torch.cuda.device_count() > 1 else 0


def _sum(env: LaunchEnvironment, device: torch.device) -> Finding:
    """1 + 2 + … + N, and how long a small sum takes."""
    assert dist.group.WORLD is not None
    times = []
    for _ in range(ROUNDS + 1):
        value = torch.full((1,), env.rank + 1.0, dtype=torch.float64, device=device)
        begun = time.perf_counter()
        dist.all_reduce(value, group=dist.group.WORLD)
        total = value.item()
        times.append(time.perf_counter() - begun)
    expected = env.world_size * (env.world_size + 1) / 2
    if total != expected:
        return Finding(RED, "all-reduce", "all ranks", f"the sum of 1 to {env.world_size} came out as {total:g}")
    what = f"right on {env.world_size} ranks, {statistics.median(times[1:]) * 1e3:.2f} ms"
    return Finding(GREEN, "all-reduce", "all ranks", what)


def _links(env: LaunchEnvironment, ranks: Sequence[Facts], device: torch.device) -> list[Finding]:
    """One message after the other over every link of `pairs`; rank 0 learns all rates."""
    size = (256 if device.type == "cuda" else 8) * MIB
    ways = pairs(ranks)
    rates = torch.zeros(len(ways), dtype=torch.float64, device=device)
    payload = torch.ones(size, dtype=torch.uint8, device=device)
    for at, (source, target, _) in enumerate(ways):
        if env.rank in (source, target):
            rates[at] = size / _seconds(env.rank, source, payload, peer=source + target - env.rank) / 1e9
    dist.all_reduce(rates, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    return judge(ways, rates.tolist())


def _seconds(rank: int, source: int, payload: torch.Tensor, peer: int) -> float:
    """The fastest of some rounds, there and a byte back; both ends of the link take part."""
    best, answer = float("inf"), payload[:1].clone()
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        if rank == source:
            dist.send(payload, group_dst=peer, group=dist.group.WORLD)
            dist.recv(answer, group_src=peer, group=dist.group.WORLD)
        else:
            dist.recv(payload, group_src=peer, group=dist.group.WORLD)
            dist.send(answer, group_dst=peer, group=dist.group.WORLD)
        if payload.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def pairs(ranks: Sequence[Facts]) -> list[tuple[int, int, str]]:
    """Links to try: (source, target, kind): around the ranks of each host, and around the hosts' first ranks."""
    hosts: dict[tuple[str, str], list[int]] = {}
    for facts in ranks:
        hosts.setdefault((facts.host, facts.address), []).append(facts.rank)
    found = [(a, b, f"inside {ranks[a].host}") for here in hosts.values() for a, b in _ring(here)]
    return found + [(a, b, "between hosts") for a, b in _ring([here[0] for here in hosts.values()])]


def _ring(ranks: Sequence[int]) -> list[tuple[int, int]]:
    if len(ranks) < 3:
        return [(ranks[0], ranks[1])] if len(ranks) == 2 else []
    return [(rank, ranks[(at + 1) % len(ranks)]) for at, rank in enumerate(ranks)]


def judge(ways: Sequence[tuple[int, int, str]], rates: Sequence[float]) -> list[Finding]:
    """A line a kind of link, and one for each that is much slower than its kind."""
    kinds: dict[str, list[tuple[int, int, float]]] = {}
    for (source, target, kind), rate in zip(ways, rates, strict=True):
        kinds.setdefault(kind, []).append((source, target, rate))
    found = []
    for kind, measured in kinds.items():
        middle = statistics.median(rate for *_, rate in measured)
        slow = [way for way in measured if way[2] < SLOW * middle]
        for source, target, rate in slow:
            what = f"rank {source} to {target}: {rate:.3g} GB/s, the median {kind} is {middle:.3g}"
            found.append(Finding(YELLOW, "links", kind, what, "look at this link's cable, port or slot"))
        low, high = min(rate for *_, rate in measured), max(rate for *_, rate in measured)
        told = f"{low:.3g} GB/s" if len(measured) == 1 else f"{len(measured)} links, {low:.3g} to {high:.3g} GB/s"
        found.append(Finding(GREEN, "links", kind, told))
    return found
