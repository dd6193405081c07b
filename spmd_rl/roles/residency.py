"""Who holds the GPU now: before each phase, what it needs comes in and what may leave goes out (hot swap).

Every rank moves the same pieces at the same phase; nothing is sent between ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES: dict[str, frozenset[str]] = {
    "weight_sync": frozenset({"actor.params", "rollout"}),
    "generate": frozenset({"actor.params", "rollout"}),
    "reward": frozenset({"reward.params"}),
    "old_log_prob": frozenset({"actor.params"}),
    "ref": frozenset({"ref.params"}),
    "teacher": frozenset({"teacher.params"}),
    "values": frozenset({"critic.params"}),
    "adv": frozenset(),
    "update_critic": frozenset({"critic.params", "critic.optimizer"}),
    "update_actor": frozenset({"actor.params", "actor.optimizer"}),
    "save": frozenset({"actor.params", "actor.optimizer", "critic.params", "critic.optimizer"}),
}
"""What must be on the device in each phase of the step (law 11)."""


@dataclass
class Piece:
    """Something that can be on the device or not. Both calls return the bytes they moved."""

    to_device: Callable[[], int]
    to_host: Callable[[], int]
    on_device: bool = True


@dataclass
class Residency:
    """The one object that moves pieces. A piece that was never registered stays where it is."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    bytes_in: dict[str, int] = field(default_factory=dict)
    """Last phase's bytes brought to the device, by piece."""
    bytes_out: dict[str, int] = field(default_factory=dict)
    """Last phase's bytes freed, by piece."""

    def register(
        self, name: str, to_device: Callable[[], int], to_host: Callable[[], int], on_device: bool = True
    ) -> None:
        """Let `name` (as in PHASES) leave the device in phases that do not need it."""
        known = set().union(*PHASES.values())
        assert name in known, f"residency: piece {name!r} is needed by no phase; known are {sorted(known)}"
        self.pieces[name] = Piece(to_device, to_host, on_device)

    @contextmanager
    def hold(self, phase: str) -> Iterator[None]:
        """Make the device ready for `phase`: first free what it does not need, then bring what it does."""
        needed = PHASES[phase]
        self.bytes_in, self.bytes_out = {}, {}
        for name, piece in self.pieces.items():
            if name not in needed and piece.on_device:
                self.bytes_out[name] = piece.to_host()
                piece.on_device = False
        for name, piece in self.pieces.items():
            if name in needed and not piece.on_device:
                self.bytes_in[name] = piece.to_device()
                piece.on_device = True
        yield

    def moved(self) -> tuple[int, int]:
        """(bytes brought in, bytes freed) by the last `hold`."""
        return sum(self.bytes_in.values()), sum(self.bytes_out.values())
