"""What a run is called in a tracking service, kept in its folder so that a resumed run goes on in the same one."""

import json
import uuid
from pathlib import Path

from spmd_rl.config import Config


class RunId:
    """The id, and the last step that the service was told; steps up to it are not sent again."""

    def __init__(self, config: Config, service: str, start_step: int) -> None:
        """Read the id of a resumed run, or make a new one for a fresh run (`start_step` 0)."""
        self._file = Path(config.trainer.output_dir) / f"{service}.json"
        self.id, self.last_step = uuid.uuid4().hex[:12], -1
        if start_step > 0 and self._file.exists():
            known = json.loads(self._file.read_text())
            self.id, self.last_step = known["id"], known["last_step"]
        self.is_resumed = self.last_step >= 0
        self._already = self.last_step
        self._save()

    def rename(self, id: str) -> None:
        """Keep the id that the service itself gave."""
        self.id = id
        self._save()

    def is_new(self, step: int) -> bool:
        """Whether an earlier life of this run has not sent the step yet; remembers it."""
        if step <= self._already:
            return False
        if step > self.last_step:
            self.last_step = step
            self._save()
        return True

    def _save(self) -> None:
        self._file.write_text(json.dumps({"id": self.id, "last_step": self.last_step}))
