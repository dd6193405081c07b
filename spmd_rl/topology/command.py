"""`spmd-rl plan`: print, write or draw the plan of a run, or say what is wrong with it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import parse_arguments
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.document import document
from spmd_rl.topology.page import page
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.suggest import suggest_text
from spmd_rl.topology.text import plan_text, rank_text

USAGE = """usage: spmd-rl plan [key=value | group=preset ...] [options]

Plans the run without GPUs: pools, layouts, phases, memory, traffic.

  --json [FILE]   the whole plan as JSON, to the file or to stdout
  --html FILE     one self-contained page
  --rank N        one rank's story
  --suggest       layouts that fit the cluster, and why others do not
  --verify        build the process groups under a fake world and compare them with the plan (needs torch)
  --cfg job|help, --config-dir DIR, --help

Exit code: 0 planned, 2 the run is impossible (every mistake is listed, with its mend), 1 --verify found a difference.
"""
VALUED = {"--html": True, "--rank": True, "--json": False, "--suggest": None, "--verify": None}
"""Option to whether it takes a value: True needs one, False may have one, None has none."""
OPTIONS = ("--json [FILE]", "--html FILE", "--rank N", "--suggest", "--verify")
"""The same as a user writes them."""


@dataclass
class Options:
    """The command's own options."""

    json: str | None = None
    """A path; `-` is stdout."""
    html: str | None = None
    rank: int | None = None
    suggest: bool = False
    verify: bool = False


def main(argv: list[str]) -> int:
    """Run `spmd-rl plan`. Returns the exit code."""
    try:
        options, rest = parse_options(argv)
        arguments = parse_arguments(rest)
        if arguments.show == "usage":
            print(USAGE)
            return 0
        text = arguments.text("plan")
        if text is not None:
            print(text)
            return 0
        arguments.reject_others(*OPTIONS)
        config = arguments.config()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        cluster = Cluster.from_config(config)
        if options.suggest:
            print(suggest_text(config, cluster), end="")
            return 0
        plan = Plan.from_config(config, cluster)
    except ConfigError as error:
        print(f"impossible plan:\n{_bullets(str(error))}", file=sys.stderr)
        return 2
    try:
        return _show(options, plan)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse_options(argv: list[str]) -> tuple[Options, list[str]]:
    """The command's own options, and all other words. Raises ConfigError for a missing or wrong value."""
    options, rest, words = Options(), [], list(argv)
    while words:
        name, has_value, value = words.pop(0).partition("=")
        if name not in VALUED:
            rest.append(name + has_value + value)
            continue
        if not has_value and VALUED[name] is not None and words and _is_value(words[0]):
            value = words.pop(0)
        if VALUED[name] and not value:
            raise ConfigError(f"{name} needs a value")
        if name == "--rank" and not value.isdecimal():
            raise ConfigError(f"--rank {value} is not a rank's number")
        parsed = {"--rank": lambda v: int(v), "--json": lambda v: v or "-", "--html": lambda v: v}
        setattr(options, name[2:], parsed.get(name, lambda v: True)(value))
    return options, rest


def _is_value(word: str) -> bool:
    """Whether a word after an option belongs to it: no option, no override."""
    return not word.startswith("--") and "=" not in word


def _show(options: Options, plan: Plan) -> int:
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.verify:
        return _verify(plan.config)
    if options.rank is not None:
        if options.rank >= plan.world_size:
            raise ConfigError(f"--rank {options.rank}: the job has ranks 0..{plan.world_size - 1}")
        print(rank_text(plan, options.rank), end="")
    elif options.json is None and options.html is None:
        print(plan_text(plan), end="")
    if options.json is not None:
        _write(options.json, json.dumps(document(plan), indent=1) + "\n")
    if options.html is not None:
        _write(options.html, page(plan))
    return 0


def _write(path: str, text: str) -> None:
    if path == "-":
        print(text, end="")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}", file=sys.stderr)


def _verify(config: Config) -> int:
    """In a process of its own, because it pretends to be a whole world of torch.distributed."""
    from spmd_rl.config.load import as_yaml

    command = [sys.executable, "-m", "spmd_rl.runtime.verify"]
    return subprocess.run(command, input=as_yaml(config), text=True, check=False).returncode


def _bullets(text: str) -> str:
    return "\n".join(line if line.startswith("  ") else f"  - {line}" for line in text.splitlines())
