"""torchrun whose ranks share one set of imports: `python -m spmd_rl.torchrun OPTIONS OF TORCHRUN -m MODULE …`.

Importing torch and transformers is most of a start, and each of a host's ranks would do it for itself. So this process
does it once, before it has a thread or a CUDA context, and torchrun's own agent then forks the ranks from it (its
options --start-method fork and --run-path). After a failure the next ranks are there at once, too.
"""

import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

AGAIN_S = 2.0
"""A terminal and a wrapper may both send the same Ctrl-C."""
USER_ERROR = 2
"""Exit status of ranks that were called wrongly, and so torchrun's."""


def main(argv: list[str] | None = None) -> int:
    """Be torchrun. Anything but `-m` with a module is left to torchrun as it is. 0, USER_ERROR, or its exception."""
    gc.disable()  # a fifth of the imports' time goes into looking for garbage among what stays for good
    # what torchrun would set, but before torch reads it: one thread, and GPUs counted without touching CUDA
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from torch.distributed.elastic.multiprocessing import api as workers
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.run import parse_args, run

    args, asked = parse_args(sys.argv[1:] if argv is None else argv), Politely(lambda *_: None)
    if args.module:
        args.training_script = importlib.import_module(args.training_script).__file__
        args.module, args.run_path, args.start_method = False, True, "fork"
        os.register_at_fork(after_in_child=partial(forget_handlers, os.getpid()))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # the ranks inherit it: torchrun starts Python with -u
        workers._wrap = partial(until_done, workers._wrap)
        asked = Politely(workers._terminate_process_handler)
        workers._terminate_process_handler = asked  # type: ignore[assignment]
        workers.MultiprocessContext._start = asked.before(workers.MultiprocessContext._start)  # type: ignore[method-assign]
        workers.logger.addFilter(said_already)
    gc.freeze()  # so that no rank looks there either, which would copy the memory that the ranks share
    gc.enable()
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        tempfile.tempdir = folder  # what torchrun writes there it leaves behind
        try:
            record(run)(args)
        except ChildFailedError as error:
            if error.get_first_failure()[1].exitcode == USER_ERROR:
                return USER_ERROR
            raise
        except workers.SignalException as error:  # torchrun has ended the ranks
            return 128 + error.sigval
        finally:
            tempfile.tempdir = None
            gc.unfreeze()  # extension modules complain at the end of what is never let go
    return 128 + asked.number if asked.number else 0


class Politely:
    """torchrun's answer to SIGTERM and SIGINT, but that the first one is passed on to ranks that know how to end well.

    torchrun would give them 30 s, and a step can take longer. They get SIGUSR2, and torchrun waits for them as for any
    that are done; a second signal, or one while a rank still starts, ends them torchrun's way.
    """

    def __init__(self, otherwise: Callable[[int, Any], None]) -> None:
        self.otherwise, self.number, self.since = otherwise, 0, 0.0

    def __call__(self, number: int, frame: Any) -> None:
        """The signal's handler."""
        ranks = [rank.pid for rank in multiprocessing.active_children() if rank.pid]
        known = number in (signal.SIGTERM, signal.SIGINT) and all(map(ends_well, ranks))
        if number == self.number and time.monotonic() - self.since < AGAIN_S:
            return
        if self.number or not ranks or not known:
            self.otherwise(number, frame)
            return
        self.number, self.since = number, time.monotonic()
        for rank in ranks:
            os.kill(rank, signal.SIGUSR2)

    def before(self, start: Callable[[Any], None]) -> Callable[[Any], None]:
        """What torchrun does to start ranks, also those that take failed ones' places: after such a signal none do."""

        def begin(ranks: Any) -> None:
            if self.number:
                self.otherwise(self.number, None)
            start(ranks)

        return begin


def ends_well(pid: int) -> bool:
    """Whether a process has a handler for SIGUSR2, which would end any other one (Linux)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)


def until_done(act: Callable[..., None], *args: Any) -> None:
    """What a rank does, without torchrun's wait for its agent at the end: an agent that was told to end, or is gone,
    never answers, and the rank would stay."""
    act(*(AtOnce() if isinstance(arg, Event) else arg for arg in args))


class AtOnce:
    """An event that nobody waits for."""

    def wait(self) -> None:
        """Return."""


def said_already(line: logging.LogRecord) -> bool:
    """False for torchrun's words on a rank that was called wrongly: the rank has said it in plain ones."""
    told = "failed (exitcode" in str(line.msg)
    return not (told and isinstance(line.args, tuple) and line.args[:1] == (USER_ERROR,))


def forget_handlers(agent: int) -> None:
    """In a rank, signals do what they do in a new process: the agent's handlers, which it inherits, would raise in it
    where the agent means to end it. Temporary files are its own, too. `agent`: its process; what a rank itself forks is
    left alone."""
    if os.getppid() == agent:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tempfile.tempdir = None


if __name__ == "__main__":
    sys.exit(main())
