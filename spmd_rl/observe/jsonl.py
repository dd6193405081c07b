"""metrics.jsonl (a line a call) and samples/<step>.jsonl in the run's folder."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from spmd_rl.config import Config
from spmd_rl.observe.tracking import Metrics, Sample

_PREFIX = {"train": "", "val": "val_"}


class JsonlTracker:
    """Appends to files; a resumed run first cuts off what comes after the step it resumes from."""

    _folder: Path
    _file: IO[str]

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """Open metrics.jsonl, cut to `start_step`; a fresh run puts an older one aside as metrics.previous.jsonl."""
        self._folder = Path(config.trainer.output_dir)
        if start_step == 0 and (self._folder / "metrics.jsonl").exists():
            os.replace(self._folder / "metrics.jsonl", self._folder / "metrics.previous.jsonl")
        truncate(self._folder, start_step if start_step > 0 else -1)
        self._file = (self._folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, metrics: Metrics, step: int) -> None:
        """One line, at once on the disk's side of the process."""
        self._file.write(json.dumps({"step": step, **{name: _plain(value) for name, value in metrics.items()}}) + "\n")
        self._file.flush()

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """samples/<step>.jsonl (validation: val_<step>.jsonl), a line a reply."""
        folder = self._folder / "samples"
        folder.mkdir(exist_ok=True)
        lines = (
            json.dumps({"step": step, **{k: _plain(v) for k, v in row.items()}}, ensure_ascii=False) for row in rows
        )
        (folder / f"{_PREFIX[kind]}{step}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def truncate(folder: Path, last_step: int) -> None:
    """Drop what a run wrote after `last_step`, and a torn last line; -1 drops everything."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        kept = [line for line in read_metrics(metrics) if line["step"] <= last_step]
        fresh = metrics.with_suffix(".jsonl.new")
        fresh.write_text("".join(json.dumps(_plain_row(line)) + "\n" for line in kept), encoding="utf-8")
        os.replace(fresh, metrics)
    for file in (folder / "samples").glob("*.jsonl"):
        number = file.stem.removeprefix(_PREFIX["val"])
        if number.isdigit() and int(number) > last_step:
            file.unlink()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in order; "nan" and "inf" are numbers again, a torn last line is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        rows.append({name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in row.items()})
    return rows


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """A value that strict JSON can hold: numbers of numpy and torch as Python's, NaN and infinities as text."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return value
    return str(value)
