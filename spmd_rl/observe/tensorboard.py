"""TensorBoard event files in the run's folder."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from spmd_rl.config import Config
from spmd_rl.config.load import as_yaml
from spmd_rl.observe.tracking import Metrics, Sample


class TensorboardTracker:
    """Scalars under tensorboard/; a resumed run tells TensorBoard to forget the steps after the one it resumes from."""

    _writer: SummaryWriter

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """A new event file, from the step after `start_step` on; a fresh run puts older ones aside."""
        folder = Path(config.trainer.output_dir) / "tensorboard"
        if start_step == 0 and folder.exists():
            shutil.rmtree(folder.with_suffix(".previous"), ignore_errors=True)
            folder.rename(folder.with_suffix(".previous"))
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step > 0 else None)
        if start_step == 0:
            indented = "\n".join(f"    {line}" for line in as_yaml(config).splitlines())
            self._writer.add_text("config", indented, 0)

    def log(self, metrics: Metrics, step: int) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """The first replies as text."""
        for place, row in enumerate(rows[:4]):
            shown = f"    {row.get('prompt', '')}\n\n    {row.get('response', '')}\n\nscore {row.get('score', '')}"
            self._writer.add_text(f"samples/{place}", shown, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
