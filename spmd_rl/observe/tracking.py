"""Where metrics and samples go: a `Tracker` per name in `observe.trackers`, all behind one `Trackers`.

Only the rank that writes has any; on the others `open_trackers(..., writes=False)` gives an empty one, and the trainer
calls it all the same. A run that resumes after `start_step` leaves no step twice in any of them.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.config import Config, ConfigError
from spmd_rl.observe.live import Report

Metrics = Mapping[str, float]
Sample = Mapping[str, Any]
"""One reply: uid, sample, prompt, response, score, ground_truth and whatever else is known of it."""


class Tracker(Protocol):
    """A place that keeps or shows a run."""

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """Open it. `start_step`: the last step that is done (0 for a fresh run). `facts`: what a header shows."""

    def log(self, metrics: Metrics, step: int) -> None:
        """The metrics of a step. Training and validation of one step may come in two calls."""

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """Replies of a step; `kind` is train or val."""

    def close(self) -> None:
        """Write out what is pending."""


TRACKERS: dict[str, tuple[str, str, str]] = {
    "jsonl": ("spmd_rl.observe.jsonl", "JsonlTracker", "json"),
    "tensorboard": ("spmd_rl.observe.tensorboard", "TensorboardTracker", "tensorboard"),
    "wandb": ("spmd_rl.observe.wandb", "WandbTracker", "wandb"),
    "mlflow": ("spmd_rl.observe.mlflow", "MlflowTracker", "mlflow"),
    "trackio": ("spmd_rl.observe.trackio", "TrackioTracker", "trackio"),
    "console": ("spmd_rl.observe.console", "ConsoleTracker", "rich"),
}
"""Name to (module, class, package it needs); the module is imported only on the rank that writes."""


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker], samples_per_step: int = -1) -> None:
        self._trackers = list(trackers)
        self._samples_per_step = samples_per_step

    def log(self, metrics: Metrics, step: int) -> None:
        """The metrics of a step, to all."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """At most `observe.samples_per_step` replies of a step, the first ones, to all; -1 means every one."""
        kept = list(rows) if self._samples_per_step < 0 else list(rows)[: self._samples_per_step]
        for tracker in self._trackers:
            if kept:
                tracker.samples(kept, step, kind)

    def say(self, text: str) -> None:
        """A line for whoever watches: to those trackers that show lines."""
        for tracker in self._trackers:
            if hasattr(tracker, "say"):
                tracker.say(text)

    def live(self, reports: Sequence[Report]) -> None:
        """What every rank does now, every few seconds from a thread of its own: to those trackers that show it."""
        for tracker in self._trackers:
            if hasattr(tracker, "live"):
                tracker.live(reports)

    def close(self) -> None:
        """Close all."""
        for tracker in self._trackers:
            tracker.close()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError when a tracker's package is not installed; imports nothing, so every rank can afford it."""
    for name in names:
        package = TRACKERS[name][2]
        if importlib.util.find_spec(package) is None:
            raise _missing(name, package)


def open_trackers(
    config: Config, writes: bool, start_step: int = 0, facts: Mapping[str, str] | None = None
) -> Trackers:
    """The trackers of `config.observe`, started; none where `writes` is false.

    `facts` are lines for the console's header: model, layout, ranks, sizes, `steps` for the number of steps.
    Raises ConfigError when a tracker's package is not installed.
    """
    if not writes:
        return Trackers([])
    Path(config.trainer.output_dir).mkdir(parents=True, exist_ok=True)
    trackers = [_make(name) for name in config.observe.trackers]
    for tracker in trackers:
        tracker.start(config, start_step, facts or {})
    return Trackers(trackers, config.observe.samples_per_step)


def _make(name: str) -> Tracker:
    module, cls, package = TRACKERS[name]
    try:
        made: Tracker = getattr(importlib.import_module(module), cls)()
    except ImportError as error:
        raise _missing(name, error.name or package) from error
    return made


def _missing(name: str, package: str) -> ConfigError:
    return ConfigError(
        f"observe.trackers holds {name}, but the package {package} is not installed: pip install {package},"
        f" or leave {name} out of observe.trackers"
    )
