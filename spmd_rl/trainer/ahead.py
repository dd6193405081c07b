"""Steps that were produced and not yet consumed, and how a checkpoint holds them."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.config import Config, ConfigError
from spmd_rl.data.batch import Batch
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.messages import read, whole
from spmd_rl.runtime.remote import Remote
from spmd_rl.trainer.collect import Collected
from spmd_rl.trainer.correction import bypasses, corrects

Ahead = deque[Collected | Remote | None]
"""Oldest first; None: the data had run out by then."""
FOLDER = "ahead"
"""Of a checkpoint: <steps ahead>_<pool rank>.rows, the rows of one step that one rank of the rollout held."""


def saved_ahead(ahead: Ahead, runtime: Runtime) -> dict[str, Tensor]:
    """This rank's files, name -> bytes: its rows of each step. The pool's first rank writes even if it has none."""
    files: dict[str, Tensor] = {}
    for number, found in enumerate(ahead):
        if isinstance(found, Collected):
            files |= saved_rows(f"{FOLDER}/{number}_", found.batch, runtime)
    return files


def saved_rows(name: str, batch: Batch | Remote, runtime: Runtime) -> dict[str, Tensor]:
    """`name`<pool rank>.rows -> this rank's rows. The pool's first rank writes even if it has none."""
    if isinstance(batch, Batch) and (len(batch) or runtime.pool_rank == 0):
        return {f"{name}{runtime.pool_rank:06d}.rows": whole(batch)}
    return {}


def load_rows(name: str, folder: Path, runtime: Runtime) -> Batch:
    """Rows that `saved_rows` wrote, dealt out over the ranks of this pool, whatever their number was."""
    files = sorted(folder.glob(f"{name}*.rows"))
    mine = files[runtime.pool_rank :: runtime.pool.size]
    parts = [_read(file) for file in mine] or [_read(files[0]).select([])]  # the columns at least
    return Batch.concat(parts)


def check_in_flight(state: Mapping[str, Any], config: Config) -> None:
    """ConfigError when a checkpoint holds begun replies, or steps not trained on, that this run would spoil: of another
    rollout.n (groups and mini-batches would be cut in the wrong places), with or without the experts that were chosen,
    or with nothing to weigh their older policy.
    """
    saved, groups, steps = state["carried"]["n"], len(state["carried"]["groups"]), len(state["ahead"])
    if not groups and not steps:
        return
    of = f"of rollout.n={saved}"
    what = f"{groups} groups {of} begun replies" if groups else f"{steps} steps {of} that are not trained on"
    if saved != config.rollout.n:
        raise ConfigError(
            f"resume: the checkpoint carries {what}, now rollout.n={config.rollout.n}; put it back, or start anew with "
            "trainer.resume=never"
        )
    replay, wanted = state["carried"].get("router_replay", "none"), config.actor.router_replay
    if replay != wanted:
        raise ConfigError(
            f"resume: the checkpoint carries {what} of actor.router_replay={replay}, now {wanted}; put it back, or "
            "start anew with trainer.resume=never"
        )
    undecided = config.algorithm.rollout_correction.rollout_is == "auto"
    if undecided and not corrects(config) and not bypasses(config):
        now = f"trainer.schedule={config.trainer.schedule} with rollout.partial={str(config.rollout.partial).lower()}"
        raise ConfigError(
            f"resume: the checkpoint carries {what}, drawn under older weights, but {now} corrects nothing; set "
            "algorithm.rollout_correction.rollout_is=token (or null, to train on them as on the actor's own)"
        )


def load_ahead(metrics: Sequence[Mapping[str, float] | None], folder: Path, runtime: Runtime) -> Ahead:
    """The steps as they were, on any number of rollout ranks: rows lie where their files are read."""
    return deque(_load(number, said, folder, runtime) for number, said in enumerate(metrics))


def _load(number: int, said: Mapping[str, float] | None, folder: Path, runtime: Runtime) -> Collected | Remote | None:
    if not runtime.plays("rollout", "reward"):
        return Remote(("rollout",))
    if said is None:
        return None
    if not runtime.plays("rollout"):
        return Collected(Remote(("rollout",)), dict(said))
    return Collected(load_rows(f"{FOLDER}/{number}_", folder, runtime), dict(said))


def _read(file: Path) -> Batch:
    return read(torch.from_numpy(np.fromfile(file, dtype=np.uint8)))
