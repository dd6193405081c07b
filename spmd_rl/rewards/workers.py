"""The worker processes of one rank: started, fed, timed, killed and replaced."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.rewards.calls import Call, Job, Outcome
from spmd_rl.rewards.loading import Signature

START_S = 300.0
"""Seconds in which a worker must have imported its functions: a cold network disk is slow."""
GIVE_UP = 4
"""Calls of one function that may run out of time (or take their worker down) for each worker, in one `run`, before the
function's other calls in it are given up: thousands of hanging calls would else hold the rank for hours."""

Done = Callable[[int, Call, list[Outcome]], None]
"""Receives (group, call, outcomes)."""


class Worker:
    """One process. `job` is what it works on, `call` which of its calls, `deadline` when that is late."""

    def __init__(self, hello: tuple[Any, ...]):
        ours, theirs = socket.socketpair()
        # The package and the user's modules must be found as they are here; no GPU is seen; torch, should a function
        # import it, keeps to one core. A group of its own, so that what a function starts can be killed with it.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "spmd_rl.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()
        self.socket = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # it died at once: found out when we listen
            self.socket.send(hello)
        self.ready = False
        self.job: Job | None = None
        self.call = 0
        self.deadline = time.monotonic() + START_S

    def give(self, job: Job, timeout_s: float) -> None:
        self.job, self.call, self.deadline = job, 0, time.monotonic() + timeout_s
        with contextlib.suppress(ConnectionError):
            self.socket.send(job)

    def kill(self) -> int:
        """End the process and what it started; returns its exit status, negative for a signal."""
        status = self.process.poll()
        if not self.socket.closed:  # killed once, its number may belong to another process
            self.socket.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        ended = self.process.wait()
        return ended if status is None else status


class Workers:
    """`size` workers that all know the same functions.

    A call that takes longer than `timeout_s` seconds, or takes its process down, costs that process: it is killed and
    replaced, and the job goes on behind the call. Raises `ConfigError` when a function cannot be loaded.
    """

    def __init__(
        self, size: int, functions: Sequence[str], kwargs: dict[str, Any], data_sources: Sequence[str], timeout_s: float
    ):
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self._hello = ("load", list(functions), dict(kwargs), list(data_sources))
        # PR_SET_PDEATHSIG speaks of the thread that forked: this one lives as long as we do, whoever calls `run`.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-workers")
        self._workers = [self._start() for _ in range(size)]
        self.signatures: list[Signature] = self._first_ready()

    def _start(self) -> Worker:
        return self._starter.submit(Worker, self._hello).result()

    def _first_ready(self) -> list[Signature]:
        """Wait for all to have loaded; what the functions look like."""
        signatures: list[Signature] = []
        for worker in self._workers:
            word, signatures = self._first_word(worker)
            if word != "ready":
                self.close()
                raise ConfigError(str(signatures))
            worker.ready = True
        return signatures

    def _first_word(self, worker: Worker) -> tuple[str, Any]:
        try:
            return (
                worker.socket.recv() if worker.socket.poll(START_S) else ("late", f"no reward worker in {START_S:g} s")
            )
        except (EOFError, ConnectionError):
            return "ended", f"the reward worker ended with status {worker.kill()} while it loaded the functions"

    def run(self, jobs: Sequence[Job], done: Done) -> None:
        """Have all calls of all jobs made; `done` is called for each, in no particular order. Always returns."""
        queue = deque(jobs)
        lost: Counter[int] = Counter()
        while queue or any(w.job for w in self._workers):
            self._give_up(queue, lost, done)
            for worker in self._workers:
                if worker.ready and worker.job is None and queue:
                    worker.give(queue.popleft(), self.timeout_s)
            busy = [w for w in self._workers if w.job or not w.ready]
            if not busy:
                continue
            patience = max(0.0, min(w.deadline for w in busy) - time.monotonic())
            heard = wait([w.socket for w in busy], patience)
            for worker in busy:
                if worker.socket in heard:
                    self._hear(worker, queue, lost, done)
                elif time.monotonic() >= worker.deadline:
                    self._late(worker, queue, lost, done)

    def _hear(self, worker: Worker, queue: deque[Job], lost: Counter[int], done: Done) -> None:
        try:
            message = worker.socket.recv()
        except Exception as error:  # EOF, a reset, or bytes that are no pickle: the process is of no more use
            reason = "" if isinstance(error, EOFError | ConnectionError) else f": {error}"
            self.counts["crashes"] += 1
            self._lose(worker, "the worker process ended with status {status}" + reason, queue, lost, done)
            return
        if not worker.ready:
            worker.ready = message[0] == "ready"
            if not worker.ready:
                self._lose(worker, f"a replaced worker could not load the functions: {message[1]}", queue, lost, done)
            return
        job = worker.job
        assert job is not None, "a worker spoke without a job"
        done(job.group, job.calls[worker.call], message)
        worker.call += 1
        worker.deadline = time.monotonic() + self.timeout_s
        if worker.call == len(job.calls):
            worker.job = None

    def _late(self, worker: Worker, queue: deque[Job], lost: Counter[int], done: Done) -> None:
        what = (
            f"no result within reward.timeout_s={self.timeout_s:g} s" if worker.ready else f"no start in {START_S:g} s"
        )
        self.counts["timeouts"] += 1
        self._lose(worker, what, queue, lost, done)

    def _lose(self, worker: Worker, why: str, queue: deque[Job], lost: Counter[int], done: Done) -> None:
        """Kill and replace a worker; the call it was at has failed, the rest of its job goes back to the queue."""
        status = worker.kill()
        job = worker.job
        if job is not None:
            call = job.calls[worker.call]
            lost[call.function] += 1
            done(job.group, call, [Outcome(math.nan, {}, why.replace("{status}", str(status)))] * len(call.samples))
            if rest := job.calls[worker.call + 1 :]:
                queue.appendleft(replace(job, calls=rest))
        else:  # it never started: count it against every function, so that this ends
            lost.update(range(len(self.signatures)))
        self._workers[self._workers.index(worker)] = self._start()

    def _give_up(self, queue: deque[Job], lost: Counter[int], done: Done) -> None:
        """Fail the queued calls of functions that have cost too many workers."""
        hopeless = {function for function, n in lost.items() if n >= GIVE_UP * len(self._workers)}
        if not hopeless:
            return
        jobs = list(queue)
        queue.clear()
        for job in jobs:
            for call in (c for c in job.calls if c.function in hopeless):
                self.counts["given_up"] += len(call.samples)
                why = f"not called: {lost[call.function]} calls of this function took too long or ended their process"
                done(job.group, call, [Outcome(math.nan, {}, why)] * len(call.samples))
            if rest := [c for c in job.calls if c.function not in hopeless]:
                queue.append(replace(job, calls=rest))

    def pids(self) -> list[int]:
        """Process ids, for the doctor and for tests."""
        return [w.process.pid for w in self._workers]

    def close(self) -> None:
        """Kill all workers. May be called twice."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._starter.shutdown()
