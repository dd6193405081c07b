"""A reward that random text earns in part, so that groups of a model from scratch have a signal."""

from typing import Any


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of digits and capitals in the reply, digits counting double."""
    marks = sum(2 * c.isdigit() + c.isupper() for c in solution_str)
    return marks / max(1, len(solution_str))
