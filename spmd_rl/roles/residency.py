"""Who holds the GPU now: before each phase, what it needs comes in and what may leave goes out (hot swap).

Every rank moves the same pieces at the same phase; nothing is sent between ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from spmd_rl.engines.host_pool import Moves
from spmd_rl.observe.memory import GIB

PHASES: dict[str, frozenset[str]] = {
    "weight_sync": frozenset({"actor.params", "rollout"}),
    "decode": frozenset({"rollout"}),
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

GENERATE = "generate"
"""This phase is two: the rollout role enters `weight_sync` when they are due, and `decode` when it needs the memory."""


class Piece(Protocol):
    """Something that can be on the device or not, as `engines.host_pool.Swap` says it. Calls may be repeated."""

    def leave(self) -> None:
        """Start to copy it to the host; it stays readable."""
        ...

    def free(self) -> None:
        """End a `leave`: wait for the copy and give up the device's memory."""
        ...

    def come(self) -> None:
        """Start to bring it back."""
        ...

    def settle(self) -> None:
        """End a `come`: from here on it may be used."""
        ...

    def take(self) -> tuple[Moves, Moves]:
        """What went out and what came back since the last call."""
        ...


@dataclass
class Residency:
    """The one object that moves pieces. A piece that was never registered stays where it is."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    early: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Phase -> pieces that are not needed yet, but have room there (`Plan.early`): they come while others work."""

    overlap: bool = True
    """Whether the weight sync has room for what is still leaving (`Plan.overlaps`)."""
    asleep: Callable[[], int] = int
    """Bytes of a sleeping rollout engine that torch still counts as allocated."""

    def register(self, name: str, piece: Piece) -> None:
        """Let `name` (as in PHASES) leave the device in phases that do not need it."""
        known = set().union(*PHASES.values())
        assert name in known, f"residency: piece {name!r} is needed by no phase; known are {sorted(known)}"
        self.pieces[name] = piece

    @contextmanager
    def hold(self, phase: str) -> Iterator[None]:
        """Make the device ready for `phase` of the step; `generate` is left to the rollout role."""
        if phase != GENERATE:
            self.enter(phase)
        yield

    def enter(self, phase: str) -> None:
        """Free what `phase` does not need, then bring what it does, and after that what has room already.

        In `weight_sync` what leaves is still being copied while weights are sent, if there is room; `decode` frees it.
        """
        needed = PHASES[phase]
        allowed = needed | self.early.get(phase, frozenset())
        for name, piece in self.pieces.items():
            if name not in allowed:
                piece.leave()
        if phase != "weight_sync" or not self.overlap:
            for piece in self.pieces.values():
                piece.free()
        if phase in ("weight_sync", "decode") and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # a rollout engine may have an allocator of its own
        for name in sorted(self.pieces, key=lambda name: name not in needed):
            if name in allowed:
                self.pieces[name].come()
        for name in needed & self.pieces.keys():
            self.pieces[name].settle()

    def take(self) -> dict[str, float]:
        """This rank's swaps since the last call: GB (2**30 bytes), GB/s while copying, seconds that the rank waited."""
        if not self.pieces:
            return {}
        out, back = Moves(), Moves()
        for piece in self.pieces.values():
            went, came = piece.take()
            out.add(went)
            back.add(came)
        return _metrics("swap_out", out) | _metrics("swap_in", back)


def _metrics(name: str, moves: Moves) -> dict[str, float]:
    size = moves.bytes / GIB
    return {
        f"perf/{name}_gb": size,
        f"perf/{name}_gb_per_s": size / moves.copying if moves.copying else 0.0,
        f"timing_s/{name}": moves.waiting,
    }
