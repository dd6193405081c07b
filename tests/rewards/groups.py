"""Groups of replies to score."""

from typing import Any

from spmd_rl.data.rows import Row
from spmd_rl.rewards import Completion


def group(
    *texts: str,
    truth: Any = "18",
    source: str = "openai/gsm8k",
    messages: Any = "What is 9 + 9?",
    uid: int = 0,
    columns: dict[str, Any] | None = None,
) -> list[Completion]:
    """One prompt's replies; a reply's tokens are its characters' codes."""
    row = Row(uid, messages, source, truth, {"index": uid}, columns or {}, f"t.jsonl:{uid + 1}")
    return [Completion(row, uid, i, "prompt", text, [ord(c) for c in text]) for i, text in enumerate(texts)]
