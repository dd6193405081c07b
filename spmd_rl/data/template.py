"""Chat messages to text and token ids, by the tokenizer's own template. Needs no torch."""

from typing import Any, Protocol

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig

Messages = list[dict[str, Any]]


class Tokenizer(Protocol):
    """What we ask of a tokenizer: a transformers `PreTrainedTokenizerBase` is one."""

    chat_template: Any
    eos_token: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: Messages, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


def check_template(tokenizer: Tokenizer, data: DataConfig) -> None:
    """Raise `ConfigError` when a chat template is asked for and the tokenizer has none."""
    if data.apply_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "data.apply_chat_template=true, but the tokenizer has no chat template; set model.chat_template (Jinja "
            "text or a file with it), choose an instruct model, or send plain text: data.apply_chat_template=false"
        )


def with_system(messages: Messages, system_prompt: str | None) -> Messages:
    """The messages behind `system_prompt`, unless they have a system message of their own."""
    if not system_prompt or any(m["role"] == "system" for m in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def render(tokenizer: Tokenizer, messages: Messages, data: DataConfig, where: str, reply_next: bool = True) -> str:
    """The text of a conversation; with `reply_next` it ends where the assistant's reply begins.

    Without a template the contents follow each other on lines of their own. `where` names the row in errors.
    """
    messages = with_system(messages, data.system_prompt)
    if not data.apply_chat_template:
        return "\n".join(str(m.get("content") or "") for m in messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_next)
    except Exception as error:  # templates raise jinja2's errors, and Python's own for odd contents
        roles = ", ".join(str(m["role"]) for m in messages)
        raise ConfigError(f"{where}: the chat template refuses roles [{roles}]: {error}") from error


def encode(tokenizer: Tokenizer, texts: list[str], data: DataConfig) -> list[list[int]]:
    """Token ids of each text. A template writes its own special tokens; plain text gets the tokenizer's (BOS)."""
    if not texts:
        return []
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=not data.apply_chat_template)["input_ids"]]
