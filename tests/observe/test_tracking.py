"""Trackers: what is kept, and that a resumed run leaves no step twice."""

import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config import Config, ConfigError
from spmd_rl.observe import tracking
from spmd_rl.observe.jsonl import read_metrics
from spmd_rl.observe.metrics import deterministic
from spmd_rl.observe.tracking import TRACKERS, check_trackers, open_trackers


def run(config: Config, steps: range, start_step: int = 0, names: tuple[str, ...] = ("jsonl",)) -> None:
    """Log `steps` as a run does that was started after `start_step`."""
    config.observe.trackers = list(names)
    trackers = open_trackers(config, writes=True, start_step=start_step)
    for step in steps:
        trackers.log({"critic/score/mean": step / 10, "timing_s/step": float(start_step)}, step)
        trackers.samples([{"uid": step, "prompt": "1+1", "response": "2", "score": 1.0}], step)
    trackers.close()


def test_jsonl_of_a_resumed_run_equals_that_of_an_uninterrupted_one(config: Config) -> None:
    folder = Path(config.trainer.output_dir)
    run(config, range(1, 7))
    whole = [deterministic(row) for row in read_metrics(folder / "metrics.jsonl")]
    run(config, range(1, 6))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "torn')
    run(config, range(4, 7), start_step=3)
    resumed = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert [deterministic(row) for row in resumed] == whole
    assert resumed[-1]["timing_s/step"] == 3.0


def test_resuming_drops_later_samples_and_a_fresh_run_keeps_the_older_metrics_aside(config: Config) -> None:
    folder = Path(config.trainer.output_dir)
    run(config, range(1, 6))
    run(config, range(3, 4), start_step=2)
    assert sorted(file.name for file in (folder / "samples").iterdir()) == ["1.jsonl", "2.jsonl", "3.jsonl"]
    run(config, range(1, 2))
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1]
    assert [row["step"] for row in read_metrics(folder / "metrics.previous.jsonl")] == [1, 2, 3]
    assert sorted(file.name for file in (folder / "samples").iterdir()) == ["1.jsonl"]


def test_numbers_that_json_does_not_know_survive(config: Config) -> None:
    config.observe.trackers = ["jsonl"]
    trackers = open_trackers(config, writes=True)
    trackers.log({"a": math.nan, "b": math.inf, "c": 1.5}, 1)
    trackers.close()
    file = Path(config.trainer.output_dir) / "metrics.jsonl"
    assert json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    row = read_metrics(file)[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, 1.5)


def test_only_the_asked_number_of_samples_is_kept(config: Config) -> None:
    config.observe.trackers, config.observe.samples_per_step = ["jsonl"], 2
    trackers = open_trackers(config, writes=True)
    trackers.samples([{"uid": uid, "response": "größer"} for uid in range(5)], 3)
    trackers.close()
    lines = (Path(config.trainer.output_dir) / "samples" / "3.jsonl").read_text().splitlines()
    assert [json.loads(line)["uid"] for line in lines] == [0, 1]
    assert "größer" in lines[0]


def test_ranks_that_do_not_write_leave_nothing(config: Config) -> None:
    trackers = open_trackers(config, writes=False)
    trackers.log({"a": 1.0}, 1)
    trackers.samples([{"uid": 0}], 1)
    trackers.close()
    assert not Path(config.trainer.output_dir).exists()


def test_tensorboard_shows_each_step_once_after_a_resume(config: Config) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(config, range(1, 6), names=("tensorboard",))
    run(config, range(4, 7), start_step=3, names=("tensorboard",))
    events = event_accumulator.EventAccumulator(str(Path(config.trainer.output_dir) / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("critic/score/mean")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    assert scalars[-1].value == pytest.approx(0.6)
    run(config, range(1, 3), names=("tensorboard",))
    events = event_accumulator.EventAccumulator(str(Path(config.trainer.output_dir) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("critic/score/mean")] == [1, 2]


class FakeService(types.ModuleType):
    """Stands in for wandb, mlflow and trackio: remembers what it was told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[int] = []

    def Table(self, **options: Any) -> object:
        return options

    def _note(self, call: str, **options: Any) -> "FakeService":
        self.calls.append((call, options))
        return self

    def init(self, **options: Any) -> "FakeService":
        return self._note("init", **options)

    def set_experiment(self, name: str) -> None:
        self._note("set_experiment", name=name)

    def start_run(self, **options: Any) -> "FakeService":
        self.info = types.SimpleNamespace(run_id="given-by-mlflow")
        return self._note("start_run", **options)

    def log_text(self, *_: Any) -> None: ...

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "critic/score/mean" in metrics:
            self.steps.append(step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        assert not any("@" in name for name in metrics)
        self.steps.append(step)

    def finish(self) -> None: ...

    def end_run(self) -> None: ...


@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_services_go_on_in_the_same_run_without_doubled_steps(
    service: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeService(service)
    monkeypatch.setitem(sys.modules, service, fake)
    monkeypatch.delitem(sys.modules, TRACKERS[service][0], raising=False)
    run(config, range(1, 6), names=(service,))
    run(config, range(4, 8), start_step=3, names=(service,))
    assert fake.steps == [1, 2, 3, 4, 5, 6, 7]
    starts = [options for call, options in fake.calls if call in ("init", "start_run")]
    if service == "wandb":
        assert starts[0]["id"] == starts[1]["id"]
        assert starts[1]["resume"] == "allow"
    elif service == "mlflow":
        assert starts == [{"run_name": "tiny"}, {"run_id": "given-by-mlflow"}]
    else:
        assert starts[0]["name"] == starts[1]["name"]
    run(config, range(1, 2), names=(service,))
    fresh = next(options for call, options in reversed(fake.calls) if call in ("init", "start_run"))
    assert fresh != starts[1]
    monkeypatch.delitem(sys.modules, TRACKERS[service][0])


def test_a_missing_package_is_said_before_anything_runs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", ("spmd_rl.observe.wandb", "WandbTracker", "no_such_package"))
    with pytest.raises(ConfigError, match="holds wandb, but the package no_such_package is not installed: pip install"):
        check_trackers(["jsonl", "wandb"])
    check_trackers(["jsonl", "console", "tensorboard"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "spmd_rl.observe.wandb", raising=False)
    config.observe.trackers = ["wandb"]
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        open_trackers(config, writes=True)


@pytest.mark.parametrize("package", ["wandb", "mlflow", "trackio", "matplotlib"])
def test_each_optional_package_is_imported_in_one_file(package: str) -> None:
    root = Path(tracking.__file__).parents[1]
    pattern = re.compile(rf"^\s*(import|from) {package}\b", re.M)
    assert len([file for file in root.rglob("*.py") if pattern.search(file.read_text())]) == 1
