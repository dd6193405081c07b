"""The examination: what each rank finds alone, the meeting, what all find together; one table."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import parse_arguments, take_option
from spmd_rl.doctor import links
from spmd_rl.doctor.checks import GREEN, RED, YELLOW, Finding, clocks, examine, table
from spmd_rl.doctor.facts import Facts, addresses, gather, reach
from spmd_rl.ranked import plan_of
from spmd_rl.runtime.environment import LaunchEnvironment, meeting_point, read_environment
from spmd_rl.runtime.roster import meet

WAIT_S = 60.0
"""For the other ranks; `--wait` sets another."""


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 with a red line, 2 for a mistake in the arguments."""
    env = read_environment()
    try:
        words, wait = take_option(sys.argv[1:] if argv is None else argv, "--wait")
        arguments = parse_arguments(words)
        if shown := arguments.text("spmd-rl doctor [--wait SECONDS]"):
            print(shown if env.is_first else "", end="")
            return 0
        arguments.reject_others("--wait SECONDS")
        config = arguments.config()
    except ConfigError as error:
        print(f"error: {error}" if env.local_rank == 0 else "", file=sys.stderr)
        return 2
    seconds = float(wait or WAIT_S)
    config = replace(config, trainer=replace(config.trainer, timeout_s=seconds))
    return Examination(config, env, seconds, planned=bool(words)).run()


