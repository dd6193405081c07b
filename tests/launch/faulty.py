"""A rollout that raises on rank 3 when it samples for the second time."""

from typing import Any


class Faulty:
    """The built-in rollout, but for that."""

    def __init__(self, built_in: Any, rank: int) -> None:
        self._built_in, self._rank, self._calls = built_in, rank, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built_in, name)

    def generate(self, *args: Any) -> Any:
        self._calls += 1
        if self._rank == 3 and self._calls == 2:
            raise ValueError("planted on rank 3")
        return self._built_in.generate(*args)


def rollout(built_in: Any, config: Any, runtime: Any) -> Faulty:
    """For trainer.roles."""
    return Faulty(built_in, runtime.env.rank)
