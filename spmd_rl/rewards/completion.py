"""What is scored, and what comes of it."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.data.rows import Row


@dataclass(frozen=True)
class Completion:
    """One reply to one prompt."""

    row: Row
    uid: int
    """The prompt's; the replies of a group share it."""
    sample: int
    """Which of the group's."""
    prompt_text: str
    """The prompt as rendered."""
    text: str
    """The reply, without special tokens."""
    token_ids: list[int]
    """The reply's tokens."""

    @property
    def length(self) -> int:
        """Tokens of the reply."""
        return len(self.token_ids)


@dataclass
class Scored:
    """A reply's score."""

    score: float
    """Weighted sum of `parts`, with the over-long penalty; `reward.on_error` when a function failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """Each function's own score; 0 where a function passed (TRL's None), `reward.on_error` where it failed."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else the functions returned (`acc`, `pred` …)."""
    error: str | None = None
    """Why a function failed, with its traceback."""
