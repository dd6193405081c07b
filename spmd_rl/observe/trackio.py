"""Trackio. The only file that imports trackio."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import trackio

from spmd_rl.config import Config
from spmd_rl.observe.run_id import RunId
from spmd_rl.observe.tracking import Metrics, Sample


class TrackioTracker:
    """A run in trackio, found again by its name (the experiment's, with the id of trackio.json)."""

    _id: RunId

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """Begin the run, or go on with it."""
        self._id = RunId(config, "trackio", start_step)
        trackio.init(
            project=config.trainer.project_name,
            name=f"{config.trainer.experiment_name}-{self._id.id}",
            config=asdict(config),
            resume="allow",
        )

    def log(self, metrics: Metrics, step: int) -> None:
        """All metrics of the step in one row."""
        if self._id.is_new(step):
            trackio.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """Not sent: trackio keeps numbers."""

    def close(self) -> None:
        """Send what is pending."""
        trackio.finish()
