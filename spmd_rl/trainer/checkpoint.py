"""Checkpoints: torch DCP shards and one JSON, written aside and committed by a rename; resumed at any world size.

<output_dir>/checkpoints/step_000040/            committed: complete in every byte
<output_dir>/checkpoints/step_000060.partial/    being written, or torn: never picked up, removed at the next save
  shards/<pool>/    DCP shards of the roles that were trained on a pool; trainer.json says which
  ahead/            batches that were sampled and not yet trained on
<output_dir>/checkpoints/replaced/step_000080/   of an earlier run; the one now here began before step 80
"""

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from spmd_rl.config import ConfigError
from spmd_rl.config.load import load_config
from spmd_rl.config.run import CheckpointConfig
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.bridge import from_bytes, to_bytes
from spmd_rl.trainer.border import together

_NAME = re.compile(r"step_(\d{6,})$")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; says why and which one is the last good one."""


def committed(output_dir: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    found = [p for p in (output_dir / "checkpoints").glob("step_*") if _NAME.match(p.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a committed checkpoint was saved after."""
    return int(checkpoint.name.removeprefix("step_"))


def find_resume(resume: str, output_dir: Path) -> Path | None:
    """The folder to resume from: the newest of this run (`auto`), none (`never`), or the one named.

    Raises: ConfigError when the named folder is no committed checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        newest = committed(output_dir)
        return newest[-1] if newest else None
    folder = Path(resume)
    if not (folder / "trainer.json").is_file():
        inside = committed(folder) or committed(folder.parent)
        hint = f"; committed there: {', '.join(map(str, inside))}" if inside else ""
        raise ConfigError(f"trainer.resume={resume} is not a committed checkpoint (no trainer.json in it){hint}")
    return folder


def find_checkpoint(path: Path) -> Path:
    """`path` when it is a committed checkpoint, else the newest one of the run whose output_dir it is.

    Raises ConfigError when there is none.
    """
    if newest := committed(path):
        return newest[-1]
    if (path / "trainer.json").is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}")
    if (path / "config.yaml").is_file():
        every = load_config(path / "config.yaml").trainer.save_freq
        why = "never; 0 saves at the end" if every == -1 else "at the end" if every == 0 else f"every {every} steps"
        raise ConfigError(f"{path} is a run that has saved no checkpoint (trainer.save_freq={every}: {why})")
    inside = committed(path.parent)
    hint = f"; committed beside it: {', '.join(map(str, inside))}" if inside else ""
    raise ConfigError(f"{path} is not a committed checkpoint (no trainer.json in it), nor a run's output_dir{hint}")


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part: step, data position, controller, model fingerprint."""
    state: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    return state


def shards_of(folder: Path, pool: str) -> Path:
    """Where a pool's DCP shards are in a checkpoint."""
    return folder / "shards" / pool


