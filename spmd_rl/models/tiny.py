"""Models made from scratch in a second, the same everywhere: for tests and for looking around."""

import string
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from spmd_rl.models.checkpoint import save_folder
from spmd_rl.models.random_weights import random_region, random_tensors

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
ROLES = ["system", "user", "assistant"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character (newline and tab too), one for each chat role; ChatML; 104 tokens.

    `<|im_end|>` ends a turn and the text, `<|endoftext|>` pads, anything else is `<|unknown|>`.
    """
    characters = [c for c in string.printable if c.isprintable() or c in "\n\t"]
    vocabulary = {token: i for i, token in enumerate([PAD, START, END, UNKNOWN, *ROLES, *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        extra_special_tokens=[START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def _digits(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=104,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        **more,
    )


def make_tiny_digits(folder: Path) -> None:
    """A Llama of 2 layers, hidden size 64, 4 heads and 2 key-value heads (so that 2 divides all): 0.1 M parameters."""
    _make(folder, _digits())


def make_tiny_classifier(folder: Path) -> None:
    """The same decoder with a head of one label, as a reward model."""
    head = random_region("score.weight", (1, 64), (slice(None), slice(None)), seed=0, std=0.2)
    _make(folder, _digits(architectures=["LlamaForSequenceClassification"], num_labels=1), [("score.weight", head)])


def make_tiny_moe(folder: Path) -> None:
    """A Qwen3-MoE of 2 layers, hidden size 64, 4 experts of which each token takes 2."""
    _make(
        folder,
        Qwen3MoeConfig(
            vocab_size=104,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.05,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=2,
        ),
    )


def _make(folder: Path, config: PretrainedConfig, more: Iterable[tuple[str, Tensor]] = ()) -> None:
    save_folder(
        folder,
        config,
        chain(random_tensors(config, seed=0), more),
        tokenizer=character_tokenizer(),
        generation_config=GenerationConfig(pad_token_id=0, eos_token_id=2),
        dtype=None,
    )
