"""Every rank says what it does, and watches a neighbour: one that dies, stops or hangs is named and ends the job.

A thread of each rank writes the rank's `Report` into the job's store every second and looks at two others: the next
rank of the job and the next one on its host. So of any ranks that fall silent, one at least is noticed by a living one,
and the cost a rank does not grow with the job. A rank fails

- when its process is gone (seen by its host's neighbour at once, by others after SILENCE_S without a word);
- when it is stopped, or its host is gone: SILENCE_S without a word. A process that runs but does not come to speak (a C
  call that keeps Python's lock: compilation, parsing) is spoken for by its neighbour, who sees it run;
- when it hangs: its main thread stays at one instruction of one phase for `trainer.timeout_s`. A long phase that moves
  is none. Who waits in a collective is not to blame where somebody else does not;
- when it raises.

Whoever finds it first writes <output_dir>/failures/<attempt>.txt; then every rank prints that and leaves by `_exit`,
which no hung collective can hold up.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

from spmd_rl.observe import processes
from spmd_rl.observe.live import HERE, STACK_FRAMES, Report, short
from spmd_rl.observe.status import table, write_failure, write_status

BEAT_S = 1.0
"""Between two reports of a rank."""
SILENCE_S = 15.0
"""A rank of which nothing is heard or seen for so long has failed."""
SECOND_S = 5.0
"""Within which the others get the message from whoever found the failure."""
PATIENCE_S = 20.0
"""For an error that each rank finds by itself, or that another rank's end may have caused."""
STDERR = 2
"""`sys.stderr` may be something without a file."""
LOST_RANK = 75
"""Exit status of a rank that ends because of another one: not its fault, a new start may help (EX_TEMPFAIL)."""
ENDS = {
    processes.GONE: "died: its process is gone (kill -9, out of memory, a crash: see the launcher's log)",
    processes.STOPPED: "is stopped (SIGSTOP, or a debugger)",
}
"""What a neighbour sees of a rank that does not speak."""
COLLECTIVE = re.compile(r"gloo|nccl|process_vm_readv|connection (closed|reset)|timed out|socket", re.IGNORECASE)


