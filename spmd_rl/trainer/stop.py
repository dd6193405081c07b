"""A run that is asked to end does so after its current step: SIGTERM, SIGUSR2 or Ctrl-C, to any of its ranks."""

import os
import signal
import time
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
STDERR = 2
AGAIN_S = 2.0
"""One Ctrl-C reaches a rank twice, from the terminal and from its launcher; what comes later is another one."""


class StopRequest:
    """Notes that this rank was asked to end."""

    def __init__(self, speaks: bool) -> None:
        """Takes the signals. `speaks`: say so at once, as a step can take minutes."""
        self.name, self._speaks, self._since = "", speaks, 0.0
        self._launcher = os.getppid()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def launcher_gone(self) -> bool:
        """Whether nobody is left who could have asked: Linux sent the signal as the launcher's process ended."""
        return bool(self) and os.getppid() != self._launcher

    def _note(self, number: int, frame: Any) -> None:
        """Raises KeyboardInterrupt at the second Ctrl-C."""
        if not self.name:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
            if self._speaks:  # without `print`, whose lock this very thread may hold
                os.write(STDERR, f"{self.name}: the run ends after this step; Ctrl-C again ends it at once\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._since > AGAIN_S:
            raise KeyboardInterrupt
