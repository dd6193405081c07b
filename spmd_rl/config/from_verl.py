"""A verl command line or launch script in our words, with what has no counterpart and why."""

import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from spmd_rl.config import ConfigError
from spmd_rl.config.fields import find, nearest
from spmd_rl.config.shell import Script, read_script, split_words
from spmd_rl.config.verl_keys import ABSENT, DEFAULTS, IMPLIED, RENAMED, SFT_RENAMED
from spmd_rl.config.verl_values import CONVERTED, Values


@dataclass
class Translation:
    """A verl command line in our words."""

    values: Values = field(default_factory=dict)
    """Our keys and values, in order; a key without a dot is a config group."""
    implied: list[tuple[str, str]] = field(default_factory=list)
    """(verl's override, why nothing needs to be set)."""
    absent: list[tuple[str, str]] = field(default_factory=list)
    """(verl's override, why there is no counterpart and what to do instead)."""
    unsure: list[str] = field(default_factory=list)
    """Parts of a script that could not be decided."""

    @property
    def overrides(self) -> list[str]:
        """What `spmd-rl train` takes."""
        return [f"{key}={spell(value)}" for key, value in self.values.items()]


def translate(words: list[str], module: str = "") -> Translation:
    """Translate verl's overrides. `module` is what the script runs; an SFT trainer's keys are read as such."""
    is_sft = "sft" in module
    given, made = _parse(words, is_sft)
    renamed = SFT_RENAMED if is_sft else RENAMED
    if is_sft:
        made.values["trainer.mode"] = "sft"
    for key, value in given.items():
        if key in renamed:
            _set(made, key, renamed[key], value)
        elif not _convert(key, value, given, made):
            reason = _reason(key, IMPLIED)
            if reason is not None and value is not False:
                made.implied.append((f"{key}={spell(value)}", reason))
            else:
                why = reason or _reason(key, ABSENT) or _unknown(key, [*renamed, *CONVERTED, *IMPLIED, *ABSENT])
                made.absent.append((f"{key}={spell(value)}", why))
    if is_sft and "data.train_batch_size" in made.values:
        made.values["actor.ppo_mini_batch_size"] = made.values["data.train_batch_size"]
    _follow(made)
    return made


def render(made: Translation, module: str = "") -> str:
    """The translation as a command to paste, and the two lists as comments."""
    nodes, ranks = made.values.get("cluster.nodes", 1), made.values.get("cluster.gpus_per_node", 8)
    several = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes not in (1, None) else ""
    command = f"torchrun{several} --nproc-per-node {ranks} -m spmd_rl.train"
    lines = [" \\\n    ".join([command, *map(quote, made.overrides)])]
    sections = (
        ("nothing to set:", [f"{name}: {why}" for name, why in made.implied]),
        ("no counterpart:", [f"{name}: {why}" for name, why in made.absent]),
        ("could not be decided, the first branch was read:", made.unsure),
    )
    for title, entries in sections:
        if entries:
            lines += ["", f"# {title}", *(f"#   {entry}" for entry in entries)]
    return "\n".join(lines)


def read(argv: list[str]) -> Script:
    """What was given: a script's path, a whole command in one argument, or overrides as arguments."""
    if len(argv) == 1 and Path(argv[0]).is_file():
        script = read_script(Path(argv[0]).read_text(encoding="utf-8"))
        if not script.words:
            raise ConfigError(f"{argv[0]} holds no command `python -m …` with overrides")
        return script
    if len(argv) == 1 and argv[0].endswith(".sh") and "=" not in argv[0]:
        raise ConfigError(f"there is no file {argv[0]}")
    text = argv[0] if len(argv) == 1 else shlex.join(argv)
    script = read_script(text)
    return script if script.module else Script(words=split_words(text.replace("\\\n", " ")))


def spell(value: Any) -> str:
    """A value as Hydra reads it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(spell, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, str):
        return str(value)
    plain = re.fullmatch(r"[A-Za-z0-9_/.$*@?|+%~-]+(:[A-Za-z0-9_/.$*@?|+%~-]+)*", value)
    return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quote(word: str) -> str:
    """A word as a shell takes it; variables that the script left open stay open."""
    if "$" in word:
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.quote(word)


def _parse(words: list[str], is_sft: bool) -> tuple[Values, Translation]:
    """verl's keys and values; its defaults that differ from ours first, so that what is given comes after."""
    given: Values = {} if is_sft else {key: _value(f"{key}={text}")[1] for key, text in DEFAULTS.items()}
    made = Translation()
    for word in words:
        if word.startswith("--config-name"):
            given["model_engine"] = "megatron" if "megatron" in word else "dp"
        elif word.startswith("-") or "=" not in word:
            continue
        else:
            try:
                key, value = _value(word)
            except HydraException:
                made.absent.append((word, "cannot be read as key=value"))
                continue
            given.pop(key, None)
            given[key] = value
    if given.get("algorithm.adv_estimator") != "gae" and not any(word.startswith("critic.") for word in words):
        given.pop("critic.ppo_max_token_len_per_gpu", None)
    if given.get("data.filter_overlong_prompts") is True:
        given.pop("data.truncation", None)
    return given, made


def _value(word: str) -> tuple[str, Any]:
    override = OverridesParser.create().parse_override(word)
    value = override.value()
    return override.key_or_group, _plain(value)


def _plain(value: Any) -> Any:
    """Hydra's parsed value without its quoted strings."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return getattr(value, "text", value)


def _set(made: Translation, verl: str, key: str, value: Any) -> None:
    """Set our key, unless its type has no room for the value (verl's null for a number)."""
    found = find(key)
    if value is None and found is not None and "null" not in found.kind:
        made.implied.append((f"{verl}=null", f"{key} has a default"))
    else:
        made.values.pop(key, None)
        made.values[key] = value


def _reason(key: str, table: dict[str, str]) -> str | None:
    return next((why for pattern, why in table.items() if fnmatchcase(key, pattern) or key == pattern), None)


def _unknown(key: str, known: list[str]) -> str:
    """Why a key is left out that no table has, with verl's key that may be meant: a like name in the same section, or
    the same name in a section of a like name."""
    section, _, name = key.rpartition(".")
    parts = [other.rpartition(".") for other in known if "*" not in other]
    near = [f"{section}.{like}" for like in nearest(name, [last for place, _, last in parts if place == section], 1)]
    near = near or nearest(key, ["".join(part) for part in parts if part[2] == name], 1)
    return "not one of the keys that this translator knows" + (f"; did you mean {near[0]}?" if near else "")


def _convert(key: str, value: Any, given: Values, made: Translation) -> bool:
    """Keys whose value changes. True when the key is dealt with."""
    for pattern, conversion in CONVERTED.items():
        if fnmatchcase(key, pattern):
            found = conversion.convert(key, value, given)
            if isinstance(found, str):
                made.absent.append((f"{key}={spell(value)}", found))
                return True
            if found is not None:
                for ours, converted in found.items():
                    _set(made, key, ours, converted)
                return True
    return False


def _follow(made: Translation) -> None:
    """What verl derives from other keys: ref follows the actor's layout and budget, the groups come first."""
    values = made.values
    if values.get("actor.use_kl_loss") or values.get("algorithm.use_kl_in_reward"):
        inherited = ("engine.fsdp.ulysses_size", "engine.max_tokens_per_micro_batch", "engine.megatron.")
        for key in [key for key in values if key.startswith(tuple(f"actor.{name}" for name in inherited))]:
            values.setdefault(key.replace("actor.", "ref.", 1), values[key])
    made.values = dict(sorted(values.items(), key=lambda item: "." in item[0]))
