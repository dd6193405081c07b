"""What a rank holds of what happens elsewhere (law 5: the step has no `if rank`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Remote:
    """Stands for something on other pools: no rows, no shape; only which roles' ranks have it."""

    roles: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    """What this rank itself has measured beside it."""


class HasPlace(Protocol):
    """A rank's place: whether one of the roles lives on its pool."""

    def plays(self, *roles: str) -> bool: ...


class Placed(Protocol):
    """Anything that knows its rank's place."""

    @property
    def runtime(self) -> HasPlace: ...


S = TypeVar("S", bound=Placed)


def on(*roles: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R | Remote]]:
    """A method that runs on the pools of these roles; on other ranks the call returns a `Remote` at once."""

    def placed(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | Remote]:
        @wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R | Remote:
            return method(self, *args, **kwargs) if self.runtime.plays(*roles) else Remote(roles)

        return call

    return placed


def here(x: R | Remote) -> R:
    """What is on this rank for sure, by where it is called."""
    assert not isinstance(x, Remote), f"only ranks of {x.roles} have it"
    return x


def local(function: Callable[..., R], *args: Any) -> R | Remote:
    """function(*args) where all of them are here; a function of something remote is remote."""
    return next((arg for arg in args if isinstance(arg, Remote)), None) or function(*args)
