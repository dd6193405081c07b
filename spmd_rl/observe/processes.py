"""What Linux says of a process: alive, stopped or gone, and where in the kernel it is."""

import contextlib
import os
from functools import cache
from pathlib import Path

GONE, STOPPED, RUNS, UNKNOWN = "gone", "stopped", "runs", "unknown"


@cache
def machine() -> str:
    """This boot of this host, and the process namespace: process numbers are comparable where it is equal."""
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip()
    with contextlib.suppress(OSError):
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{boot} {os.uname().nodename}"


def born(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone or the system does not say."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def age_s(pid: int) -> float:
    """Seconds since the process started; 0 when the system does not say."""
    uptime = _read(Path("/proc/uptime")).split()
    ticks = born(pid)
    return max(0.0, float(uptime[0]) - ticks / os.sysconf("SC_CLK_TCK")) if uptime and ticks else 0.0


def state(pid: int, started: int) -> str:
    """`gone`, `stopped` or `runs`; `unknown` where there is no /proc. `started`: what `born` said of it."""
    if not Path("/proc/self/stat").exists():
        return UNKNOWN
    fields = _fields(pid)
    if not fields or fields[0] in "ZX" or born(pid) != started:
        return GONE
    return STOPPED if fields[0] in "Tt" else RUNS


def kernel_place(pid: int) -> str:
    """`State: T (stopped), in do_signal_stop`, with the kernel's own stack where one may read it."""
    status = [line for line in _read(Path(f"/proc/{pid}/status")).splitlines() if line.startswith("State:")]
    where = _read(Path(f"/proc/{pid}/wchan"))
    words = [" ".join(status[0].split()) if status else "State: gone"]
    words += [f"in {where}"] if where not in ("", "0") else []
    stack = [line.split()[-1] for line in _read(Path(f"/proc/{pid}/stack")).splitlines()]
    words += [f"kernel stack {' < '.join(stack)}"] if stack else []
    return ", ".join(words)


def _fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (the name before them may hold spaces)."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
