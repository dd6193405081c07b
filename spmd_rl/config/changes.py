"""What a resumed run's config has that the one saved with the run has not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from spmd_rl.config import Config
from spmd_rl.config.fields import find
from spmd_rl.config.load import as_yaml

NEVER_MATTER = (
    "cluster.", "observe.", "trainer.output_dir", "trainer.project_name", "trainer.experiment_name", "trainer.resume",
    "trainer.rehearse", "trainer.time_limit_s", "trainer.timeout_s",
)  # fmt: skip
"""Keys, or their beginnings, that say nothing of what a step computes."""


def changes(saved: Path, config: Config) -> list[str]:
    """`actor.optim.lr 1e-06 -> 2e-06` for each key that differs from the config that `save_config` wrote to `saved`.

    Empty where that file is none, or cannot be read. A key that an older version did not know counts as its default.
    """
    try:
        before = yaml.safe_load(saved.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    if not isinstance(before, dict):
        return []
    old, new = dict(_leaves(before)), dict(_leaves(yaml.safe_load(as_yaml(config))))
    found = []
    for key in dict.fromkeys([*new, *old]):
        one, other = (values.get(key, _default(key)) for values in (old, new))
        if one != other and not key.startswith(NEVER_MATTER):
            found.append(f"{key} {json.dumps(one, default=str)} -> {json.dumps(other, default=str)}")
    return found


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}", value


def _default(key: str) -> Any:
    found = find(key)
    return found.default if found is not None else None
