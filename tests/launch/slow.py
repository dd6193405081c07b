"""A reward that takes as long as a file says, so that a test can meet a run in the middle of a step."""

import os
import time
from pathlib import Path
from typing import Any


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of digits in the reply; the seconds a call are in the file $SLOW_REWARD."""
    if "SLOW_REWARD" in os.environ:
        time.sleep(float(Path(os.environ["SLOW_REWARD"]).read_text(encoding="utf-8")))
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
