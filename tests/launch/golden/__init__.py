"""What launchers render, kept as files. After a wanted change: `WRITE_GOLDEN=1 python -m pytest tests/launch`."""

import os
from pathlib import Path

HERE = Path(__file__).parent


def agrees(name: str, text: str) -> None:
    """Compare with the file; AssertionError shows the difference."""
    if os.environ.get("WRITE_GOLDEN"):
        (HERE / name).write_text(text, encoding="utf-8")
    assert text == (HERE / name).read_text(encoding="utf-8")
