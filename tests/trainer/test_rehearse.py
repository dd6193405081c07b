"""Rehearsal: the real step at full length on real ranks, slower than the plan's bounds, and no trace of it."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from spmd_rl import train
from spmd_rl.config.load import compose
from spmd_rl.data.chat import ChatRow, ChatRows
from spmd_rl.data.prompts import Prompts
from spmd_rl.data.rows import Row
from spmd_rl.trainer.rehearse import long_replies, longest
from tests.trainer.runs import BASE
from tests.world import Worlds

TWO_UPDATES = [*BASE, "actor.ppo_mini_batch_size=2", "actor.use_kl_loss=true"]


def printed(argv: list[str]) -> tuple[int, str]:
    """Exit status and standard output of `train`."""
    with redirect_stdout(io.StringIO()) as text:
        status = train.main([*argv, "trainer.rehearse=true"])
    return status, text.getvalue()


@pytest.mark.parametrize(
    ("argv", "phases"),
    [
        (TWO_UPDATES, {"generate", "reward", "old log-probs", "ref log-probs", "advantages", "update", "step"}),
        (
            ["experiment=sft_tiny", "data.train.size=20", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4"],
            {"update", "step"},
        ),
    ],
    ids=["rl", "sft"],
)
def test_measured_is_never_below_the_bound(worlds: Worlds, tmp_path: Path, argv: list[str], phases: set[str]) -> None:
    folder = tmp_path / "run"
    (first, text), (second, silence) = worlds[2].run(printed, [*argv, f"trainer.output_dir={folder}"])
    assert (first, second, silence) == (0, 0, "")
    table = {line[:14].strip(): line[14:].split() for line in text.splitlines()[2 : 2 + len(phases)]}
    assert set(table) == phases
    for phase, (seconds, bound, measured, estimated, *_) in table.items():
        assert float(seconds) >= float(bound), phase
        assert measured == "-", "a CPU does not say"
        assert phase in ("reward", "advantages") or float(bound) > 0
        assert estimated != "-"
    assert not list(tmp_path.iterdir())


def test_rows_are_as_long_as_allowed() -> None:
    config = compose(["experiment=tiny", "data.max_prompt_length=5", "data.max_response_length=2"])
    prompts = Prompts([Row(0, "text", "", None, {})], [[7, 8]], ["text"], 0, 0, 1)
    assert longest(prompts, config).prompt_ids == [[7, 8, 7, 8, 7]]
    chats = longest(ChatRows([[7, 8, 9]], [[0, 1, 1]], 0, 1), config)
    assert chats.at(0) == ChatRow(0, [7, 8, 9, 7, 8, 9, 7], [0, 0, 0, 0, 0, 1, 1])
    assert long_replies(config).rollout.ignore_eos