class Liveness:
    """This rank's reports and its watch. `begin` starts the threads, `leave` ends them."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        on_host: Sequence[int],
        stuck_s: float,
        folder: Path | None = None,
        attempt: str = "0",
        store_rank: int | None = None,
    ) -> None:
        """`store`: of this start of the job alone. `on_host`: the ranks of this host. `folder`: where the message (and
        rank 0's status.json) go; None writes nothing. `store_rank`: the rank whose process holds the store, if one
        does."""
        self.rank, self.size, self.folder, self.attempt = rank, world_size, folder, attempt
        self.stuck_s, self.beat_s, self.silence_s, self.store_rank = stuck_s, BEAT_S, SILENCE_S, store_rank
        self._store = store.clone()  # type: ignore[attr-defined]  # a connection of its own
        self._store.set_timeout(timedelta(seconds=self.silence_s))
        self._on_host = sorted(on_host)
        pid = os.getpid()
        self._mine = Report(
            rank, host=os.uname().nodename, pid=pid, machine=processes.machine(), born=processes.born(pid)
        )
        self._known: dict[int, Report] = {}
        self._heard: dict[int, float] = {}
        self._spoken: set[int] = set()
        self._answered = time.monotonic()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stacks = self._open_stacks()

    def begin(self) -> None:
        """Speak for the first time, then from threads."""
        self._speak()
        for name, act in (("liveness", self._talk), ("liveness-store", self._mind_store)):
            self._threads.append(threading.Thread(target=act, name=name, daemon=True))
            self._threads[-1].start()

    def leave(self, error: BaseException | None = None, mistake: bool = False) -> None:
        """The rank is done, or `error` ends it. One that another rank may have caused waits for the watch to say so."""
        if self._over.is_set():
            return
        cause = "" if error is None else "mistake" if mistake else cause_of(error)
        if cause == "collective" and self.size > 1:
            traceback.print_exception(error)
            self._over.wait(PATIENCE_S)
        self._over.set()
        for thread in self._threads:
            thread.join(2 * self.beat_s)
        words = "done" if error is None else f"{type(error).__name__}: {error}"
        stack = () if error is None else stack_of(error)
        self._mine = replace(
            self._mine, pool=HERE.pool, step=HERE.step, phase=HERE.failed_in or HERE.look()[0], ended=words,
            cause=cause, stack=stack, beat=self._mine.beat + 1,
        )  # fmt: skip
        with suppress(RuntimeError):
            self._store.set(f"alive/{self.rank}", self._mine.to_json())
            self._last_words(self._store.add("alive/left", 1))
        faulthandler.unregister(signal.SIGUSR1)
        if self._stacks is not None:
            os.close(self._stacks)
            self._tidy()

    def _tidy(self) -> None:
        """An empty file says nothing."""
        if self._stacks is None:
            return
        file = self._stack_file(self.rank)
        with suppress(OSError):
            if file.stat().st_size == 0:
                file.unlink()
                file.parent.rmdir()  # when it was the last one

    def _last_words(self, left: int) -> None:
        """Who holds the store stays until the others have left; rank 0, which writes the last status, for a moment."""
        seconds = self.stuck_s if self.rank == self.store_rank else SECOND_S if self.rank == 0 else 0.0
        end = time.monotonic() + seconds
        while left < self.size and time.monotonic() < end and not self._store.check(["alive/verdict"]):
            time.sleep(0.02)
            left = self._store.add("alive/left", 0)
        if self.rank == 0:
            self._show(self._everybody())

    def _open_stacks(self) -> int | None:
        """SIGUSR1 has a rank write its Python stacks here, whatever it is doing."""
        file = None
        with suppress(OSError):  # a full disk, or one that may not be written to
            if self.folder is not None:
                (self.folder / "failures").mkdir(parents=True, exist_ok=True)  # rank 0 may not have come to it yet
                file = os.open(self._stack_file(self.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        faulthandler.register(signal.SIGUSR1, file=STDERR if file is None else file, all_threads=True)
        return file

    def _stack_file(self, rank: int) -> Path:
        assert self.folder is not None, "asked only where there is a folder"
        return self.folder / "failures" / f"{self.attempt}.rank{rank}.stacks"

    # ------------------------------------------------------------------ the thread that speaks and looks

    def _talk(self) -> None:
        woke = time.monotonic()
        while not self._over.wait(self.beat_s):
            slept, woke = time.monotonic() - woke, time.monotonic()
            if slept > self.silence_s / 2:  # it was this process that stood still
                self._heard = dict.fromkeys(self._heard, woke)
            try:
                self._speak()
                self._look()
            except RuntimeError:  # no answer from the store: `_mind_store` sees to that
                continue
            self._answered = time.monotonic()

    def _speak(self) -> None:
        phase, seconds, still, stack = HERE.look()
        self._mine = replace(
            self._mine, pool=HERE.pool, step=HERE.step, phase=phase, seconds=round(seconds, 1), stack=stack,
            still_s=round(still, 1), beat=self._mine.beat + 1,
        )  # fmt: skip
        self._store.set(f"alive/{self.rank}", self._mine.to_json())
        if still > self.stuck_s:
            self._blame_stuck()

    def _look(self) -> None:
        if self._store.check(["alive/verdict"]):
            text = self._message_of_others()
            self._wait_for_readers()
            self._end(text)
        for rank in sorted(self._watched()):
            self._judge(rank)
        if self._mine.beat % 2 == 0 and (self.rank == 0 or HERE.listeners):
            self._show(self._everybody())

    def _message_of_others(self) -> str:
        with suppress(RuntimeError):
            self._store.wait(["alive/message"], timedelta(seconds=SECOND_S))
            return self._store.get("alive/message").decode()
        return (
            f"{self._store.get('alive/verdict').decode()} found a rank that failed, and ended before it could say which"
        )

    def _watched(self) -> set[int]:
        """The next rank of the job and of the host that has not ended, and who holds the store."""
        watched = {self._next(range(self.size)), self._next(self._on_host), self.store_rank}
        return {rank for rank in watched if rank is not None and rank != self.rank}

    def _next(self, ranks: Sequence[int]) -> int | None:
        at = ranks.index(self.rank)
        for rank in [*ranks[at + 1 :], *ranks[:at]]:
            if not (rank in self._known and self._known[rank].ended == "done"):
                return rank
        return None

    def _judge(self, rank: int) -> None:
        """Take the rank's word; name it when it has failed."""
        now, last = time.monotonic(), self._known.get(rank)
        found = self._report_of(rank)
        if last is None or found.beat != last.beat:
            self._known[rank], self._heard[rank] = found, now
        silent = now - self._heard[rank]
        if found.ended:
            if found.ended != "done" and (found.cause == "own" or silent > PATIENCE_S):
                self._blame([found], "raised an error")
            return
        neighbour = found.pid and found.machine == self._mine.machine
        state = processes.state(found.pid, found.born) if neighbour else processes.UNKNOWN
        if state == processes.GONE:
            self._blame_gone(rank)
        elif state == processes.RUNS and silent > 3 * self.beat_s:
            self._speak_for(found, silent)
        elif silent > self.silence_s:
            self._blame([found], f"{ENDS.get(state, 'fell silent')}; it last spoke {silent:.0f} s ago")

    def _blame_gone(self, rank: int) -> None:
        """A process is gone: it may have said why a moment before."""
        found = self._report_of(rank)
        if not found.ended:
            self._blame([found], ENDS[processes.GONE])

    def _speak_for(self, found: Report, silent: float) -> None:
        unheard = found.unheard_s + silent
        spoken = replace(found, unheard_s=unheard, seconds=found.seconds + silent, beat=found.beat + 1)
        self._store.set(f"alive/{found.rank}", spoken.to_json())
        if unheard > self.stuck_s:
            how = f"hangs: its process runs, but Python's lock has not been free for {unheard:.0f} s"
            self._blame([spoken], how)

    def _report_of(self, rank: int) -> Report:
        key = f"alive/{rank}"
        return Report.from_json(self._store.get(key)) if self._store.check([key]) else Report(rank)

    def _everybody(self) -> list[Report]:
        ranks = range(self.size)
        self._spoken.update(r for r in ranks if r not in self._spoken and self._store.check([f"alive/{r}"]))
        spoken = sorted(self._spoken)
        found = dict(zip(spoken, self._store.multi_get([f"alive/{r}" for r in spoken]), strict=True))
        return [Report.from_json(found[r]) if r in found else Report(r) for r in ranks]

    def _show(self, reports: Sequence[Report]) -> None:
        with suppress(OSError):  # a full disk, a closed terminal: no reason for this thread to end, which would end all
            if self.rank == 0 and self.folder is not None and self.folder.is_dir():
                write_status(self.folder, self.attempt, reports)
        with suppress(OSError):
            for listener in HERE.listeners:
                listener(reports)

    # ------------------------------------------------------------------ the thread that minds the store

    def _mind_store(self) -> None:
        """A store that does not answer keeps `_talk` waiting, so this is another thread's work."""
        woke = time.monotonic()
        while not self._over.wait(self.beat_s):
            slept, woke = time.monotonic() - woke, time.monotonic()
            if slept > self.silence_s / 2:
                self._answered = woke
            quiet = woke - self._answered
            holder = self._known.get(self.store_rank) if self.store_rank is not None else None
            if holder is not None and holder.ended == "done":
                continue
            allowed = self.silence_s
            if holder is not None and holder.machine == self._mine.machine and quiet > 2 * self.beat_s:
                state = processes.state(holder.pid, holder.born)
                allowed = {processes.GONE: 0.0, processes.RUNS: self.stuck_s}.get(state, allowed)  # it may only be slow
            if quiet > allowed:
                self._end(self._storeless_message(holder, quiet))

    def _storeless_message(self, holder: Report | None, quiet: float) -> str:
        known = list(self._known.values())
        if holder is None:
            here = f"rank {self.rank}, pool {self._mine.pool or '-'}, phase {self._mine.phase}"
            text = (
                f"the launcher's store has not answered {here} for {quiet:.0f} s: its host or agent is gone or stopped"
            )
            text = "\n".join([text, *table([self._mine, *known])])
        else:
            neighbour = holder.machine == self._mine.machine
            state = processes.state(holder.pid, holder.born) if neighbour else processes.UNKNOWN
            how = ENDS.get(state, "died, stopped or cannot be reached")
            silent = f"{how}; the job's store, which it holds, has been silent for {quiet:.0f} s"
            text = self._message([holder], silent, [self._mine, *known])
        if self.folder is not None:
            with suppress(OSError):
                write_failure(self.folder, self.attempt, text)
        return text

    # ------------------------------------------------------------------ who is to blame, and the end

    def _blame_stuck(self) -> None:
        """This rank's main thread does not move: for whom does it wait?"""
        how = f"hangs: no movement for trainer.timeout_s={self.stuck_s:g} s"
        everybody = [report for report in self._everybody() if not report.ended]
        elsewhere = [report for report in everybody if not report.waits]
        hung = [r for r in elsewhere if r.unheard_s > 0 or r.still_s > self.stuck_s / 2]
        if hung or not self._mine.waits:
            self._blame(hung or [self._mine], how)
        elif late := [report for report in elsewhere if report.pool == self._mine.pool]:
            self._blame(late, f"does not come to the collective in which rank {self.rank} waits: {self._mine.place}")
        else:
            self._blame(everybody, f"{how}; they wait in collectives that do not fit together")

    def _blame(self, failed: Sequence[Report], how: str) -> None:
        """Once a job: the first rank to say so writes the message and ends everybody."""
        claim = f"rank {self.rank}"
        if self._store.compare_set("alive/verdict", "", claim).decode() != claim:
            return
        text = self._message(failed, how, self._everybody())
        if self.folder is not None:
            with suppress(OSError):
                write_failure(self.folder, self.attempt, text)
        self._store.set("alive/message", text)
        self._wait_for_readers(len(failed))
        self._end(text, failed)

    def _wait_for_readers(self, failed: int = 1) -> None:
        """The store ends with the rank that holds it: that one waits a moment until the others have the message."""
        read, end = self._store.add("alive/read", 1), time.monotonic() + 3 * self.beat_s
        while self.rank == self.store_rank and read + failed < self.size and time.monotonic() < end:
            time.sleep(0.02)
            read = self._store.add("alive/read", 0)

    def _message(self, failed: Sequence[Report], how: str, everybody: Sequence[Report]) -> str:
        lines = []
        for report in failed:
            who = f"rank {report.rank} (pool {report.pool or '-'}, host {report.host}, pid {report.pid}) {how}"
            lines.append(f"{who}; in phase {report.phase} of step {report.step} for {report.seconds:.0f} s")
            lines += [f"  {report.ended}"] if report.ended else []
            lines += ["  its last stack, innermost at the end:", *(f"    {frame}" for frame in report.stack)]
            if not report.ended and report.machine == self._mine.machine and report.pid != self._mine.pid:
                lines += self._asked_stack(report)
        return "\n".join([*lines, "the job ends; what each rank did:", *table(everybody)])

    def _asked_stack(self, report: Report) -> list[str]:
        """What the process on this host says or shows of itself now."""
        state = processes.state(report.pid, report.born)
        if state == processes.GONE:
            return []
        lines = [f"  /proc/{report.pid}: {processes.kernel_place(report.pid)}"]
        if state == processes.RUNS and self._stacks is not None:
            with suppress(OSError):
                os.kill(report.pid, signal.SIGUSR1)
                time.sleep(1.0)
                told = self._stack_file(report.rank).read_text(encoding="utf-8", errors="replace")
                lines += ["  its own word:", *(f"    {line}" for line in told.splitlines()[:60])]
        return lines

    def _end(self, text: str, failed: Sequence[Report] = ()) -> None:
        """Print the message and leave; those who failed on this host and still run are killed first."""
        if self._over.is_set() or not self._ending.acquire(blocking=False):
            return
        sys.stderr.write(f"error: rank {self.rank} ends, because\n{text}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        self._kill(failed)
        self._tidy()
        os._exit(LOST_RANK)

    def _kill(self, failed: Sequence[Report]) -> None:
        """End those on this host who cannot do so themselves."""
        here = [r for r in failed if r.machine == self._mine.machine and r.pid != self._mine.pid and not r.ended]
        end = time.monotonic() + 2 * self.beat_s
        while here := [r for r in here if processes.state(r.pid, r.born) in (processes.RUNS, processes.STOPPED)]:
            if time.monotonic() > end:
                for report in here:
                    with suppress(OSError):
                        os.kill(report.pid, signal.SIGKILL)
                return
            time.sleep(0.05)


def cause_of(error: BaseException) -> str:
    """`collective` when the error comes out of one: then another rank may be the cause; else `own`."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and "torch/distributed/" in frames[-1].filename
    return "collective" if inside or COLLECTIVE.search(f"{type(error).__name__} {error}") else "own"


def stack_of(error: BaseException) -> tuple[str, ...]:
    """Where it was raised, as in a report."""
    frames = traceback.extract_tb(error.__traceback__)[-STACK_FRAMES:]
    return tuple(f"{short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames)
