"""From a name in `reward.functions` to a function that can be called; mistakes are found before the first call."""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.data.tasks import DATA_SOURCE as TASK_SOURCE
from spmd_rl.data.tasks import check_task
from spmd_rl.rewards.functions import REWARDS, import_math_verify, rule_for

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class Signature:
    """How a function wants to be called. Picklable: workers load the function, the rank only needs to know this."""

    name: str
    """Short, unique in the run: names the metric `reward/<name>`."""
    spec: str
    """As in reward.functions."""
    style: str
    """verl (one reply a call) or trl (a whole prompt group a call)."""
    accepts: tuple[str, ...]
    """Parameter names."""
    required: tuple[str, ...]
    """Those without a default."""
    open: bool
    """Takes **kwargs."""

    def takes(self, name: str) -> bool:
        """Whether a keyword argument of this name may be passed."""
        return self.open or name in self.accepts


@dataclass(frozen=True)
class Function:
    """A loaded function with its own keyword arguments."""

    signature: Signature
    call: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


def prepare(specs: Sequence[str], kwargs: Mapping[str, Any], data_sources: Sequence[str]) -> list[Function]:
    """Load the functions, and import now what they would import at their first call, under its time limit."""
    functions = load_functions(specs, kwargs)
    rules = set(specs)
    if "auto" in rules:
        rules |= {rule_for(source) for source in data_sources}
    if "reasoning_gym" in rules:
        for source in data_sources:
            if source.startswith(TASK_SOURCE):
                check_task(source.removeprefix(TASK_SOURCE))
    if "math_verify" in rules:
        import_math_verify()
    return functions


def load_functions(specs: Sequence[str], kwargs: Mapping[str, Any]) -> list[Function]:
    """Load all of `reward.functions`. A key of `reward.kwargs` goes to every function that takes it; one that is a
    function's name holds keyword arguments for that function only. `ConfigError` for whatever cannot work."""
    loaded = [(spec, *_load(spec)) for spec in specs]
    short = [name for _, name, _ in loaded]
    out: list[Function] = []
    for spec, name, call in loaded:
        signature = describe(name if short.count(name) == 1 else spec, spec, call)
        own = kwargs.get(name)
        shared = {k: v for k, v in kwargs.items() if k not in short and signature.takes(k)}
        given = {**shared, **own} if isinstance(own, Mapping) else shared
        _check_kwargs(signature, given)
        out.append(Function(signature, call, given))
    for key in kwargs:
        if key not in short and not any(key in f.kwargs for f in out):
            near = difflib.get_close_matches(key, [p for f in out for p in f.signature.accepts], n=1)
            hint = f"; the nearest parameter is '{near[0]}'" if near else ""
            raise ConfigError(f"reward.kwargs.{key}: none of {', '.join(specs)} takes it{hint}")
    return out


def _check_kwargs(signature: Signature, given: Mapping[str, Any]) -> None:
    for key in given:
        if not signature.takes(key):
            raise ConfigError(
                f"reward.kwargs.{signature.name}.{key}: {signature.spec} takes {', '.join(signature.accepts)}"
            )
    if signature.style == "verl":
        missing = [p for p in signature.required if p not in given and p not in VERL_NAMES]
        if missing:
            raise ConfigError(f"reward '{signature.spec}' needs reward.kwargs.{missing[0]}")


def describe(name: str, spec: str, call: Callable[..., Any]) -> Signature:
    """The function's `Signature`; its style is told from its parameters' names."""
    parameters = inspect.signature(call).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(p.name for p in named)
    if "completions" in names:
        style = "trl"
    elif "solution_str" in names:
        style = "verl"
    else:
        raise ConfigError(
            f"reward '{spec}': parameters ({', '.join(names)}) fit neither verl's (data_source, solution_str, "
            "ground_truth, extra_info=None, **kwargs) nor TRL's (prompts, completions, **columns)"
        )
    required = tuple(p.name for p in named if p.default is p.empty)
    return Signature(name, spec, style, names, required, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _load(spec: str) -> tuple[str, Callable[..., Any]]:
    """(short name, function) of a name, `file.py:function` or `module:function`."""
    if ":" not in spec and not spec.endswith(".py"):
        if spec not in REWARDS:
            near = difflib.get_close_matches(spec, REWARDS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"reward.functions: unknown reward '{spec}'; the nearest is '{near}', known are "
                f"{', '.join(sorted(REWARDS))}; your own is path/to/file.py:function or module:function"
            )
        return spec, REWARDS[spec]
    where, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "compute_score")
    module = _import_file(where, spec) if where.endswith(".py") else _import_module(where, spec)
    call = getattr(module, name, None)
    if not callable(call):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ConfigError(f"reward '{spec}': no function '{name}' there; it has {', '.join(known) or 'none'}")
    return name, call


def _import_file(path: str, spec: str) -> ModuleType:
    path = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(path):
        raise ConfigError(f"reward '{spec}': no such file: {path}")
    name = os.path.splitext(os.path.basename(path))[0]
    found = importlib.util.spec_from_file_location(name, path)
    assert found and found.loader, f"{path}: a .py file always has a loader"  # noqa: PT018
    module = importlib.util.module_from_spec(found)
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))  # so that the file can import its neighbours
    sys.modules.setdefault(name, module)  # dataclasses and pickle look a module up by its name
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward '{spec}' cannot be imported:\n{traceback.format_exc(limit=-3)}") from error
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"reward '{spec}' cannot be imported:\n{traceback.format_exc(limit=-3)}") from error
