"""Rows of a data set: one prompt each, with what its reward needs.

verl's row format is read unchanged (`prompt` as chat messages, `data_source`, `reward_model.ground_truth`,
`extra_info`); plain rows name their prompt and answer columns (`data.prompt_key`, `data.answer_key`). Needs no
tokenizer and no torch. Every mistake in a file is a `ConfigError` that says where it is.
"""

import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.hub import PREFIX as HUB_PREFIX
from spmd_rl.data.hub import read_hub
from spmd_rl.data.tasks import read_task

Located = tuple[str, dict[str, Any]]
"""A source row's columns, and where it stands (`train.jsonl:12`) for error messages."""

TASK_TRIES = 20
"""Problems made for each one kept, at most, when problems that occur in training are left out."""


@dataclass(frozen=True)
class Row:
    """One prompt and what its reward needs."""

    index: int
    """Place in the source, from 0 (after the rows that were left out)."""
    messages: list[dict[str, Any]] | str
    """Chat messages (`role`, `content`), or one string."""
    data_source: str
    """Which reward `auto` picks; validation metrics are kept apart by it."""
    ground_truth: Any
    """The right answer; None where the source has none."""
    extra_info: dict[str, Any]
    """Whatever else verl-style functions get."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the source row; TRL-style functions get them by name."""
    where: str = ""
    """File and line, for messages."""

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The prompt as messages; a string is the user's turn."""
        return [{"role": "user", "content": self.messages}] if isinstance(self.messages, str) else self.messages


def is_set(source: SourceConfig) -> bool:
    """Whether the source names any rows."""
    return bool(source.files or source.task)


def load_rows(source: SourceConfig, data: DataConfig, *, train_rows: list[Row] | None = None) -> list[Row]:
    """All rows of a source, in its order.

    With `train_rows` (the source is the validation set) and `source.exclude_train`, rows whose prompt also occurs in
    training are left out; a task then makes further problems until it has `source.size` different ones. `source.size`
    caps files.
    """
    name = "data.train" if train_rows is None else "data.val"
    if bool(source.files) == bool(source.task):
        raise ConfigError(f"{name}: set one of files={source.files} and task={source.task}")
    if source.task and source.size < 1:
        raise ConfigError(
            f"{name}.size={source.size}: says how many problems of task '{source.task}' to make; at least 1"
        )
    seen = {prompt_key(row) for row in train_rows} if train_rows is not None and source.exclude_train else set()
    rows = (as_row(index, columns, where, data) for index, (where, columns) in enumerate(_read(source, bool(seen))))
    fresh = _unseen(rows, seen, distinct=source.task is not None) if seen else rows
    kept = list(itertools.islice(fresh, source.size or None))
    if not kept:
        raise ConfigError(f"{name}: no row is left: every prompt of {_called(source)} also occurs in the training set")
    return [Row(**{**vars(row), "index": index}) for index, row in enumerate(kept)] if seen else kept


def _unseen(rows: Iterable[Row], seen: set[str], distinct: bool) -> Iterator[Row]:
    """Rows whose prompt is not in `seen`; with `distinct` none that came before either."""
    for row in rows:
        key = prompt_key(row)
        if key not in seen:
            if distinct:
                seen.add(key)
            yield row


def _called(source: SourceConfig) -> str:
    return f"task '{source.task}'" if source.task else ", ".join(source.files)


def _read(source: SourceConfig, excluding: bool) -> Iterator[Located]:
    if source.task:
        made = source.size * (TASK_TRIES if excluding else 1)
        return read_task(source.task, dict(source.task_kwargs), made, source.seed)
    return itertools.chain.from_iterable(read_file(path) for name in source.files for path in _paths(name))


def _paths(name: str) -> list[str]:
    """The files that a name or a pattern (`data/*.parquet`) stands for."""
    if name.startswith(HUB_PREFIX):
        return [name]
    path = os.path.expanduser(name)
    found = [path] if os.path.exists(path) else sorted(glob.glob(path))
    if not found:
        raise ConfigError(f"{name}: no such file (looked from {os.getcwd()})")
    return found


