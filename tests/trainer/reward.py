"""A reward that random text earns in part, so that groups of a model from scratch have a signal."""

import time
from typing import Any


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of digits and capitals in the reply, digits counting double."""
    marks = sum(2 * c.isdigit() + c.isupper() for c in solution_str)
    return marks / max(1, len(solution_str))


def length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Characters of the reply."""
    return float(len(solution_str))


def rarely(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 for a reply with two digits or more: groups of a model from scratch mostly agree on 0."""
    return float(sum(c.isdigit() for c in solution_str) >= 2)


def broken(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Of no use."""
    raise ValueError(f"no key\nin {len(data_source) > 0}")


def sometimes(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Raises for a reply of an odd number of characters."""
    if len(solution_str) % 2:
        raise ValueError("odd")
    return digits(data_source, solution_str, ground_truth)


def hangs(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Never comes back."""
    time.sleep(1000)
    return 0.0


def later(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, file: str, after: int
) -> float:
    """Raises once it was called so often; the file has a byte a call."""
    with open(file, "ab") as calls:
        calls.write(b".")
        if calls.tell() > after:
            raise ValueError("later")
    return digits(data_source, solution_str, ground_truth)


def never(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The same for all."""
    return 0.0
