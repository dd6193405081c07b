"""A reward worker: `python -m spmd_rl.rewards.worker FD PARENT_PID`. Speaks pickled tuples over the socket FD.

Gets ("load", specs, kwargs, data_sources), answers ("ready", signatures) or ("refused", why); then for each `Job` sends
the outcomes of its calls, one message a call, in order. Functions run in the main thread (math-verify's time limit
needs that). Imports no torch. A program of its own, not a `multiprocessing` child: that would run the parent's main
module again, torch and all.
"""

import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from spmd_rl.config import ConfigError
from spmd_rl.rewards.calls import Job, perform
from spmd_rl.rewards.loading import prepare

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Elsewhere than on Linux the closed socket
    ends it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit(0)


def serve(socket: Connection) -> None:
    """Answer the parent until it closes the socket."""
    _, specs, kwargs, data_sources = socket.recv()
    try:
        functions = prepare(specs, kwargs, data_sources)
    except ConfigError as error:
        socket.send(("refused", str(error)))
        return
    socket.send(("ready", [f.signature for f in functions]))
    while True:
        job: Job = socket.recv()
        for call in job.calls:
            socket.send(perform(call, job, functions))


def main() -> None:
    die_with(int(sys.argv[2]))
    # What a scheduler or a terminal sends to all processes of the job is for the rank to act on; its end is ours.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
