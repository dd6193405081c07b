"""Prompts: what a model is given."""

import json
from pathlib import Path

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.prompts import Prompts
from tests.tiny import tiny_tokenizer

GSM8K = SourceConfig(files=[str(Path(__file__).parent / "gsm8k_20.jsonl")])
KEYS = {"prompt_key": "question", "answer_key": "answer", "data_source": "openai/gsm8k"}


def source(tmp_path: Path, *prompts: object) -> SourceConfig:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return SourceConfig(files=[str(path)])


def test_gsm8k_through_the_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    prompts = Prompts.build(DataConfig(**KEYS, max_prompt_length=2000), GSM8K, tokenizer)
    assert len(prompts) == 20
    prompt = prompts.at(41)
    assert prompt.uid == 41
    assert prompt.row.index == 1
    assert prompt.text == f"<|im_start|>user\n{prompt.row.messages}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.prompt_ids) == prompt.text
    assert prompt.prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_system_prompt_is_put_before_prompts_without_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    data = DataConfig(system_prompt="Be brief.")
    prompts = Prompts.build(data, source(tmp_path, "a", own), tiny_tokenizer())
    assert prompts.texts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")
    assert prompts.texts[1].startswith("<|im_start|>system\nmine<|im_end|>")
    assert prompts.rows[0].messages == "a", "reward functions see the source's prompt"


def test_text_as_it_is_needs_no_template(tmp_path: Path) -> None:
    bare = tiny_tokenizer(chat_template=None)
    prompts = Prompts.build(DataConfig(apply_chat_template=False), source(tmp_path, "1+1="), bare)
    assert prompts.texts == ["1+1="]
    assert bare.decode(prompts.prompt_ids[0]) == "1+1="
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template; set model\.chat_template"):
        Prompts.build(DataConfig(), source(tmp_path, "1+1="), bare)


def test_a_template_that_refuses_names_the_row(tmp_path: Path) -> None:
    strict = tiny_tokenizer("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: the chat template refuses roles \[system, user\]: no system"):
        Prompts.build(DataConfig(system_prompt="s"), source(tmp_path, "a"), strict)


class TestOverlong:
    """Limit 10 tokens, one a byte."""

    def build(self, tmp_path: Path, policy: str, *prompts: str) -> Prompts:
        data = DataConfig(apply_chat_template=False, max_prompt_length=10, overlong_prompts=policy)
        return Prompts.build(data, source(tmp_path, *prompts), tiny_tokenizer())

    def test_filter(self, tmp_path: Path) -> None:
        prompts = self.build(tmp_path, "filter", "0123456789", "0123456789a", "short")
        assert prompts.texts == ["0123456789", "short"]
        assert (prompts.dropped, prompts.truncated) == (1, 0)

    def test_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"t\.jsonl:2: the prompt has 11 tokens > data\.max_prompt_length=10"):
            self.build(tmp_path, "error", "0123456789", "0123456789a")

    @pytest.mark.parametrize(("policy", "kept"), [("truncate_left", "123456789a"), ("truncate_right", "0123456789")])
    def test_truncate(self, tmp_path: Path, policy: str, kept: str) -> None:
        prompts = self.build(tmp_path, policy, "0123456789a")
        assert tiny_tokenizer().decode(prompts.prompt_ids[0]) == kept
        assert (prompts.dropped, prompts.truncated) == (0, 1)

    def test_all_filtered_away(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"all 2 prompts are longer than .*=10 tokens \(the shortest has 11\)"):
            self.build(tmp_path, "filter", "0123456789a", "0123456789ab")

    def test_unknown_policy(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"overlong_prompts='drop' is unknown; use filter, error"):
            self.build(tmp_path, "drop", "a")


def test_fingerprint_changes_with_the_prompts(tmp_path: Path) -> None:
    def fingerprint(*prompts: str) -> int:
        return Prompts.build(DataConfig(), source(tmp_path, *prompts), tiny_tokenizer()).fingerprint

    assert fingerprint("a", "b") == fingerprint("a", "b")
    assert len({fingerprint("a", "b"), fingerprint("b", "a"), fingerprint("ab"), fingerprint("a")}) == 4
