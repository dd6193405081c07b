"""What each of a Slurm job's tasks does: start its rank (or the host's torchrun), hand signals on, say how it ended.

Pickled by value, so it imports the standard library only. A rank that is asked to stop (time limit, preemption,
requeue) finishes its step and saves; then `$SPMD_RL_ATTEMPT/interrupted` tells the job script to queue the job again. A
rank that fails leaves `$SPMD_RL_ATTEMPT/errors/rank_R@HOST.json`, or as long as it lingers, the same a folder above.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class TimeIsUp(Exception):
    """The run has not ended within the time that was left."""


class Task:
    """One task; runs `command` to its end."""

    def __init__(self, command: list[str], stop_s: int, hosts: list[dict[str, str]]) -> None:
        """`command`: words that start with $ are taken from the task's environment, to which `hosts` adds what differs
        between hosts. `stop_s`: seconds between the warning and the moment at which the run is given up, to go on
        from its last checkpoint."""
        self.command, self.stop_s, self.hosts = command, stop_s, hosts
        self.asked = ""
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Ends the process with the rank's status; returns after a run that came to its end."""
        attempt = Path(os.environ["SPMD_RL_ATTEMPT"])
        rank, host = os.environ["SLURM_PROCID"], socket.gethostname()
        os.environ.update(self.hosts[int(os.environ["SLURM_NODEID"])])
        record = attempt / "errors" / f"rank_{rank}@{host}.json"
        mine = attempt / record.name
        attempt.mkdir(parents=True, exist_ok=True)
        log_to(attempt.parent.parent / f"{attempt.parent.name.removesuffix('.attempts')}_{rank}_log.out")
        print(f"attempt {attempt.name}: task {rank} on {host}", flush=True)
        handlers = {n: signal.signal(n, self.note) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
        signal.signal(signal.SIGALRM, self.give_up)
        words = [os.environ[word[1:]] if word.startswith("$") else word for word in self.command]
        try:
            self.child = subprocess.Popen(words, env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(mine)})
            status = self.child.wait()
        except TimeIsUp:
            print(f"{self.asked}: not at the end of its step after {self.stop_s} s; given up", flush=True)
            status = self.end_child()
        finally:
            signal.alarm(0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.asked:
            print(f"{self.asked}: the rank ended with {describe(status)}", flush=True)
            (attempt / "interrupted").touch()
            sys.exit(0)
        if status != 0:
            record.parent.mkdir(exist_ok=True)
            if mine.exists():
                mine.rename(record)  # which keeps the time at which the rank wrote it
            else:
                record.write_text(json.dumps(wordless(status)), encoding="utf-8")
            sys.exit(status if status > 0 else 128 - status)

    def note(self, number: int, frame: Any) -> None:
        """Pass the wish to stop on to the ranks, as SIGUSR2, which torchrun does not act on by itself."""
        if not self.asked:
            self.asked = signal.Signals(number).name
            signal.alarm(self.stop_s)
        for pid in ranks_of(self.child.pid) if self.child else []:
            try:
                os.kill(pid, signal.SIGUSR2)
            except ProcessLookupError:
                continue

    def give_up(self, number: int, frame: Any) -> None:
        raise TimeIsUp

    def end_child(self) -> int:
        """Kill the ranks, and torchrun where it started them."""
        assert self.child is not None, "only a child that was started runs out of time"
        for pid in {*ranks_of(self.child.pid), self.child.pid}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return self.child.wait()


def log_to(file: Path) -> None:
    """Have this process and the ranks write there. In a job of several parts srun gives its files other numbers."""
    with file.open("ab", buffering=0) as log:
        sys.stdout.flush()
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def ranks_of(pid: int) -> list[int]:
    """The rank that the process is, or the ranks that it started when it is torchrun."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if Path(f"/proc/{pid}").exists() else []
    if b"spmd_rl.torchrun" not in words:
        return [pid]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wordless(status: int) -> dict[str, Any]:
    """The record of a process that left none, in torch's format."""
    extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
    return {"message": {"message": f"ended with {describe(status)}", "extraInfo": extra}}


def describe(status: int) -> str:
    """A process's end in words."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"
