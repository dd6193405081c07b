"""Chat data for SFT: token ids, and which of them the loss counts (the assistant's own)."""

from dataclasses import dataclass

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.prompts import fingerprint_of, overlong_policy, truncate
from spmd_rl.data.rows import Row, load_rows
from spmd_rl.data.template import Messages, Tokenizer, check_template, encode, render, with_system

Piece = tuple[str, bool]
"""Text, and whether the loss counts it."""


@dataclass(frozen=True)
class ChatRow:
    """One conversation of L tokens."""

    uid: int
    input_ids: list[int]
    """[L]"""
    loss_mask: list[int]
    """[L]: 1 where the token is the assistant's own, its end-of-turn token included; token 0 is never counted."""


@dataclass(frozen=True)
class ChatRows:
    """A data set's conversations in source order; `PromptOrder` runs over them as over `Prompts`."""

    input_ids: list[list[int]]
    loss_masks: list[list[int]]
    dropped: int
    """Over-long ones that were left out."""
    fingerprint: int
    """As `Prompts.fingerprint`."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def at(self, uid: int) -> ChatRow:
        """The conversation of a uid; any epoch."""
        index = uid % len(self)
        return ChatRow(uid, self.input_ids[index], self.loss_masks[index])

    @classmethod
    def build(
        cls, data: DataConfig, source: SourceConfig, tokenizer: Tokenizer, train_rows: list[Row] | None = None
    ) -> "ChatRows":
        """Load and tokenise. A row is a conversation whose last turn is the assistant's, or a prompt and a reply
        (`data.response_key`). `data.overlong_prompts` says what becomes of conversations longer than both limits."""
        check_template(tokenizer, data)
        rows = load_rows(source, data, train_rows=train_rows)
        pieces = [pieces_of(tokenizer, conversation(row, data), data, row.where) for row in rows]
        tokenised = _encode_pieces(tokenizer, pieces, data)
        limit = data.max_prompt_length + data.max_response_length
        policy = overlong_policy(data)
        over = [i for i, (ids, _) in enumerate(tokenised) if len(ids) > limit]
        if over and policy == "error":
            raise ConfigError(
                f"{rows[over[0]].where}: the conversation has {len(tokenised[over[0]][0])} tokens > "
                f"data.max_prompt_length + data.max_response_length = {limit}; raise them, "
                "or set data.overlong_prompts=filter"
            )
        drop = set(over) if policy == "filter" else set()
        cut = [(truncate(ids, limit, policy), truncate(mask, limit, policy)) for ids, mask in tokenised]
        kept = [pair for i, pair in enumerate(cut) if i not in drop and any(pair[1][1:])]
        if not kept:
            raise ConfigError(
                f"no conversation is left of {len(rows)}: {len(over)} have more than data.max_prompt_length + "
                f"data.max_response_length = {limit} tokens, the others have an empty reply"
            )
        input_ids = [ids for ids, _ in kept]
        masks = [[0, *mask[1:]] for _, mask in kept]
        return cls(input_ids, masks, len(rows) - len(kept), fingerprint_of(input_ids))


def conversation(row: Row, data: DataConfig) -> Messages:
    """The row's messages, ending in the assistant's turn."""
    if row.chat[-1]["role"] == "assistant":
        return row.chat
    if row.columns.get(data.response_key) is None:
        raise ConfigError(
            f"{row.where}: no reply to learn from: the messages do not end in an assistant turn, and there is nothing "
            f"in column '{data.response_key}' (data.response_key); the columns are {', '.join(sorted(row.columns))}"
        )
    return [*row.chat, {"role": "assistant", "content": str(row.columns[data.response_key])}]


def pieces_of(tokenizer: Tokenizer, messages: Messages, data: DataConfig, where: str) -> list[Piece]:
    """Cut the rendered conversation at the ends of its assistant turns.

    Each assistant turn starts where the template would have the model start (generation prompt) and ends with the
    end-of-turn token; white space that the template writes behind that token is nobody's. Tokenising piece by piece
    makes the prompt's tokens those that the rollout sees. Raises `ConfigError` for a template that renders a turn
    differently once others follow it: then no cut is right.
    """
    eos = str(tokenizer.eos_token or "")
    if not data.apply_chat_template:
        return [(render(tokenizer, messages[:-1], data, where), False), (str(messages[-1]["content"]) + eos, True)]
    messages = with_system(messages, data.system_prompt)
    whole = render(tokenizer, messages, data, where, reply_next=False)
    pieces: list[Piece] = []
    at = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:turn], data, where) if turn else ""
        after = render(tokenizer, messages[: turn + 1], data, where, reply_next=False)
        if not (whole.startswith(after) and after.startswith(before) and at <= len(before)):
            raise ConfigError(
                f"{where}: the chat template renders turn {turn} differently when others follow it, so the loss cannot "
                "be limited to the replies; use one row per reply, or a model.chat_template without that"
            )
        reply = after[len(before) :]
        end = reply.rfind(eos) + len(eos) if eos and eos in reply else len(reply)
        pieces += [(whole[at : len(before)], False), (reply[:end], True)]
        at = len(before) + end
    return pieces


def _encode_pieces(
    tokenizer: Tokenizer, rows: list[list[Piece]], data: DataConfig
) -> list[tuple[list[int], list[int]]]:
    """(input_ids, loss_mask) of each row. Only a row's first piece may get the tokenizer's own special tokens (BOS)."""
    firsts = iter(encode(tokenizer, [pieces[0][0] for pieces in rows], data))
    rest_texts = [text for pieces in rows for text, _ in pieces[1:]]
    rests = iter(tokenizer(rest_texts, add_special_tokens=False)["input_ids"])
    out = []
    for pieces in rows:
        ids: list[int] = []
        mask: list[int] = []
        for number, (_, counted) in enumerate(pieces):
            tokens = next(rests) if number else next(firsts)
            ids += tokens
            mask += [int(counted)] * len(tokens)
        out.append((ids, mask))
    return out
