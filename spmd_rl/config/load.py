"""From overrides to a `Config`: Hydra picks and merges the presets, one check against the dataclasses finds mistakes.

Hydra composes plain YAML (every `key=value` of the command line is added on top), and only the result meets the
schema. So a preset's mistakes and the command line's are found by the same check, and all of them at once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmd_rl.config import Config, ConfigError, PoolConfig
from spmd_rl.config.choices import check_value
from spmd_rl.config.fields import Field, all_fields, find, is_free, nearest, nearest_keys
from spmd_rl.config.verl_keys import RENAMED


def packaged_configs() -> Path:
    """The folder of presets that came with the package: `_configs` in a wheel, `configs` beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the package's presets are missing: neither {package}/_configs nor {package.parent}/configs")


def groups(config_dirs: list[Path]) -> dict[str, list[str]]:
    """Config group (a folder of the search path) to the names of its presets."""
    found: dict[str, set[str]] = {}
    for directory in config_dirs:
        for file in sorted(directory.glob("*/*.yaml")):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {name: sorted(choices) for name, choices in sorted(found.items())}


def compose(overrides: list[str], config_dirs: list[str | Path] | None = None) -> Config:
    """The config of `overrides` (`experiment=tiny`, `actor.optim.lr=1e-5`) over the presets.

    `config_dirs`: folders of the user's own presets, searched before the package's.
    Raises ConfigError, with every mistake that could be found in one go.
    """
    own = [_existing(Path(directory)) for directory in config_dirs or []]
    path = [*own, packaged_configs()]
    known = groups(path)
    problems: list[str] = []
    rewritten: list[str] = []
    for text in overrides:
        override = _parse(text, problems)
        if override is not None:
            rewritten += _rewrite(text, override, known, problems)
    composed: dict[str, Any] = {}
    try:
        composed = _hydra(path, rewritten)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        problems.append(_said_by_hydra(error, known))
    return build(composed, problems)


def build(values: dict[str, Any], problems: list[str] | None = None) -> Config:
    """A typed, resolved and checked config from nested plain values; `problems` are those found before."""
    problems = list(problems or [])
    pools = values.get("pools")
    named = {str(name): PoolConfig() for name in pools} if isinstance(pools, dict) else {}
    tree = OmegaConf.structured(Config(pools=named))
    for key, value in _leaves(values, problems):
        _assign(tree, key, value, problems)
    for key, value in _leaves(_resolved(tree, problems), []):
        problems += check_value(key, value)
    if problems:
        raise ConfigError(_report(problems))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config), "a structured Config turns into a Config"
    return config


def as_yaml(config: Config, explain: bool = False) -> str:
    """The whole config as YAML; with `explain`, each key under a comment with its type and docstring."""
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    return "\n".join(_explained(text)) + "\n" if explain else text


def save_config(config: Config, path: str | Path) -> None:
    """Write the config as YAML that `load_config` reads back equal."""
    Path(path).write_text(as_yaml(config), encoding="utf-8")


