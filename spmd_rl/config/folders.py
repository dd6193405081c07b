"""Folders that a user names to be written to."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmd_rl.config import ConfigError


@contextmanager
def writing(setting: str, folder: Path) -> Iterator[None]:
    """Make the folder and see that it takes files, then write to it in the block. What the system has against any of
    this is a ConfigError that names `setting`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        yield
    except OSError as error:
        raise ConfigError(
            f"{setting}={folder} cannot be written to ({error.strerror}: {error.filename or folder}); make room there, "
            "or choose another folder"
        ) from error
