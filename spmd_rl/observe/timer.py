"""Wall-clock time of the step's phases, which are what the rank says that it does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spmd_rl.observe.live import HERE


class Timer:
    """Adds up seconds a phase; a phase may be entered several times a step, and phases may nest."""

    def __init__(
        self, synchronize: Callable[[], None] | None = None, waited: Callable[[], float] | None = None
    ) -> None:
        """`synchronize` waits for the device (torch.cuda.synchronize), so that a phase ends when its work has.

        `waited`: seconds that this process has waited for others so far, which are no work of a phase.
        """
        self._synchronize = synchronize
        self._waited = waited or (lambda: 0.0)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, waits: bool = True) -> Iterator[None]:
        """Time the block, also when it raises; with or without what was only waiting."""
        start, waited = time.perf_counter(), self._waited()
        try:
            with HERE.phase(name):
                yield
                if self._synchronize is not None:
                    self._synchronize()
        finally:
            spent = time.perf_counter() - start - (0.0 if waits else self._waited() - waited)
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def take(self) -> dict[str, float]:
        """The seconds a phase since the last call; starts anew."""
        taken, self.seconds = self.seconds, {}
        return taken
