"""A reward that any text has, so that random weights learn from something: a checksum of its characters, 0..1."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """The sum of the character codes modulo 101, over 100."""
    return (sum(map(ord, solution_str)) % 101) / 100
