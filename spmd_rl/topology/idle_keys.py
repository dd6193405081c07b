"""Settings that do nothing, because what would read them was not chosen.

A key's description says who reads it: `vllm: …` under rollout means rollout.name=vllm. The settings of an engine lie in
a section of its name.
"""

import re
from collections.abc import Iterator

from spmd_rl.config import Config
from spmd_rl.config.fields import Field, all_fields

SELECTORS = {
    "actor.policy_loss": "actor.policy_loss.loss_mode",
    "algorithm": "algorithm.adv_estimator",
    "reward.model": "reward.model.kind",
    "rollout": "rollout.name",
    "trainer": "trainer.schedule",
}
"""Section -> the key whose value says who reads it. The launcher is chosen on the command line as well, so `cluster` is
not here."""
READER = re.compile(r"([a-z_]+): ")
ENGINE = re.compile(r"(.*\.engine)\.(fsdp|megatron)\.")


def idle_warnings(config: Config) -> list[str]:
    """A sentence for each setting that was changed from its default and is read by nobody."""
    return [
        f"{field.key}={value} does nothing: it is for {selector}={reader}, and this is {chosen}"
        for field, selector, reader in _read_by_some()
        if (value := _value(config, field.key)) != field.default
        and (chosen := _value(config, selector)) != reader
        and ":" not in str(chosen)  # the user's own function may read it
    ]


def _read_by_some() -> Iterator[tuple[Field, str, str]]:
    """(key, the key that chooses, the choice that reads it)."""
    for field in all_fields().values():
        engine, named = ENGINE.match(field.key), READER.match(field.doc)
        if engine and field.section is None:
            yield field, f"{engine[1]}.name", engine[2]
        elif named and (selector := SELECTORS.get(field.key.rpartition(".")[0])):
            yield field, selector, named[1]


def _value(config: Config, key: str) -> object:
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found