def read_file(path: str) -> Iterator[Located]:
    """Rows of a .jsonl or .parquet file, or of a hub data set. A file without rows is an error."""
    if path.startswith(HUB_PREFIX):
        rows = read_hub(path)
    elif path.endswith(".parquet"):
        rows = _read_parquet(path)
    elif path.endswith((".jsonl", ".ndjson", ".json")):
        rows = _read_jsonl(path)
    else:
        raise ConfigError(f"{path}: unknown kind of file; .jsonl and .parquet are read, and hf:name from the hub")
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path}: the file has no rows")
    yield first
    yield from rows


def _read_jsonl(path: str) -> Iterator[Located]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                columns = json.loads(line)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
                raise ConfigError(f"{where}: not a JSON object: {error}") from error
            if not isinstance(columns, dict):
                raise ConfigError(f"{where}: a row is a JSON object, this is a {type(columns).__name__}")
            yield where, columns


def _read_parquet(path: str) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    number = itertools.count()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    yield f"{path} row {next(number)}", columns
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from error


def as_row(index: int, columns: dict[str, Any], where: str, data: DataConfig) -> Row:
    """A `Row` of a source row's columns. Missing columns and unusable prompts raise `ConfigError`."""
    # Chat data sets mostly call the column `messages`; a row that has no prompt but that one can mean nothing else.
    key = "messages" if "messages" in columns and data.prompt_key not in columns else data.prompt_key
    prompt = _column(columns, key, where, "data.prompt_key")
    extra = columns.get("extra_info")
    return Row(
        index=index,
        messages=usable(prompt, where),
        data_source=str(columns.get("data_source") or data.data_source or "unknown"),
        ground_truth=_ground_truth(columns, where, data),
        extra_info=dict(extra) if isinstance(extra, dict) else {},
        columns={name: value for name, value in columns.items() if name != key},
        where=where,
    )


def _column(columns: dict[str, Any], key: str, where: str, option: str) -> Any:
    if key not in columns:
        raise ConfigError(
            f"{where}: no column '{key}' ({option}); the columns are {', '.join(sorted(columns)) or 'none'}"
        )
    return columns[key]


def _ground_truth(columns: dict[str, Any], where: str, data: DataConfig) -> Any:
    """`data.answer_key`'s column if set, else verl's reward_model.ground_truth, else a column of that name, else None.

    A text that ends in GSM8K's `#### 18` stands for what follows the mark.
    """
    if data.answer_key is None:
        judged = columns.get("reward_model")
        nested = judged.get("ground_truth") if isinstance(judged, dict) else None
        return nested if nested is not None else columns.get("ground_truth")
    answer = _column(columns, data.answer_key, where, "data.answer_key")
    if isinstance(answer, str) and "####" in answer:
        return answer.rsplit("####", 1)[1].strip().replace(",", "").lstrip("$")
    return answer


def usable(prompt: Any, where: str) -> list[dict[str, Any]] | str:
    """The prompt, if it is a non-empty string or a non-empty list of messages with a role and a content each."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where}: the prompt is empty")
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f"{where}: a prompt is a string or a non-empty list of messages, this is {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, dict) or not message.get("role") or "content" not in message:
            raise ConfigError(f"{where}: a message is a dict with 'role' and 'content', this is {message!r:.80}")
    if not any(message["content"] for message in prompt):
        raise ConfigError(f"{where}: no message of the prompt has any content")
    return [{k: v for k, v in message.items() if v is not None} for message in prompt]


def prompt_key(row: Row) -> str:
    """Two rows have the same key when they have the same prompt."""
    return json.dumps(row.chat, sort_keys=True, default=str)


def data_sources(rows: Iterable[Row]) -> list[str]:
    """The data sources that occur, sorted."""
    return sorted({row.data_source for row in rows})
