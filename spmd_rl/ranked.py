"""What the commands that run on many ranks have in common: `train`, `eval`, `generate`."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import parse_arguments
from spmd_rl.observe.live import HERE
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment
from spmd_rl.runtime.joining import NothingToDo, joined
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.checkpoint import CheckpointError

LINGER_S = 10.0
"""Seconds that the other ranks leave rank 0 to print a mistake: a launcher ends all ranks when one has ended."""


def on_every_rank(command: str, argv: list[str], act: Callable[[Config, LaunchEnvironment], None]) -> int:
    """Compose the config and act on it. Exit status 2 for a user's mistake: every rank finds it, rank 0 prints it; 1
    when a checkpoint cannot be written."""
    env = read_environment()
    HERE.begin("config")
    try:
        arguments = parse_arguments(argv)
        if text := arguments.text(command):
            print(text if env.is_first else "", end="")
            return 0
        arguments.reject_others()
        config = arguments.config()
        with joined(config, env, trains=command == "train" and not config.trainer.rehearse) as env, recorded():
            act(config, env)
    except NothingToDo as done:
        print(f"{done}\n" if env.is_first else "", end="", flush=True)
    except (ConfigError, CheckpointError) as error:
        report(str(error), env)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


@contextmanager
def recorded() -> Iterator[None]:
    """Leave a traceback where the launcher looks for it, before the other ranks hear of it: so it shows the first."""
    try:
        yield
    except (ConfigError, CheckpointError, NothingToDo):
        raise
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        ErrorHandler().record_exception(error)
        raise


def report(message: str, env: LaunchEnvironment) -> None:
    """Print a mistake that every rank has found once. One that only another host has is printed by its first rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the loop notes it and goes on; here nothing is left to end cleanly
    if not env.is_first:
        time.sleep(LINGER_S)
    if env.local_rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)


def plan_of(config: Config, env: LaunchEnvironment) -> Plan:
    """The plan on the hosts as the launcher started them."""
    counts = [node.ranks for node in env.nodes] or [env.local_world_size] * (env.world_size // env.local_world_size)
    addresses, tags = [node.address for node in env.nodes], [node.tag for node in env.nodes]
    if not any(tags) and len(config.cluster.node_tags) == len(counts):  # the launcher knows of no classes
        tags = list(config.cluster.node_tags)
    return Plan.from_config(config, Cluster.from_counts(counts, addresses, tags))
