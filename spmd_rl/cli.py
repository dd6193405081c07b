"""`spmd-rl COMMAND …`: finds the command's `main(argv) -> int` and runs it; only a chosen command is imported."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config import ConfigError
from spmd_rl.config.load import parse_arguments, take_option
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.roles import only_sampling

USER_ERROR = 2
"""Exit status of a command that was called wrongly: wrong option, wrong config."""


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    module: str
    """Where its `main` is."""
    summary: str
    """Its line in the help."""
    options: tuple[str, ...] = ()
    """Options with a value that it takes besides those of every config."""


COMMANDS: dict[str, Command] = {
    "train": Command("spmd_rl.train", "train; --nproc N starts N ranks on this host"),
    "eval": Command("spmd_rl.evaluate", "only validate a model or a checkpoint"),
    "generate": Command("spmd_rl.generate", "only sample replies to prompts", ("--data", "--output")),
    "plan": Command("spmd_rl.topology.command", "show who does what, with which memory, before a GPU is taken"),
    "launch": Command("spmd_rl._launch.command", "start or submit a job: torchrun, Slurm, torchx"),
    "status": Command("spmd_rl.observe.status", "what every rank of a run does now, or what ended it"),
    "doctor": Command("spmd_rl.doctor", "what this machine has and what is missing"),
    "export": Command("spmd_rl.export", "write a checkpoint as a Hugging Face folder"),
    "from-verl": Command("spmd_rl.topology.from_verl", "translate a verl command line or script"),
    "report": Command("spmd_rl.observe.report", "the end of a run in a few lines, and its curve"),
}
RANKED = ("train", "eval", "generate")
"""Commands that may run on several ranks: they take --nproc."""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit status. A ConfigError is printed once, without a traceback."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, rest = words[0], words[1:]
    try:
        if name not in COMMANDS:
            raise ConfigError(f"there is no command {name!r}; there are: {', '.join(available())}")
        return run_on_ranks(name, rest) if name in RANKED else find_main(name)(rest)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


def overview() -> str:
    """The help: every command that this installation has."""
    lines = [f"  {name:<10} {COMMANDS[name].summary}" for name in available()]
    return (
        "usage: spmd-rl COMMAND [group=preset …] [key=value …]\n\n"
        + "\n".join(lines)
        + "\n\nspmd-rl train --help lists the presets, --cfg help explains every key of the config."
    )


def available() -> list[str]:
    """The commands whose module is there."""
    _adopt_launch()
    return [name for name, command in COMMANDS.items() if _exists(command.module)]


def find_module(name: str) -> str:
    """A command's module. Raises ConfigError when this installation does not have it."""
    _adopt_launch()
    module = COMMANDS[name].module
    if not _exists(module):
        raise ConfigError(f"spmd-rl {name} is not part of this version yet ({module} is missing)")
    return module


def find_main(name: str) -> Callable[[list[str]], int]:
    """A command's main. Raises ConfigError when this installation does not have it."""
    found: Callable[[list[str]], int] = importlib.import_module(find_module(name)).main
    return found


def run_on_ranks(name: str, argv: list[str]) -> int:
    """Run in this process, or check config and plan here, once, and be torchrun with the same arguments."""
    argv, nproc = take_option(argv, "--nproc")
    plain = argv
    for option in COMMANDS[name].options:
        plain, _ = take_option(plain, option)
    arguments = parse_arguments(plain)
    shown = arguments.text(f"spmd-rl {name} [--nproc N]")
    if shown is not None:
        print(shown, end="")
        return 0
    arguments.reject_others("--nproc N", *COMMANDS[name].options)
    module = find_module(name)
    if nproc is None:
        return find_main(name)(argv)
    words = torchrun_words(module, argv, nproc)
    config = arguments.config() if name == "train" else only_sampling(arguments.config())
    if nproc.isdigit():
        Plan.from_config(config, Cluster.from_counts([int(nproc)]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc)))
    return find_torchrun()(words)


def find_torchrun() -> Callable[[list[str]], int]:
    """torchrun, which is imported where ranks are started only."""
    from spmd_rl.torchrun import main

    return main


def torchrun_words(module: str, argv: list[str], nproc: str) -> list[str]:
    """torchrun's words for `nproc` ranks on this host. Raises ConfigError for a number it would refuse."""
    if not (nproc.isdigit() and int(nproc) > 0) and nproc not in ("gpu", "cpu", "auto"):
        raise ConfigError(f"--nproc {nproc}: give a number of ranks, or gpu for one a GPU")
    return ["--standalone", "--nproc-per-node", nproc, "-m", module, *argv]


def threads_per_rank(nproc: str) -> int:
    """CPU threads that each of the ranks may use: this host's cores shared out, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(nproc)) if nproc.isdigit() else 1


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _adopt_launch() -> None:
    """Make a checkout's `launch/` importable as `spmd_rl._launch`, as in a wheel, where nothing can collide."""
    folder = Path(__file__).resolve().parents[1] / "launch"
    name = "spmd_rl._launch"
    if name in sys.modules or _exists(name) or not (folder / "__init__.py").is_file():
        return
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None, "a file that exists has a spec"
    assert spec.loader is not None, "a Python file has a loader"
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if __name__ == "__main__":
    sys.exit(main())
