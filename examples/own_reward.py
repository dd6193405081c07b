"""Reward functions of one's own, in verl's signature and in TRL's.

    spmd-rl train experiment=tiny reward.functions=[examples/own_reward.py:compute_score]
    spmd-rl train experiment=tiny reward.functions=[examples/own_reward.py:digits_and_brevity]

Several are summed, with reward.weights. They are told apart by their parameters' names; see docs/rewards.md.
"""

import re
from typing import Any

NUMBER = re.compile(r"-?\d+")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """verl's: one reply a call. 1 for the right number, less for a number that is off, 0 for none."""
    found = NUMBER.findall(solution_str)
    if not found:
        return 0.0
    return 1.0 / (1.0 + abs(int(found[-1][:9]) - int(ground_truth)))


def digits_and_brevity(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """TRL's: all replies to a prompt at once. The share of digits, and a bonus for the group's shortest reply."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    shortest = min(map(len, texts))
    return [sum(c.isdigit() for c in text) / max(len(text), 1) + 0.1 * (len(text) == shortest) for text in texts]
