"""What a reply is expected to be as long as, from those before it."""

from pathlib import Path
from typing import Any

from spmd_rl.config.load import compose
from spmd_rl.data.prompts import Prompt
from spmd_rl.data.rows import Row
from spmd_rl.trainer.lengths import Lengths


class Three:
    """Two prompts of one source, one of another."""

    fingerprint = 0

    def __len__(self) -> int:
        return 3

    def at(self, uid: int) -> Prompt:
        row = Row(uid % 3, "?", ["sums", "sums", "poems"][uid % 3], None, {})
        return Prompt(row, uid, [1], "")


class Alone:
    """The one rank of a run."""

    pool_rank = 0

    def plays(self, *roles: str) -> bool:
        return True


def lengths_of(how: str) -> Lengths:
    runtime: Any = Alone()
    return Lengths(compose(["experiment=tiny", f"rollout.balance={how}"]), runtime, Three())


def test_a_prompt_then_its_source_then_all(tmp_path: Path) -> None:
    lengths = lengths_of("expected_length")
    assert lengths.expected([0, 1, 2, 5]) == [1, 1, 1, 1]
    lengths.tokens_P[0], lengths.replies_P[0] = 25, 2
    assert lengths.expected([0, 3, 1, 2]) == [13, 13, 13, 13]
    lengths.tokens_P[2], lengths.replies_P[2] = 400, 4
    assert lengths.expected([0, 1, 2, 5]) == [13, 13, 100, 100]
    lengths.tokens_P[1], lengths.replies_P[1] = 3, 1
    assert lengths.expected([0, 1, 2]) == [13, 3, 100]
    again = lengths_of("expected_length")
    again.load(tmp_path)
    assert again.expected([0]) == [1]
    for name, data in lengths.files().items():
        data.numpy().tofile(tmp_path / name)
    again.load(tmp_path)
    assert again.expected([0, 1, 2]) == [13, 3, 100]
    without = lengths_of("none")
    without.load(tmp_path)
    assert without.expected([0]) is None
    assert without.files() == {}
