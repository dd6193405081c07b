"""SFT rows: the loss sees the assistant's own tokens, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.chat import ChatRows
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.prompts import Prompts
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def build(tmp_path: Path, *rows: dict[str, Any], tokenizer: Any = TOKENIZER, **options: Any) -> ChatRows:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ChatRows.build(DataConfig(**options), SourceConfig(files=[str(path)]), tokenizer)


def counted(rows: ChatRows, index: int = 0) -> str:
    row = rows.at(index)
    assert len(row.input_ids) == len(row.loss_mask)
    return TOKENIZER.decode([t for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m])


def test_messages_that_end_in_a_reply(tmp_path: Path) -> None:
    rows = build(tmp_path, {"messages": [USER, ASSISTANT]})
    assert TOKENIZER.decode(rows.at(0).input_ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>"
    )
    assert counted(rows) == "ho<|im_end|>"


def test_prompt_and_response_columns_give_the_same(tmp_path: Path) -> None:
    chat = build(tmp_path, {"messages": [USER, ASSISTANT]})
    columns = build(tmp_path, {"prompt": "hi", "reply": "ho"}, response_key="reply")
    assert columns.at(0) == chat.at(0)


def test_every_assistant_turn_counts_and_nothing_between(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}]
    rows = build(tmp_path, {"messages": [USER, ASSISTANT, *more]})
    assert counted(rows) == "ho<|im_end|>so<|im_end|>"
    assert "ho<|im_end|>\n<|im_start|>user\nand?" in TOKENIZER.decode(rows.at(0).input_ids)


def test_the_prompts_tokens_are_those_that_the_rollout_sees(tmp_path: Path) -> None:
    rows = build(tmp_path, {"prompt": "hi", "response": "ho"}, system_prompt="s")
    prompts = Prompts.build(DataConfig(system_prompt="s"), SourceConfig(files=[str(tmp_path / "t.jsonl")]), TOKENIZER)
    row, prompt = rows.at(0), prompts.at(0)
    assert row.input_ids[: len(prompt.prompt_ids)] == prompt.prompt_ids
    assert row.loss_mask == [0] * len(prompt.prompt_ids) + [1] * 3


def test_plain_text_ends_with_the_end_token(tmp_path: Path) -> None:
    rows = build(tmp_path, {"prompt": "1+1=", "response": "2"}, apply_chat_template=False)
    assert TOKENIZER.decode(rows.at(0).input_ids) == "1+1=2<|im_end|>"
    assert counted(rows) == "2<|im_end|>"


def test_overlong(tmp_path: Path) -> None:
    long = {"prompt": "x" * 30, "response": "y" * 30}
    short = {"prompt": "x", "response": "y"}
    limits = {"apply_chat_template": False, "max_prompt_length": 20, "max_response_length": 20}
    assert build(tmp_path, long, short, **limits).dropped == 1
    cut = build(tmp_path, long, short, overlong_prompts="truncate_right", **limits)
    assert counted(cut) == "y" * 10
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: the conversation has 61 tokens"):
        build(tmp_path, long, overlong_prompts="error", **limits)
    with pytest.raises(ConfigError, match="no conversation is left of 1: 1 have more than"):
        build(tmp_path, long, **limits)


def test_no_reply(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: no reply to learn from.*nothing in column 'response'.*answer"):
        build(tmp_path, {"prompt": "hi", "answer": "ho"})


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    only_last = tiny_tokenizer(
        "{% for m in messages %}{{ m['role'] }}:"
        "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert counted(build(tmp_path, {"messages": [USER, ASSISTANT]}, tokenizer=only_last)) == "ho;"
    with pytest.raises(ConfigError, match="renders turn 1 differently"):
        build(tmp_path, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}, tokenizer=only_last)


def test_the_epoch_order_runs_over_them(tmp_path: Path) -> None:
    rows = build(tmp_path, *({"prompt": f"p{i}", "response": "r"} for i in range(5)))
    batches = PromptOrder(rows, 2, epochs=1, drop_last=False)
    assert sorted(row.uid for _ in range(3) for row in batches.take()) == [0, 1, 2, 3, 4]