def check_fingerprint(folder: Path, fingerprint: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model, before any weight is loaded.

    Raises: ConfigError with the first differing fields.
    """
    saved = read_state(folder)["fingerprint"]
    differing = [k for k in sorted({*saved, *fingerprint}) if saved.get(k) != fingerprint.get(k)]
    if differing:
        shown = "; ".join(f"{k}: saved {saved.get(k)}, now {fingerprint.get(k)}" for k in differing[:4])
        raise ConfigError(
            f"trainer.resume: {folder} was saved from another model ({shown}); "
            "use that model, another trainer.output_dir, or trainer.resume=never"
        )


@dataclass
class Checkpointer:
    """Writes and reads a run's checkpoints. All ranks of the job call together: what any pool cannot write, none has.

    Shards are written pool by pool, over the pool's control group, which is used for nothing else.
    """

    output_dir: Path
    config: CheckpointConfig
    runtime: Runtime
    pending: tuple[Future[Any] | None, Path] | None = field(default=None, init=False)
    """A save in the background, and what it will be called; None in place of a future where this rank is done."""

    @property
    def _writes(self) -> bool:
        return self.runtime.env.is_first

    def begin(self, step: int) -> None:
        """The run goes on after `step` (0: it starts): later checkpoints, which an earlier run left here, are put
        aside, so that the next start does not resume from them."""
        self._agree("")  # nobody is still reading one
        for stale in committed(self.output_dir) if self._writes else []:
            if step_of(stale) > step:
                place = stale.parent / "replaced" / stale.name
                place.parent.mkdir(exist_ok=True)
                shutil.rmtree(place, ignore_errors=True)
                os.replace(stale, place)

    def save(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], files: Mapping[str, Tensor] | None = None
    ) -> None:
        """Save step `step`: `tensors` of this rank's pool (role -> DTensors and tensors, sharded; none where nothing is
        trained), `state` (JSON, the same everywhere) and `files` of this rank (name -> uint8).

        Raises: CheckpointError when a rank could not write; what was committed before stays.
        """
        self.finish()
        final = self.output_dir / "checkpoints" / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        pools = together({"shards": dict.fromkeys(tensors, self.runtime.pool.name)}, self.runtime)
        problem = self._prepare(partial, state | pools) if self._writes else ""
        if problem := self._agree(problem):
            self._give_up(partial, problem)
        problem, future = self._write(partial, tensors, files or {})
        if self.config.async_save and not problem:
            self.pending = (future, final)
        if problem := self._agree(problem):
            self.pending = None
            self._give_up(partial, problem)
        if self.pending is None:
            self._commit(partial, final)

    def _write(
        self, partial: Path, tensors: dict[str, Any], files: Mapping[str, Tensor]
    ) -> tuple[str, Future[Any] | None]:
        """This rank's part: what went wrong, and what is still being written."""
        shards, group = str(shards_of(partial, self.runtime.pool.name)), self.runtime.control
        try:
            for name, data in files.items():
                place = partial / name
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(data.numpy().data)  # tofile would lose up to 4 KiB on a full disk, and say nothing
            if tensors and self.config.async_save:
                return "", dcp.async_save(tensors, checkpoint_id=shards, process_group=group)  # type: ignore[return-value]
            if tensors:
                dcp.save(tensors, checkpoint_id=shards, process_group=group)
        except BaseException as error:  # DCP raises its own BaseException-derived type, on every rank
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return _cause(error), None
        return "", None

    @property
    def written(self) -> bool:
        """This rank's part of a save in the background is on the disk, so that `finish` will not wait for it."""
        return self.pending is not None and (self.pending[0] is None or self.pending[0].done())

    def finish(self) -> None:
        """Wait for a save in the background and commit it."""
        if self.pending is None:
            return
        future, final = self.pending
        self.pending = None
        error = future.exception() if future is not None else None
        partial = final.with_name(final.name + ".partial")
        if problem := self._agree(_cause(error) if error else ""):
            self._give_up(partial, problem)
        self._commit(partial, final)

    def load(self, folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
        """Fill `tensors` in place from `folder`, whatever pools of whatever sizes wrote it; returns the JSON part."""
        state = read_state(folder)
        for pool in dict.fromkeys(state["shards"][role] for role in tensors):
            part = {role: held for role, held in tensors.items() if state["shards"][role] == pool}
            dcp.load(part, checkpoint_id=str(shards_of(folder, pool)), process_group=self.runtime.control)
        set_rng(torch.load(folder / "rng.pt", weights_only=False))
        return state

    def _prepare(self, partial: Path, state: dict[str, Any]) -> str:
        try:
            for torn in partial.parent.glob("*.partial"):
                shutil.rmtree(torn)
            partial.mkdir(parents=True)
            (partial / "trainer.json").write_text(json.dumps(state, indent=1, default=str))
            torch.save(get_rng(), partial / "rng.pt")
        except (OSError, RuntimeError) as error:
            return _cause(error)
        return ""

    def _agree(self, problem: str) -> str:
        """The first rank's problem that is not empty, on every rank."""
        problems = [from_bytes(said) for said in self.runtime.job.all_gather(to_bytes(problem))]
        return next((p if p.startswith("rank ") else f"rank {r}: {p}" for r, p in enumerate(problems) if p), "")

    def _commit(self, partial: Path, final: Path) -> None:
        problem = ""
        if self._writes:
            try:
                _sync_tree(partial)
                os.replace(partial, final)
                _sync(final.parent)
                for old in committed(self.output_dir)[: -self.config.keep] if self.config.keep else []:
                    shutil.rmtree(old)
            except OSError as error:
                problem = _cause(error)
        if problem := self._agree(problem):
            self._give_up(partial, problem)

    def _give_up(self, partial: Path, problem: str) -> None:
        if self._writes:
            place = next(p for p in partial.absolute().parents if p.exists())
            problem += f"; {shutil.disk_usage(place).free / 1e9:.3g} GB are free there"
            shutil.rmtree(partial, ignore_errors=True)
        good = committed(self.output_dir)
        last = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
        raise CheckpointError(f"saving {partial.name.removesuffix('.partial')} failed ({problem}); {last}")


def _cause(error: BaseException) -> str:
    """The first error behind `error`, in one line; DCP keeps it by rank, Python by what was being handled."""
    for rank, (failure, _) in sorted(getattr(error, "failures", {}).items()):
        return f"rank {rank}: {_cause(failure)}"
    while behind := error.__cause__ or error.__context__:
        error = behind
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[-1]}"


def _sync_tree(folder: Path) -> None:
    """Flush every file to the disk before the rename says that they are all there."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def get_rng() -> dict[str, Any]:
    """State of the three generators that a user's function may draw from (our own noise is keyed, see sampling)."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
