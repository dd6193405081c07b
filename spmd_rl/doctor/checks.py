"""From all ranks' facts to findings: pure functions, one a question."""

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spmd_rl.doctor.facts import Facts

RED, YELLOW, GREEN = "red", "yellow", "green"
K = TypeVar("K", bound=Hashable)
SKEW_S = 1.0
"""Clocks further apart than this make logs, time limits and file times lie."""
STRAY_MIB = 1024
"""Memory in use on a card on which no process shows."""


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    level: str
    check: str
    where: str
    what: str
    mend: str = ""


def examine(ranks: Sequence[Facts], ranks_per_gpu: int) -> list[Finding]:
    """All that the facts say, of jobs of any size."""
    return [finding for check in CHECKS for finding in check(ranks, ranks_per_gpu)]


def names(ranks: Sequence[Facts], ranks_per_gpu: int) -> Iterator[Finding]:
    """Each host's own name must stand for an address at which others find it."""
    good = True
    several = len({facts.address for facts in ranks}) > 1
    for facts in _first_of_hosts(ranks):
        where, mend = f"host {facts.host}", f"let /etc/hosts or DNS say {facts.address} {facts.host}"
        loop = [a for a in facts.names if ipaddress.ip_address(a.partition("%")[0]).is_loopback]
        if not facts.names:
            good = False
            level = RED if several else YELLOW
            yield Finding(
                level, "host name", where, f"{facts.host} does not resolve, gloo falls back to 127.0.0.1", mend
            )
        elif loop and several:
            good = False
            what = f"{facts.host} resolves to {loop[0]}, where no other host finds it; its address is {facts.address}"
            yield Finding(RED, "host name", where, what, mend)
    if good:
        yield Finding(GREEN, "host name", "all hosts", "each host's name stands for its address")
    if len({facts.master for facts in ranks}) > 1 and several:
        told = "; ".join(f"{', '.join(f.master) or 'nothing'} on {f.host}" for f in _first_of_hosts(ranks))
        yield Finding(YELLOW, "meeting point", "all hosts", f"its name stands for different addresses: {told}")


def versions(ranks: Sequence[Facts], ranks_per_gpu: int) -> Iterator[Finding]:
    """The same packages everywhere."""
    packages = sorted({name for facts in ranks for name in facts.versions})
    equal = True
    for name in packages:
        found = _by(ranks, lambda facts, name=name: facts.versions.get(name, "none"))  # type: ignore[misc]
        if len(found) > 1:
            equal = False
            told = "; ".join(f"{version} on {_hosts(group)}" for version, group in found.items())
            yield Finding(RED, "versions", "all hosts", f"{name} differs: {told}", f"install one {name} everywhere")
    if equal:
        shown = [f"{name} {ranks[0].versions[name]}" for name in ("python", "torch", "transformers", "vllm")
                 if name in ranks[0].versions]  # fmt: skip
        yield Finding(GREEN, "versions", "all hosts", f"{len(packages)} packages alike: {', '.join(shown)}")


def gpus(ranks: Sequence[Facts], ranks_per_gpu: int) -> Iterator[Finding]:
    """A card of its own for each rank, and all of a kind."""
    for facts in _first_of_hosts(ranks):
        if facts.device_trouble:
            what = f"nvidia-smi fails: {facts.device_trouble[:200]}"
            yield Finding(RED, "GPUs", f"host {facts.host}", what, "see dmesg for Xid lines; restart the driver")
    for (host, device), group in _by(ranks, lambda facts: (facts.host, facts.device)).items():
        if device and len(group) > ranks_per_gpu:
            card = next(card for card in group[0].cards if card["uuid"] == device)
            who = ", ".join(str(facts.rank) for facts in group)
            what = f"ranks {who} are on one GPU ({card['index']}, {device}), and cluster.ranks_per_gpu={ranks_per_gpu}"
            yield Finding(RED, "GPUs", f"host {host}", what, "one rank a GPU: --nproc-per-node, CUDA_VISIBLE_DEVICES")
    for facts in ranks:
        if facts.cards and not facts.device:
            what = f"there is no GPU for local rank {facts.local_rank}, the host shows {len(facts.cards)}"
            yield Finding(RED, "GPUs", facts.who, what, "start fewer ranks here")
    kinds = _by(ranks, lambda facts: tuple(sorted({card["name"] for card in facts.cards})))
    if len(kinds) > 1:
        told = "; ".join(f"{', '.join(kind) or 'no GPU'} on {_hosts(group)}" for kind, group in kinds.items())
        yield Finding(YELLOW, "GPUs", "all hosts", f"hosts differ: {told}", "say so in cluster.node_tags")
    else:
        links = sorted({link for facts in ranks for link in facts.links})
        (kind,) = kinds
        what = f"{', '.join(kind)}; links {', '.join(links) or 'none'}" if kind else "no GPU: ranks run on the CPU"
        yield Finding(GREEN, "GPUs", "all hosts", what)


