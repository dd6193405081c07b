"""Weights & Biases. The only file that imports wandb."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import wandb

from spmd_rl.config import Config
from spmd_rl.observe.run_id import RunId
from spmd_rl.observe.tracking import Metrics, Sample


class WandbTracker:
    """A run in wandb, whose id lies in wandb.json of the run's folder."""

    _run: Any
    _id: RunId

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """Begin the run, or go on with it."""
        self._id = RunId(config, "wandb", start_step)
        self._run = wandb.init(
            project=config.trainer.project_name,
            name=config.trainer.experiment_name,
            id=self._id.id,
            resume="allow",
            dir=config.trainer.output_dir,
            config=asdict(config),
        )

    def log(self, metrics: Metrics, step: int) -> None:
        """All metrics of the step in one row."""
        if self._id.is_new(step):
            self._run.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """Replies as a table."""
        if self._id.is_new(step):
            columns = list(rows[0])
            data = [[str(row.get(column, "")) for column in columns] for row in rows]
            self._run.log({"samples": wandb.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """End the run's connection; it can be resumed."""
        self._run.finish()
