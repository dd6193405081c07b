"""Picking a function: by its name in one of our dicts, or a user's own by where it lives.

resolve("grpo", ADVANTAGES)                   # a name
resolve("my_rl/losses.py:soft_clip", ...)     # a file and a function in it
resolve("my_package.losses:soft_clip", ...)   # an importable module and a function in it
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd_rl.config import ConfigError


def resolve(name: str, registry: Mapping[str, Any], what: str = "name") -> Any:
    """The entry called `name`, or the object at `file.py:function` or `package.module:function`.

    ConfigError when there is none: it names the nearest entry and lists them all.
    """
    if name in registry:
        return registry[name]
    if ":" in name:
        return _load(name)
    near = difflib.get_close_matches(name, registry, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(
        f"unknown {what} '{name}': {hint}Known are {', '.join(sorted(registry))}; "
        "your own is given as path/to/file.py:function or package.module:function"
    )


def _load(place: str) -> Any:
    source, _, attribute = place.rpartition(":")
    module = _file_module(Path(source)) if source.endswith(".py") else _module(source, place)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise ConfigError(f"'{place}': {source} has no '{attribute}'; it has {', '.join(public) or 'no functions'}")
    return getattr(module, attribute)


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"'{path}' is not a file (looked in {Path.cwd()})")
    name = f"user:{path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"no loader for {path}"
    assert spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"'{place}': module '{name}' cannot be imported: {error}") from error
