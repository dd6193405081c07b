"""What the commands that run on many ranks have in common: `train`, `eval`, `generate`."""

import sys
from collections.abc import Callable

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import parse_arguments
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan


def on_every_rank(command: str, argv: list[str], act: Callable[[Config, LaunchEnvironment], None]) -> int:
    """Compose the config and act on it. Exit status 2 for a user's mistake: every rank finds it, rank 0 prints it."""
    env = read_environment()
    try:
        arguments = parse_arguments(argv)
        if text := arguments.text(command):
            print(text if env.is_first else "", end="")
            return 0
        arguments.reject_others()
        act(arguments.config(), env)
    except ConfigError as error:
        if env.is_first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def plan_of(config: Config, env: LaunchEnvironment) -> Plan:
    """The plan on the hosts as the launcher started them."""
    nodes = env.world_size // env.local_world_size
    return Plan.from_config(config, Cluster.from_counts([env.local_world_size] * nodes))
