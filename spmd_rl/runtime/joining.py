"""A rank's way into the job: it meets the others, learns its rank, and is watched over until it leaves."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmd_rl.config import Config, ConfigError
from spmd_rl.observe.live import HERE
from spmd_rl.observe.status import STATUS, read_bytes, write_whole
from spmd_rl.runtime.environment import LaunchEnvironment
from spmd_rl.runtime.liveness import Liveness
from spmd_rl.runtime.roster import meet


class NothingToDo(Exception):
    """The run is done already: every rank finds it, and leaves config, metrics, status and checkpoints as they are.
    Says so, with the ways out."""


@contextmanager
def joined(config: Config, env: LaunchEnvironment, trains: bool) -> Iterator[LaunchEnvironment]:
    """Meet the job's other ranks, and be watched over by them until the block ends.

    Gives the environment with the job's own rank numbers. A run that `trains` keeps them, and shows what its ranks do,
    in trainer.output_dir. A rank that leaves by an error ends the job; mistakes (ConfigError and the like) are every
    rank's own, and end it only when others go on regardless. After NothingToDo the folder's status.json is as before.
    """
    HERE.begin("meeting")
    env = meet(config, env, keeps_roster=trains)
    folder = Path(config.trainer.output_dir) if trains else None
    alive = Liveness(
        env.store, env.rank, env.world_size, env.on_host, config.trainer.timeout_s, folder, env.attempt, env.store_rank
    )
    earlier = read_bytes(folder / STATUS) if folder is not None and env.rank == 0 else None
    HERE.begin("inputs")
    alive.begin()
    try:
        yield env
    except NothingToDo:
        alive.leave()
        if folder is not None and earlier is not None:
            with suppress(OSError):
                write_whole(folder / STATUS, earlier)
        raise
    except BaseException as error:
        alive.leave(error, mistake=isinstance(error, ConfigError) or not isinstance(error, Exception))
        raise
    else:
        alive.leave()
    finally:
        HERE.reset()
