"""What this rank does now, said where it happens (`HERE.phase`), and what it tells the others of it (`Report`)."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

from spmd_rl.observe.processes import age_s

STACK_FRAMES = 30
"""Innermost frames that a report carries."""

MEETINGS = ("torch/distributed/", "spmd_rl/runtime/bridge", "spmd_rl/runtime/exchange", "spmd_rl/runtime/messages")
"""Code in which a rank waits for others."""


@dataclass(frozen=True)
class Report:
    """A rank's word of itself, a line of JSON in the job's store."""

    rank: int
    pool: str = ""
    host: str = ""
    pid: int = 0
    machine: str = ""
    """The host's boot and process namespace: where it is equal, `pid` means something."""
    born: int = 0
    """Start of the process in clock ticks since boot: tells it from a later one of the same number."""
    step: int = 0
    phase: str = "start"
    seconds: float = 0.0
    """In this phase so far, by the rank's own clock."""
    still_s: float = 0.0
    """Its main thread has been at the same instruction for so long."""
    unheard_s: float = 0.0
    """It has not spoken for so long, but a neighbour sees its process run and speaks for it."""
    stack: tuple[str, ...] = ()
    """`file:line function` of its main thread, outermost first."""
    ended: str = ""
    """`done`, or the error that ended it; empty while it works."""
    cause: str = ""
    """Of an error: `mistake`, which every rank may find by itself, `collective`, which another rank may have caused, or
    `own`."""
    beat: int = 0
    """Grows with each report; clocks of different hosts are never compared."""

    @property
    def place(self) -> str:
        """Where in the code it is, shortest words."""
        return self.stack[-1] if self.stack else ""

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, waiting for others."""
        return any(frame.startswith(MEETINGS) for frame in self.stack[-6:])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        known = json.loads(text)
        return cls(**{**known, "stack": tuple(known["stack"])})


class Here:
    """This process's phase. One a process, as a rank is one process; set by whoever runs a phase."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset("imports", time.monotonic() - age_s(os.getpid()))

    def reset(self, phase: str = "start", since: float | None = None) -> None:
        """Forget everything; the rank is in `phase` since monotonic time `since`."""
        self.pool, self.step = "", 0
        self.listeners: list[Callable[[Sequence[Report]], None]] = []
        """Called with everybody's reports every few seconds."""
        self._phases = [phase]
        self.failed_in = ""
        """The innermost phase that an exception came out of."""
        self._since = time.monotonic() if since is None else since
        self.spent: dict[str, float] = {}
        """Seconds in each phase, without those inside it, until now."""
        self._signature: tuple[object, ...] = ()
        self._moved = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is a phase, inside whatever phase this rank is in."""
        self._change([*self._phases, name])
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._change(self._phases[:-1])

    def begin(self, name: str) -> None:
        """The innermost phase is over, `name` takes its place."""
        self._change([*self._phases[:-1], name])

    def _change(self, phases: list[str]) -> None:
        with self._lock:
            now, name = time.monotonic(), self._phases[-1]
            self.spent[name] = self.spent.get(name, 0.0) + now - self._since
            self._since, self._phases = now, phases

    def look(self) -> tuple[str, float, float, tuple[str, ...]]:
        """Phase, seconds in it, seconds without any movement of the main thread, its stack (a sample, any thread)."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack, signature = _stack(frame)
        with self._lock:
            now, phase = time.monotonic(), self._phases[-1]
            signature = (phase, self._since, *signature)
            if signature != self._signature:
                self._signature, self._moved = signature, now
            return phase, now - self._since, now - self._moved, stack

    def startup(self) -> str:
        """`start-up 4.1 s: imports 2.0, inputs 0.9, …`, phases from a hundredth of a second up, in their order."""
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.spent.items() if seconds >= 0.01)
        return f"start-up {sum(self.spent.values()):.1f} s: {shown}"


def _stack(frame: FrameType | None) -> tuple[tuple[str, ...], tuple[object, ...]]:
    """The stack in words, and what tells whether anything has moved."""
    words: list[str] = []
    signature: list[object] = []
    while frame is not None:
        code = frame.f_code
        signature += [id(code), frame.f_lasti]
        if len(words) < STACK_FRAMES:
            words.append(f"{short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(reversed(words)), tuple(signature)


def short(file: str) -> str:
    """The file's path from its package on."""
    for mark in ("/site-packages/", "/spmd_rl/", "/lib/python3"):
        at = file.rfind(mark)
        if at >= 0:
            return file[at + (len(mark) if mark == "/site-packages/" else 1) :]
    return file


HERE = Here()
