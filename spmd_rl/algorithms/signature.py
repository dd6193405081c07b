"""A function's parameters say what it needs; callers offer everything they have and `offered` hands over that part."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def parameters(fn: Callable[..., Any]) -> dict[str, bool]:
    """Name -> has a default, for each named parameter of `fn`."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: p.default is not inspect.Parameter.empty
        for p in inspect.signature(fn).parameters.values()
        if p.kind in named
    }


def offered(fn: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `values` that `fn` names, or all of it when `fn` takes **kwargs."""
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())
    return dict(values) if takes_all else {k: v for k, v in values.items() if k in parameters(fn)}
