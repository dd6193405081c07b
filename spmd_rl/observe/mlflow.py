"""MLflow. The only file that imports mlflow."""

from collections.abc import Mapping, Sequence

import mlflow

from spmd_rl.config import Config
from spmd_rl.config.load import as_yaml
from spmd_rl.observe.run_id import RunId
from spmd_rl.observe.tracking import Metrics, Sample


class MlflowTracker:
    """A run in MLflow (MLFLOW_TRACKING_URI says where), whose id lies in mlflow.json of the run's folder."""

    _id: RunId

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """Begin the run, or go on with it."""
        self._id = RunId(config, "mlflow", start_step)
        mlflow.set_experiment(config.trainer.project_name)
        if self._id.is_resumed:
            mlflow.start_run(run_id=self._id.id)
        else:
            self._id.rename(mlflow.start_run(run_name=config.trainer.experiment_name).info.run_id)
            mlflow.log_text(as_yaml(config), "config.yaml")

    def log(self, metrics: Metrics, step: int) -> None:
        """All metrics of the step; MLflow's names may not hold `@`."""
        if self._id.is_new(step):
            mlflow.log_metrics({name.replace("@", "_at_"): float(value) for name, value in metrics.items()}, step=step)

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """Not sent: MLflow keeps numbers and files."""

    def close(self) -> None:
        """End the run."""
        mlflow.end_run()
