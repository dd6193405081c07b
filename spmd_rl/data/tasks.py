"""Problems made on the fly by reasoning_gym, and its own scorers. The only file that imports `reasoning_gym`."""

import difflib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from spmd_rl.config import ConfigError, how_to_install

DATA_SOURCE = "reasoning_gym/"
"""Rows of task X have data_source `reasoning_gym/X`."""


class _Later(ModuleType):
    """Stands in for a module, and imports it when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


def _reasoning_gym() -> ModuleType:
    loaded = sys.modules.get("reasoning_gym")
    if loaded is not None:
        return loaded
    # one task of a hundred needs it, and it imports all of matplotlib: half of the time that the others would wait for
    later = sys.modules.setdefault("cellpylib", _Later("cellpylib"))
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"tasks by name need the package `reasoning-gym`; {how_to_install('quickstart')}") from error
    finally:
        if isinstance(later, _Later):
            del sys.modules["cellpylib"]
    return reasoning_gym


def check_task(task: str) -> None:
    """Raise `ConfigError` naming the nearest task when there is none called `task`."""
    known = _reasoning_gym().factory.DATASETS
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1, cutoff=0.0)
        raise ConfigError(f"unknown reasoning_gym task '{task}'; the nearest of its {len(known)} tasks is '{near[0]}'")


def make_dataset(task: str, kwargs: dict[str, Any], size: int, seed: int) -> Any:
    """The task's data set: entry i is a pure function of (kwargs, seed, i). Bad settings raise `ConfigError`."""
    check_task(task)
    try:
        return _reasoning_gym().create_dataset(task, size=size, seed=seed, **kwargs)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning_gym task '{task}' refuses task_kwargs={kwargs}: {error}") from error


def read_task(task: str, kwargs: dict[str, Any], size: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of `size` problems, in verl's row format; columns `question` and `answer` are there too."""
    dataset = make_dataset(task, kwargs, size, seed)
    for index in range(size):
        entry = dict(dataset[index])
        yield (
            f"{DATA_SOURCE}{task}[{index}]",
            {
                "prompt": entry["question"],
                "question": entry["question"],
                "answer": entry["answer"],
                "data_source": DATA_SOURCE + task,
                "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
                "extra_info": {"index": index, "entry": entry, "task_kwargs": dict(kwargs)},
            },
        )


_SCORERS: dict[str, Callable[[str | None, dict[str, Any]], float]] = {}


def task_scorer(data_source: str, kwargs: dict[str, Any]) -> Callable[[str | None, dict[str, Any]], float]:
    """The task's own `score_answer(answer, entry)` in 0..1, under the settings that made the entry."""
    key = f"{data_source} {kwargs!r}"
    if key not in _SCORERS:
        _SCORERS[key] = make_dataset(data_source.removeprefix(DATA_SOURCE), kwargs, size=1, seed=0).score_answer
    return _SCORERS[key]
