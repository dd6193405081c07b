"""`spmd-rl launch`: plan the run, refuse an impossible one, then start or submit it, or print what would be."""

import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_rl.cli import COMMANDS, RANKED
from spmd_rl.config import ConfigError, how_to_install
from spmd_rl.config.choices import CHOICES
from spmd_rl.config.load import parse_arguments, take_option

from . import failure, torchrun
from .spec import LaunchSpec

USAGE = """usage: spmd-rl launch [--on torchrun|slurm|torchx] [options] [train|eval|generate] [key=value ...]

Plans the run, refuses an impossible one, then starts or submits it. The hosts and all else come from the config group
`cluster` (spmd-rl train --cfg help); a preset of it, e.g. cluster=slurm, is a good start.

  --on NAME       instead of cluster.launcher
  --dry-run       print exactly what would be started or submitted (for Slurm to read: launch/job.sbatch is to change)
  --follow        slurm, torchx: stay until the job has ended, with its log
  --node-rank N   torchrun with cluster.rendezvous=static: this host's number
  --failure DIR   no launch: show which rank failed first in a job's attempt (OUTPUT_DIR/slurm/JOB.attempts/N)

Exit code: 0 started, submitted or (--follow) ended well; 2 the run is impossible.
"""
FLAGS = ("--dry-run", "--follow")
OPTIONS = ("--on NAME", "--dry-run", "--follow", "--node-rank N", "--failure DIR")
LAUNCHERS = CHOICES["cluster.launcher"]


def main(argv: list[str]) -> int:
    """Run `spmd-rl launch`. Raises ConfigError for what cannot be launched."""
    rest, folder = take_option(argv, "--failure")
    if folder is not None:
        print(failure.describe(Path(folder)) or f"no rank has failed in {folder}\n", end="")
        return 0
    rest, launcher = take_option(rest, "--on")
    if launcher is not None and launcher not in LAUNCHERS:
        raise ConfigError(f"--on {launcher} is unknown; known: {', '.join(LAUNCHERS)}")
    rest, node = take_option(rest, "--node-rank")
    if node is not None and not node.isdecimal():
        raise ConfigError(f"--node-rank {node} is not a host's number")
    flags = {word for word in rest if word in FLAGS}
    spec, chosen = read_spec([word for word in rest if word not in FLAGS])
    if spec is None:
        return 0
    return launch(spec, launcher or chosen, flags, None if node is None else int(node))


def read_spec(argv: list[str]) -> tuple[LaunchSpec | None, str]:
    """(what to launch, cluster.launcher); None when only help was asked for, and given."""
    name = argv[0] if argv and argv[0] in RANKED else "train"
    words = argv[1:] if argv and argv[0] in RANKED else argv
    plain: Sequence[str] = words
    for option in COMMANDS[name].options:
        plain, _ = take_option(list(plain), option)
    arguments = parse_arguments(list(plain))
    if arguments.show is not None:
        print(USAGE if arguments.show == "usage" else arguments.text("spmd-rl launch"), end="")
        return None, ""
    arguments.reject_others(*OPTIONS, *COMMANDS[name].options)
    config = arguments.config()
    return LaunchSpec.from_config(config, COMMANDS[name].module, words), config.cluster.launcher


def launch(spec: LaunchSpec, launcher: str, flags: set[str], node_rank: int | None) -> int:
    """Start, submit or print."""
    if launcher == "torchrun":
        print(torchrun.text(spec, node_rank), flush=True)
        if "--dry-run" not in flags:
            torchrun.execute(spec, node_rank)
        return 0
    if node_rank is not None:
        raise ConfigError(f"--node-rank is for torchrun; {launcher} numbers the hosts by itself")
    return on_slurm(spec, flags) if launcher == "slurm" else on_torchx(spec, flags)


def on_slurm(spec: LaunchSpec, flags: set[str]) -> int:
    """Submit, and with --follow stay."""
    try:
        from . import slurm
    except ImportError as error:
        raise ConfigError(f"--on slurm needs submitit ({error}); {how_to_install('slurm')}") from error
    if "--dry-run" in flags:
        print(slurm.text(spec), end="")
        return 0
    job = slurm.submit(spec)
    print(f"job {job}: {spec.size} ranks on {spec.nodes} hosts; logs: {spec.output_dir}/slurm/{job}_RANK_log.out")
    sys.stdout.flush()
    return slurm.follow(spec, job) if "--follow" in flags else 0


def on_torchx(spec: LaunchSpec, flags: set[str]) -> int:
    """Submit to cluster.scheduler; a job on this host is waited for."""
    try:
        from . import components
    except ImportError as error:
        raise ConfigError(f"--on torchx needs torchx ({error}); {how_to_install('torchx')}") from error
    if spec.cluster.min_nodes is not None:
        raise ConfigError(
            f"cluster.min_nodes={spec.cluster.min_nodes} is torchrun's: a torchx job has all of its hosts"
        )
    if "--dry-run" in flags:
        print(components.text(spec), end="")
        return 0
    _, status = components.submit(spec, "--follow" in flags)
    return status
