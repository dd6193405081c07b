"""Wall-clock time of the step's phases."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Adds up seconds a phase; a phase may be entered several times a step, and phases may nest."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize` waits for the device (torch.cuda.synchronize), so that a phase ends when its work has."""
        self._synchronize = synchronize
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, also when it raises."""
        start = time.perf_counter()
        try:
            yield
            if self._synchronize is not None:
                self._synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds a phase since the last call; starts anew."""
        taken, self.seconds = self.seconds, {}
        return taken