class Examination:
    """Of one rank among many. Every rank runs every line; rank 0 prints, or each one when they cannot meet."""

    def __init__(self, config: Config, env: LaunchEnvironment, seconds: float, planned: bool) -> None:
        self.config, self.env, self.seconds, self.planned = config, env, seconds, planned

    def run(self) -> int:
        """Print the table; 1 with a red line in it, on every rank."""
        alone = self.way_to_the_meeting()
        if not alone:
            try:
                self.env = meet(self.config, self.env, keeps_roster=False)
                return self.together(self.env.store)
            except (ConfigError, RuntimeError) as error:
                why = str(error).splitlines()[0]
                mend = "look at the ranks that did not come: each of them says why"
                alone = [Finding(RED, "meeting", f"rank {self.env.rank}", why, mend)]
        facts = gather(self.env, self.config.cluster.ranks_per_gpu)
        print(table(alone + examine([facts], self.config.cluster.ranks_per_gpu), sys.stdout.isatty()), flush=True)
        return 1

    def way_to_the_meeting(self) -> list[Finding]:
        """Whether this rank reaches the meeting point, unless it holds it itself."""
        if self.env.rank == 0 and not self.env.launcher_holds_store:
            return []
        host, port = meeting_point()
        if not addresses(host):
            mend = "give an address, or let DNS or /etc/hosts know the name"
            return [Finding(RED, "meeting point", f"rank {self.env.rank}", f"{host} does not resolve", mend)]
        if why := reach((host, port), self.seconds):
            what = f"cannot reach {host}:{port} ({', '.join(addresses(host))}) within {self.seconds:g} s: {why}"
            mend = "is rank 0 running there? Is the port open between the hosts (firewall)?"
            return [Finding(RED, "meeting point", f"rank {self.env.rank}", what, mend)]
        return []

    def together(self, store: Store) -> int:
        """All that needs the others."""
        shared = self.config.cluster.ranks_per_gpu
        mine = gather(self.env, shared)
        store.set(f"facts/{self.env.rank}", json.dumps(asdict(mine)))
        offsets, folder = self.clock(store), self.folder(store)
        everybody = [_facts(text) for text in store.multi_get([f"facts/{r}" for r in range(self.env.world_size)])]
        findings = [*examine(everybody, shared), *clocks(_by_host(everybody, offsets)), *folder, *self.plan()]
        findings += self.reachable()
        fatal = [f for f in findings if f.level == RED and f.check in ("host name", "GPUs")]
        if fatal:
            what = "sums and bandwidth were not tried: mend the red lines above first"
            findings.append(Finding(YELLOW, "links", "all ranks", what))
        else:
            findings += links.measure(self.env, everybody, store, self.seconds)
        return self.conclude(store, findings)

    def conclude(self, store: Store, findings: Sequence[Finding]) -> int:
        """Rank 0 prints and says how it ends; it holds the store, so it leaves last."""
        if self.env.rank == 0:
            print(table(findings, sys.stdout.isatty()), flush=True)
            store.set("verdict", str(int(any(f.level == RED for f in findings))))
        verdict = int(store.get("verdict"))
        left, end = store.add("left", 1), time.monotonic() + 10
        while self.env.rank == self.env.store_rank and left < self.env.world_size and time.monotonic() < end:
            time.sleep(0.02)
            left = store.add("left", 0)
        return verdict

    def reachable(self) -> list[Finding]:
        host, port = meeting_point()
        return [Finding(GREEN, "meeting point", "all ranks", f"{self.env.world_size} ranks met at {host}:{port}")]

    def clock(self, store: Store, rounds: int = 3) -> list[float]:
        """Seconds that each rank's clock is ahead of rank 0's; the smallest of some rounds, as messages take time."""
        best = float("inf")
        for at in range(rounds):
            ready = store.add(f"tick/{at}/ready", 1)
            if self.env.rank == 0:
                while ready < self.env.world_size:
                    time.sleep(0.002)
                    ready = store.add(f"tick/{at}/ready", 0)
                store.set(f"tick/{at}", repr(time.time()))
            said = float(store.get(f"tick/{at}"))
            offset = time.time() - said
            best = min(best, offset, key=abs)
        store.set(f"clock/{self.env.rank}", repr(0.0 if self.env.rank == 0 else best))
        return [float(x) for x in store.multi_get([f"clock/{r}" for r in range(self.env.world_size)])]

    def folder(self, store: Store) -> list[Finding]:
        """trainer.output_dir: every rank writes a file there, and sees everybody's."""
        place = Path(self.config.trainer.output_dir)
        size, rank = self.env.world_size, self.env.rank
        made, words = [p for p in (place, *place.parents) if not p.exists()], ""
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / f".doctor-{rank}").write_text(self.env.attempt, encoding="utf-8")
        except OSError as error:
            words = f"cannot write: {error.strerror}"
        store.set(f"folder/wrote/{rank}", words)
        wrote = [text.decode() for text in store.multi_get([f"folder/wrote/{r}" for r in range(size)])]
        unseen = [r for r in range(size) if not wrote[r] and not self._sees(place / f".doctor-{r}")]
        words = words or (f"does not see what ranks {', '.join(map(str, unseen[:8]))} wrote" if unseen else "")
        store.set(f"folder/sees/{rank}", words)
        told = [text.decode() for text in store.multi_get([f"folder/sees/{r}" for r in range(size)])]
        (place / f".doctor-{rank}").unlink(missing_ok=True) if not wrote[rank] else None
        store.set(f"folder/cleared/{rank}", "")
        store.wait([f"folder/cleared/{r}" for r in range(size)])
        for folder in made:  # leave nothing behind
            try:
                folder.rmdir()
            except OSError:
                break
        return self._folder_findings(place, told)

    def _sees(self, file: Path) -> bool:
        """A network folder may show a new file only after some seconds."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                return file.read_text(encoding="utf-8") == self.env.attempt
            except OSError:
                time.sleep(0.1)
        return False

    def _folder_findings(self, place: Path, told: Sequence[str]) -> list[Finding]:
        bad: dict[str, list[int]] = {}
        for rank, words in enumerate(told):
            bad.setdefault(words, []).append(rank)
        good = bad.pop("", [])
        mend = "trainer.output_dir must be one folder that every rank can write"
        found = [
            Finding(RED, "shared folder", f"ranks {', '.join(map(str, ranks[:8]))}", f"{place}: {words}", mend)
            for words, ranks in bad.items()
        ]
        if len(good) == self.env.world_size:
            found.append(Finding(GREEN, "shared folder", "all ranks", f"{place}: written and seen by all"))
        return found

    def plan(self) -> list[Finding]:
        """The plan of the arguments on the ranks that are there."""
        if not self.planned:
            return [Finding(GREEN, "plan", "all ranks", "no arguments of a run were given, so no plan was checked")]
        try:
            plan = plan_of(self.config, self.env)
        except ConfigError as error:
            lines = str(error).splitlines()
            return [Finding(RED, "plan", f"{self.env.world_size} ranks", line) for line in lines if line.strip()]
        what = f"{plan.world_size} ranks on {len(self.env.nodes)} hosts suit the plan"
        return [Finding(GREEN, "plan", "all ranks", what), *(Finding(YELLOW, "plan", "", w) for w in plan.warnings)]


def _facts(text: bytes) -> Facts:
    known: dict[str, Any] = json.loads(text)
    return Facts(**(known | {name: tuple(known[name]) for name in ("names", "master", "links")}))


def _by_host(everybody: Sequence[Facts], offsets: Sequence[float]) -> dict[str, float]:
    """The smallest offset of a host's ranks: the others' messages were late."""
    found: dict[str, float] = {}
    for facts, offset in zip(everybody, offsets, strict=True):
        found[facts.host] = min(found.get(facts.host, offset), offset, key=abs)
    return found
