"""Rows of a data set on the Hugging Face hub (or in its local cache). The only file that imports `datasets`."""

from collections.abc import Iterator
from typing import Any

from spmd_rl.config import ConfigError, how_to_install

PREFIX = "hf:"


def read_hub(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of each row of `hf:name`, `hf:name:split` or `hf:name:config:split`; split: train."""
    path, *rest = name.removeprefix(PREFIX).split(":")
    if not path or len(rest) > 2:
        raise ConfigError(f"{name}: write hf:name, hf:name:split or hf:name:config:split")
    config, split = (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "train")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{name}: reading from the hub needs the package `datasets`; {how_to_install('hub')}"
        ) from error
    try:
        dataset = load_dataset(path, config or None, split=split)
    except Exception as error:  # offline, unknown name, unknown split: each library version has its own exceptions
        raise ConfigError(f"{name}: cannot be read: {type(error).__name__}: {error}") from error
    for index, columns in enumerate(dataset):
        yield f"{name}[{index}]", columns
