"""A config from `key=value` words without Hydra, which takes half a second a call."""

from dataclasses import is_dataclass
from typing import Any

import yaml

from spmd_rl.config import Config, PoolConfig


def configured(*overrides: str) -> Config:
    """`actor.pool=a`, `+pools.a.nnodes=1` and `engine=megatron` (all engines) on top of the defaults."""
    config = Config()
    for word in overrides:
        key, _, text = word.lstrip("+").partition("=")
        if key == "engine":
            for role in (config.actor, config.ref, config.critic):
                role.engine.name = text
        else:
            _set(config, key.split("."), yaml.safe_load(text))
    return config


def _set(target: Any, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        target = target.setdefault(name, PoolConfig()) if isinstance(target, dict) else getattr(target, name)
    assert is_dataclass(target)
    assert hasattr(target, path[-1]), path
    setattr(target, path[-1], value)