def ghosts(ranks: Sequence[Facts], ranks_per_gpu: int) -> Iterator[Finding]:
    """What is on the cards that this job has not put there."""
    clean = True
    for facts in _first_of_hosts(ranks):
        ours = {other.pid for other in ranks if other.host == facts.host}
        for card in facts.cards:
            apps = [app for app in facts.apps if app["uuid"] == card["uuid"] and app["pid"] not in ours]
            where = f"host {facts.host}, GPU {card['index']}"
            for app in apps:
                what = f"process {app['pid']} ({app['name']}) holds {app['used']} MiB, and is not of this job"
                yield Finding(RED, "ghosts", where, what, f"kill {app['pid']}, if it is a left-over of an earlier run")
            if not apps and not ours & {a["pid"] for a in facts.apps} and card["used"] > STRAY_MIB:
                what = f"{card['used']} MiB are in use, but no process shows (another container, or a stray context)"
                yield Finding(RED, "ghosts", where, what, "end that container; as a last resort nvidia-smi --gpu-reset")
                apps = [card]
            clean = clean and not apps
    if clean and any(facts.cards for facts in ranks):
        yield Finding(GREEN, "ghosts", "all hosts", "nobody else is on the GPUs")


def cores(ranks: Sequence[Facts], ranks_per_gpu: int) -> Iterator[Finding]:
    """Threads of all ranks against the host's cores; NUMA binding where there is something to bind to."""
    good = True
    for facts in _first_of_hosts(ranks):
        here = [other for other in ranks if other.host == facts.host]
        threads, have = sum(other.threads for other in here), max(other.cores for other in here)
        if threads > have:
            good = False
            what = f"{len(here)} ranks take {threads} threads on {have} cores"
            mend = f"OMP_NUM_THREADS={max(1, have // len(here))}"
            yield Finding(YELLOW, "cores", f"host {facts.host}", what, mend)
        loose = [other.rank for other in here if other.numa > 1 and other.gpu_numa >= 0 and not other.bound]
        if loose:
            good = False
            what = f"ranks {', '.join(map(str, loose))} are not bound to the NUMA node of their GPU"
            mend = "bind them: numactl --cpunodebind, or srun --cpu-bind=cores"
            yield Finding(YELLOW, "NUMA", f"host {facts.host}", what, mend)
    if good:
        yield Finding(GREEN, "cores", "all hosts", f"{ranks[0].threads} threads a rank, {ranks[0].cores} cores a host")


def network(ranks: Sequence[Facts], ranks_per_gpu: int) -> Iterator[Finding]:
    """Interfaces, and the environment of NCCL and gloo, which must be the same everywhere."""
    settings = _by(ranks, lambda facts: tuple(facts.settings.items()))
    if len(settings) > 1:
        names = sorted({name for facts in ranks for name in facts.settings})
        differing = [name for name in names if len({facts.settings.get(name) for facts in ranks}) > 1]
        what = f"{', '.join(differing)} differ between ranks"
        yield Finding(YELLOW, "NCCL and gloo", "all ranks", what, "set them in the job script, for every rank")
    for facts in _first_of_hosts(ranks):
        down = [name for name, state in facts.network.items() if ":" in state and "ACTIVE" not in state]
        for name in down:
            yield Finding(YELLOW, "NIC", f"host {facts.host}", f"InfiniBand port {name} is {facts.network[name]}")
    shown = ", ".join(f"{name} {state}" for name, state in ranks[0].network.items()) or "loopback only"
    told = ", ".join(f"{name}={value}" for name, value in ranks[0].settings.items())
    yield Finding(GREEN, "NIC", f"host {ranks[0].host}", f"{shown}{'; ' if told else ''}{told}")


def clocks(offsets: dict[str, float]) -> Iterator[Finding]:
    """`offsets`: seconds that each host's clock is ahead of rank 0's."""
    late = {host: offset for host, offset in offsets.items() if abs(offset) > SKEW_S}
    for host, offset in late.items():
        what = f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank 0's"
        yield Finding(RED, "clocks", f"host {host}", what, "let chrony or ntpd set it")
    if not late:
        widest = max(map(abs, offsets.values()), default=0.0)
        yield Finding(GREEN, "clocks", "all hosts", f"within {max(widest, 0.001) * 1000:.0f} ms of rank 0's")


CHECKS: tuple[Callable[[Sequence[Facts], int], Iterator[Finding]], ...] = (
    names, versions, gpus, ghosts, cores, network,
)  # fmt: skip


def table(findings: Sequence[Finding], colours: bool) -> str:
    """Red lines first; a line a finding, what mends it below."""
    order = {RED: 0, YELLOW: 1, GREEN: 2}
    marks = {RED: "\033[31m", YELLOW: "\033[33m", GREEN: "\033[32m"}
    rows = sorted(findings, key=lambda finding: order[finding.level])
    wide = [max(len(str(getattr(f, name))) for f in rows) for name in ("level", "check", "where")]
    lines = []
    for f in rows:
        level = f.level.ljust(wide[0])
        level = f"{marks[f.level]}{level}\033[0m" if colours else level
        lines.append(f"{level}  {f.check.ljust(wide[1])}  {f.where.ljust(wide[2])}  {f.what}")
        lines += [f"{' ' * (sum(wide) + 6)}-> {f.mend}"] if f.mend else []
    reds = sum(f.level == RED for f in rows)
    return "\n".join([*lines, f"{reds} red, {sum(f.level == YELLOW for f in rows)} yellow" if reds else "fit to run"])


def _by(ranks: Sequence[Facts], key: Callable[[Facts], K]) -> dict[K, list[Facts]]:
    found: dict[K, list[Facts]] = defaultdict(list)
    for facts in ranks:
        found[key(facts)].append(facts)
    return dict(found)


def _first_of_hosts(ranks: Sequence[Facts]) -> list[Facts]:
    return [group[0] for group in _by(ranks, lambda facts: (facts.host, facts.address)).values()]


def _hosts(group: Sequence[Facts]) -> str:
    hosts = list(dict.fromkeys(facts.host for facts in group))
    return ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
