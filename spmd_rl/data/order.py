"""The order in which rows are met: seeded, each row exactly once an epoch, the same on every rank of any world.

The order is a function of (seed, epoch, number of rows) and of nothing else, so no rank needs to tell another one where
it is, and a resumed run continues with the very next row on any number of ranks.
"""

from typing import Generic, Protocol, TypedDict, TypeVar

import numpy as np

from spmd_rl.config import ConfigError

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Rows(Protocol[T_co]):
    """What an order runs over: `Prompts`, `ChatRows`."""

    @property
    def fingerprint(self) -> int:
        """Changes when the rows do."""
        ...

    def __len__(self) -> int: ...

    def at(self, uid: int) -> T_co:
        """The row uid % len, marked with its uid."""
        ...


class OrderState(TypedDict):
    """Where an order stands; JSON-able."""

    epoch: int
    offset: int
    rows: int
    fingerprint: int
    seed: int
    shuffle: bool


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..n-1 (int64), a pure function of its arguments on every machine and numpy version.

    Rows are sorted by a hash (splitmix64, Steele et al. 2014) of (seed, epoch, row): numpy promises no stable shuffle.
    """
    epoch_key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_mix(np.arange(n, dtype=np.uint64) ^ epoch_key), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class PromptOrder(Generic[T]):
    """Hands rows out epoch by epoch; `uid = epoch * len(rows) + index` is never given twice.

    A batch never spans two epochs: with `drop_last` an epoch's last rows are left out when fewer than asked for (other
    ones each epoch, if shuffled), else they come as a smaller batch. `epochs=None` goes on for ever.
    """

    def __init__(
        self,
        rows: Rows[T],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        epochs: int | None = None,
    ):
        if batch_size < 1:
            raise ConfigError(f"batch size {batch_size}: at least 1 row a step is needed")
        if drop_last and batch_size > len(rows):
            raise ConfigError(
                f"data.train_batch_size={batch_size} > {len(rows)} rows, and data.drop_last=true leaves smaller "
                f"batches out; use at most {len(rows)}, or data.drop_last=false"
            )
        self.rows, self.batch_size = rows, batch_size
        self.seed, self.shuffle, self.drop_last, self.epochs = seed, shuffle, drop_last, epochs
        self.epoch, self.offset = 0, 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def exhausted(self) -> bool:
        """All epochs are used up (a last, too small batch may still make the next `take` find nothing)."""
        return self.epochs is not None and self.epoch >= self.epochs

    def steps_per_epoch(self) -> int:
        """Batches of `batch_size` in an epoch."""
        full, rest = divmod(len(self.rows), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def total_steps(self) -> int | None:
        """Batches in all epochs; None without an end."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch()

    def take(self, n: int | None = None) -> list[T]:
        """The next n rows (`batch_size` unless given); empty once all epochs are used up."""
        n = self.batch_size if n is None else n
        left = len(self.rows) - self.offset
        if left < n and self.drop_last:
            if n > len(self.rows):
                raise ConfigError(
                    f"{n} rows were asked for at once, an epoch has {len(self.rows)}; set data.drop_last=false"
                )
            self._next_epoch()
            left = len(self.rows)
        if self.exhausted:
            return []
        order, first_uid = self._epoch_rows(), self.epoch * len(self.rows)
        taken = order[self.offset : self.offset + n]
        self.offset += len(taken)
        if self.offset == len(self.rows):
            self._next_epoch()
        return [self.rows.at(first_uid + int(index)) for index in taken]

    def _next_epoch(self) -> None:
        self.epoch, self.offset = self.epoch + 1, 0

    def _epoch_rows(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            n = len(self.rows)
            self._order = self.epoch, epoch_order(n, self.seed, self.epoch) if self.shuffle else np.arange(n)
        return self._order[1]

    def state_dict(self) -> OrderState:
        """Where the next `take` continues, and over which rows in which order."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "rows": len(self.rows),
            "fingerprint": self.rows.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: OrderState) -> None:
        """Continue with the very next row. Other rows, or another order of them, raise `ConfigError`."""
        now = self.state_dict()
        for key in ("rows", "seed", "shuffle", "fingerprint"):
            if state[key] != now[key]:  # type: ignore[literal-required]
                what = {"rows": "number of prompts", "fingerprint": "prompts (their token ids)"}.get(key, f"data.{key}")
                raise ConfigError(
                    f"resume: the checkpoint's {what} differ: {state[key]} then, {now[key]} now; "  # type: ignore[literal-required]
                    "put the data settings back, or start anew with trainer.resume=never"
                )
        self.epoch, self.offset = state["epoch"], state["offset"]
