"""A run's config in a folder of the test's own."""

from pathlib import Path

import pytest

from spmd_rl.config import Config
from spmd_rl.config.load import compose


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return compose(["experiment=tiny", f"trainer.output_dir={tmp_path}/run", "trainer.project_name=p"])