def load_config(path: str | Path) -> Config:
    """Read a whole config that `save_config` wrote. Raises ConfigError as `compose` does."""
    try:
        values = yaml.safe_load(OmegaConf.to_yaml(OmegaConf.load(path)))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not YAML: {_first_lines(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping of config keys")
    return build(values)


@dataclass
class Arguments:
    """What a command line asks for besides its own options."""

    overrides: list[str] = field(default_factory=list)
    """`key=value` and `group=preset`."""
    config_dirs: list[str | Path] = field(default_factory=list)
    """Folders of own presets."""
    show: str | None = None
    """job: print the config; help: print it with docstrings; usage: say how to call this."""
    other: list[str] = field(default_factory=list)
    """Options that the config does not know; each command checks its own."""

    def config(self) -> Config:
        """Compose."""
        return compose(self.overrides, self.config_dirs)

    def text(self, command: str) -> str | None:
        """What `--cfg job`, `--cfg help` or `--help` print instead of running `command`; None when none was given."""
        if self.show is None:
            return None
        return usage(command, self.config_dirs) if self.show == "usage" else as_yaml(self.config(), self.show == "help")

    def reject_others(self, *own: str) -> None:
        """Raise ConfigError when an option was given that nobody takes; `own`: the command's own, for the list."""
        if self.other:
            options = ", ".join([*own, "--cfg job|help", "--config-dir DIR", "--help"])
            raise ConfigError(
                f"unknown option {' '.join(self.other)}; options are {options}; everything else is key=value or"
                " group=preset"
            )


def parse_arguments(argv: list[str]) -> Arguments:
    """Sort a command line into overrides, `--cfg`, `--config-dir`, `--help` and the rest."""
    arguments, words = Arguments(), iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--cfg", "-c"):
            arguments.show = value or next(words, "job")
            if arguments.show not in ("job", "help"):
                raise ConfigError(f"--cfg {arguments.show}: job prints the config, help prints it with its docstrings")
        elif name in ("--config-dir", "-cd"):
            directory = value or next(words, "")
            if not directory:
                raise ConfigError("--config-dir needs a folder")
            arguments.config_dirs.append(directory)
        elif word in ("--help", "-h"):
            arguments.show = "usage"
        elif word.startswith("-"):
            arguments.other.append(word)
        else:
            arguments.overrides.append(word)
    return arguments


def take_option(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """(the words without the option, its value): `--nproc 2` and `--nproc=2`. Raises ConfigError without a value."""
    rest, value, words = [], None, iter(argv)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{name} needs a value")
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return rest, value


def usage(command: str, config_dirs: list[str | Path] | None = None) -> str:
    """How to call a command that takes a config, with the presets that there are."""
    known = groups([*map(Path, config_dirs or []), packaged_configs()])
    presets = "\n".join(f"  {name}=  {' | '.join(choices)}" for name, choices in known.items())
    return (
        f"usage: {command} [group=preset …] [key=value …] [--config-dir DIR] [--cfg job|help]\n\n"
        f"presets:\n{presets}\n\n"
        "--cfg job prints the whole config and ends; --cfg help prints it with a line of explanation a key.\n"
        "--config-dir adds a folder of your own presets, laid out like the package's (experiment/mine.yaml).\n"
    )


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-dir {directory} is not a folder")
    return directory.resolve()


def _parse(text: str, problems: list[str]) -> Override | None:
    if "=" not in text and not text.startswith("~"):
        problems.append(f"{text!r} is not key=value or group=preset")
        return None
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        problems.append(f"cannot read the argument {text!r} as key=value: {_first_lines(error)}")
        return None
    if override.is_sweep_override():
        problems.append(
            f"{text} gives several values; write a list as '{override.key_or_group}=[a,b]' or quote the text"
        )
        return None
    return override


def _rewrite(text: str, override: Override, known: dict[str, list[str]], problems: list[str]) -> list[str]:
    """The override as Hydra gets it: a group's as it is, a key's as `++key=value`; a mistake goes to `problems`."""
    key = override.key_or_group.split("@")[0]
    if key == "hydra" or key.startswith("hydra."):
        problems.append(f"{text}: hydra's own settings are not used here; outputs go to trainer.output_dir")
        return []
    if key in known:
        choice = override.value()
        if choice is None or choice in known[key]:
            return [text.lstrip("+")]
        if not isinstance(choice, dict):
            near = nearest(str(choice), known[key], 1)
            hint = f"did you mean {near[0]}? " if near else ""
            problems.append(f"{key}={choice} is not a preset; {hint}There are: {', '.join(known[key])}")
            return []
    found, spelled = find(key), text.partition("=")[2]
    if found is not None and found.kind == "Any" and "_" in spelled and isinstance(override.value(), int | float):
        return [f"++{key}='{spelled}'"]  # a band 0.5_5 is not the number 0.55
    return [text if override.is_delete() else "++" + text.lstrip("+")]


def _hydra(path: list[Path], overrides: list[str]) -> dict[str, Any]:
    """Hydra's merge of `config.yaml`, the presets and the overrides, as plain nested values, interpolations kept."""
    # The base is registered by value: Hydra wants it in the first folder, which may be one of the user's.
    ConfigStore.instance().store("spmd_rl_base", OmegaConf.load(path[-1] / "config.yaml"))
    search = ",".join(f"'file://{directory}'" for directory in path[1:])
    with initialize_config_dir(config_dir=str(path[0]), version_base="1.3"):
        composed = hydra_compose("spmd_rl_base", overrides=[*overrides, f"hydra.searchpath=[{search}]"])
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict), "config.yaml is a mapping"
    return {str(key): value for key, value in values.items()}


def _leaves(values: dict[str, Any], problems: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every known leaf; unknown keys and misplaced values go to `problems`."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        found = find(key)
        if found is None:
            problems += [_unknown(leaf, inner) for leaf, inner in _flatten(key, value)]
        elif found.section is None and found.kind != "dict[str, PoolConfig]":
            yield key, value
        elif isinstance(value, dict):
            yield from _leaves(value, problems, f"{key}.")
        else:
            inside = ", ".join(k for k in all_fields() if k.rpartition(".")[0] == found.key)
            spelled = "null" if value is None else value
            problems.append(f"{key}={spelled}: {key} is a section, not a value; set a key in it: {inside}")


def _assign(tree: DictConfig, key: str, value: Any, problems: list[str]) -> None:
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except OmegaConfBaseException:
        found = find(key)
        assert found is not None, "only known keys are assigned"
        problems.append(_wrong_type(key, value, found))


def _resolved(tree: DictConfig, problems: list[str]) -> dict[str, Any]:
    """The tree's plain values; each interpolation that fails goes to `problems` and is left out."""
    values: dict[str, Any] = {}
    for name in tree:
        try:
            values[str(name)] = OmegaConf.to_container(tree[name], resolve=True)
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key}: {_first_lines(error)}")
    return values


def _wrong_type(key: str, value: Any, found: Field) -> str:
    spelled = "null" if value is None else repr(value)
    return f"{key}={spelled} has the wrong type: it takes {found.kind}\n    {found.describe()}"


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves under a key that is not known."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(f"{key}.{name}", inner)
    else:
        yield key, value


def _unknown(key: str, value: Any) -> str:
    if is_free(key):
        return f"{key}={value} lies inside a value that is not a mapping"
    if key in RENAMED:
        return f"unknown key {key}; it is verl's name for {RENAMED[key]} (spmd-rl from-verl translates command lines)"
    near = [found.describe() for found in map(find, nearest_keys(key)) if found is not None]
    lines = [f"unknown key {key}" + ("; did you mean" if near else "; `--cfg help` prints every key")]
    return "\n    ".join([*lines, *near])


def _said_by_hydra(error: Exception, known: dict[str, list[str]]) -> str:
    """Why presets and overrides could not be merged; `known` groups are what can be taken away as a whole."""
    gone = re.search(r"Could not delete from config\. '(.+)' does not exist", str(error))
    if gone is None:
        return _first_lines(error)
    whole = ", ".join(f"~{group}" for group in known)
    return (
        f"~{gone[1]} takes nothing away: no preset that is chosen here sets {gone[1]}; what can be deleted is a key"
        f" that one sets, which goes back to its default, or a whole preset: {whole}"
    )


def _first_lines(error: Exception) -> str:
    """An exception of Hydra's or OmegaConf's in one line, without the context that only its own users need."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines if not re.match(r"(full_key|object_type|reference_type|Set the env)", line))


def _report(problems: list[str]) -> str:
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} mistakes in the config\n" + "\n".join(
        "  - " + problem.replace("\n", "\n  ") for problem in problems
    )


def _explained(text: str) -> Iterator[str]:
    """YAML lines, each key under a comment with its docstring."""
    stack: list[str] = []
    for line in text.splitlines():
        match = re.match(r"^( *)'?([\w-]+)'?:", line)
        if match:
            depth = len(match[1]) // 2
            stack = [*stack[:depth], match[2]]
            found = find(".".join(stack))
            if found is not None:
                yield f"{match[1]}# {found.doc}" + ("" if found.section else f" ({found.kind})")
        yield line
