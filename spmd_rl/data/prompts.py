"""Prompts: rows tokenised once, at start, the same on every rank."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.rows import Row, load_rows
from spmd_rl.data.template import Tokenizer, check_template, encode, render

__all__ = ["Prompt", "PromptOrder", "Prompts", "fingerprint_of"]


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to be sampled from."""

    row: Row
    """What its reward needs."""
    uid: int
    """epoch * len(prompts) + index: never twice in a run. Keys the sampling noise and names the group."""
    prompt_ids: list[int]
    """Token ids, special tokens included, at most data.max_prompt_length."""
    text: str
    """The rendered text (whole, also where prompt_ids were truncated)."""


@dataclass(frozen=True)
class Prompts:
    """A data set's prompts in source order, after the over-long ones were dealt with."""

    rows: list[Row]
    prompt_ids: list[list[int]]
    texts: list[str]
    dropped: int
    """Over-long ones that were left out (data.overlong_prompts=filter)."""
    truncated: int
    """Over-long ones that were cut."""
    fingerprint: int
    """A checksum of all token ids: a resumed run must have the same."""

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, uid: int) -> Prompt:
        """The prompt of a uid; any epoch."""
        index = uid % len(self.rows)
        return Prompt(self.rows[index], uid, self.prompt_ids[index], self.texts[index])

    @classmethod
    def build(
        cls, data: DataConfig, source: SourceConfig, tokenizer: Tokenizer, train_rows: list[Row] | None = None
    ) -> "Prompts":
        """Load and tokenise a source; `train_rows` when it is the validation set (see `load_rows`)."""
        return cls.of_rows(load_rows(source, data, train_rows=train_rows), data, tokenizer)

    @classmethod
    def of_rows(cls, rows: list[Row], data: DataConfig, tokenizer: Tokenizer) -> "Prompts":
        """Tokenise rows. Raises `ConfigError` when the template is missing or refuses, or when no prompt fits."""
        check_template(tokenizer, data)
        texts = [render(tokenizer, row.chat, data, row.where) for row in rows]
        ids = encode(tokenizer, texts, data)
        limit = data.max_prompt_length
        over = [i for i, row_ids in enumerate(ids) if len(row_ids) > limit]
        drop = set(over) if overlong_policy(data) == "filter" else set()
        if over and data.overlong_prompts == "error":
            raise ConfigError(
                f"{rows[over[0]].where}: the prompt has {len(ids[over[0]])} tokens > data.max_prompt_length={limit} "
                f"({len(over)} of {len(rows)} prompts are longer); raise it, or set data.overlong_prompts=filter"
            )
        if len(drop) == len(rows):
            raise ConfigError(
                f"all {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens (the shortest has "
                f"{min(map(len, ids))}), so none is left; raise it, or set data.overlong_prompts=truncate_left"
            )
        kept = [i for i in range(len(rows)) if i not in drop]
        cut = [truncate(ids[i], limit, data.overlong_prompts) for i in kept]
        return cls(
            [rows[i] for i in kept],
            cut,
            [texts[i] for i in kept],
            dropped=len(drop),
            truncated=len(over) - len(drop),
            fingerprint=fingerprint_of(cut),
        )


OVERLONG = ("filter", "error", "truncate_left", "truncate_right")


def overlong_policy(data: DataConfig) -> str:
    """`data.overlong_prompts`, checked."""
    if data.overlong_prompts not in OVERLONG:
        raise ConfigError(f"data.overlong_prompts='{data.overlong_prompts}' is unknown; use {', '.join(OVERLONG)}")
    return data.overlong_prompts


def truncate(ids: list[int], limit: int, policy: str) -> list[int]:
    """At most `limit` ids: truncate_left keeps the end (the question mostly), truncate_right the start."""
    if len(ids) <= limit:
        return ids
    return ids[-limit:] if policy == "truncate_left" else ids[:limit]


def fingerprint_of(ids: Sequence[Sequence[int]]) -> int:
    """CRC-32 of token ids and of where rows end."""
    checksum = 0
    for row in ids:
        checksum = zlib.crc32(np.asarray([len(row), *row], dtype=np.int64).tobytes(), checksum)
    return checksum
