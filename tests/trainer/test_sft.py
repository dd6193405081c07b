"""SFT: the loss is that of a plain transformers model, the same on any ranks; a run goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from spmd_rl import train
from spmd_rl.config.load import compose
from spmd_rl.data.chat import ChatRow, ChatRows
from spmd_rl.data.order import PromptOrder
from spmd_rl.models.loading import load_tokenizer, resolve
from spmd_rl.observe.metrics import deterministic
from spmd_rl.trainer.sft import chat_batch, row_metrics
from tests.world import Worlds

SMALL = [
    "experiment=sft_tiny",
    "data.train.size=60",
    "data.val.task=chain_sum",
    "data.val.size=10",
    "data.val.seed=9",
    "data.val.task_kwargs={min_terms:3,max_terms:3,min_digits:1,max_digits:1}",
    "data.train_batch_size=14",
    "actor.ppo_mini_batch_size=7",
    "actor.engine.max_tokens_per_micro_batch=300",
    "actor.optim.schedule=constant",
    "actor.optim.warmup_steps=0",
    "observe.trackers=[jsonl]",
    "trainer.test_freq=0",
    "trainer.total_training_steps=3",
]


def run(worlds: Worlds, size: int, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run on `size` ranks."""
    argv = [*SMALL, *overrides, f"trainer.output_dir={folder}"]
    assert worlds[size].run(train.main, argv) == [0] * size
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steady(row: dict[str, Any]) -> dict[str, float]:
    """What the clock does not decide."""
    return deterministic(row)


def test_a_conversation_is_cut_at_its_first_counted_token() -> None:
    rows = [ChatRow(7, [1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), ChatRow(8, [6, 7], [0, 1])]
    batch = chat_batch(rows, [1, 0])
    assert batch["row_id"].tolist() == [1, 0]
    assert [r.tolist() for r in batch["prompts"].rows()] == [[6], [1, 2]]
    assert [r.tolist() for r in batch["responses"].rows()] == [[7], [3, 4, 5]]
    assert [r.tolist() for r in batch["response_mask"].rows()] == [[1.0], [1.0, 0.0, 1.0]]
    assert len(chat_batch(rows, [])) == 0
    assert row_metrics(rows)["perf/total_num_tokens"].finish() == 7
    assert row_metrics(rows)["response_length/mean"].finish() == pytest.approx(1.5)


def plain_loss(rows: list[ChatRow]) -> float:
    """Mean over all counted tokens by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny-digits"), dtype=torch.float32)
    losses = []
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row.input_ids])).logits[0, :-1]
            counted = torch.tensor(row.loss_mask[1:]).bool()
            losses.append(F.cross_entropy(logits, torch.tensor(row.input_ids[1:]), reduction="none")[counted])
    return float(torch.cat(losses).mean())


def test_the_loss_is_that_of_a_plain_model_on_any_ranks(worlds: Worlds, tmp_path: Path) -> None:
    config = compose([*SMALL, "actor.ppo_mini_batch_size=14"])
    rows = ChatRows.build(config.data, config.data.train, load_tokenizer(config.model))
    first = PromptOrder(rows, 14, seed=config.data.seed).take()
    one = run(worlds, 1, tmp_path / "one", "actor.ppo_mini_batch_size=14")
    assert one[1]["sft/loss"] == pytest.approx(plain_loss(first), rel=1e-5)
    two = run(worlds, 2, tmp_path / "two", "actor.ppo_mini_batch_size=14")
    assert [steady(row) for row in two] == [pytest.approx(steady(row), rel=1e-4) for row in one]


@pytest.mark.parametrize("layout", ["actor.engine.fsdp.fsdp_size=1", "actor.engine.fsdp.ulysses_size=2"])
def test_mini_batches_and_validation_on_other_layouts(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    one, two = run(worlds, 1, tmp_path / "one"), run(worlds, 2, tmp_path / "two", layout)
    assert [row["step"] for row in one] == [0, 1, 2, 3]
    assert [steady(row) for row in two] == [pytest.approx(steady(row), rel=1e-3) for row in one]
    assert one[3]["val-core/sft/loss"] < one[0]["val-core/sft/loss"] - 0.1
    assert one[1]["sft/grad_norm"] > 0


def test_a_run_goes_on_on_other_ranks(worlds: Worlds, tmp_path: Path) -> None:
    whole = run(worlds, 2, tmp_path / "whole", "data.val.task=null")
    run(worlds, 2, tmp_path / "cut", "data.val.task=null", "trainer.total_training_steps=2")
    cut = run(worlds, 1, tmp_path / "cut", "data.val.task=null")
    assert [steady(row) for row in cut] == [pytest.approx(steady(row), rel=1e-3) for row in whole]


def test_a_file_without_replies_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1 + 1 ="}\n')
    argv = [
        "experiment=sft_tiny",
        f"data.train.files=[{file}]",
        "data.train.task=null",
        f"trainer.output_dir={tmp_path}",
    ]
    assert worlds[2].run(train.main, argv) == [2, 2]
