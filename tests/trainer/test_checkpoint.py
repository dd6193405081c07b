"""The checkpointer by itself, on a few numbers."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spmd_rl.config import ConfigError
from spmd_rl.config.load import compose
from spmd_rl.config.run import CheckpointConfig
from spmd_rl.trainer.ahead import check_in_flight
from spmd_rl.trainer.checkpoint import (
    Checkpointer,
    check_fingerprint,
    committed,
    find_resume,
    read_state,
    step_of,
)
from tests.runtime.ranks import runtime
from tests.world import Worlds


def numbers(here: Any, start: float) -> dict[str, Any]:
    mesh = here.groups.mesh(here.layout("actor").mesh)
    rows = torch.arange(10.0).reshape(5, 2) + start
    return {
        "sharded": distribute_tensor(rows, mesh, [Shard(0)]),  # five rows: uneven on two ranks
        "whole": distribute_tensor(rows * 2, mesh, [Replicate()]),
        "plain": torch.tensor(start),
    }


def values(tensors: dict[str, Any]) -> dict[str, list[Any]]:
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).tolist() for k, v in tensors.items()}


def save_slowly(folder: Path) -> dict[str, Any]:
    """A save in the background that is held up on rank 1 while the numbers change."""
    write = FileSystemWriter.write_data

    def waiting(self: FileSystemWriter, *args: Any) -> Any:
        while here.pool_rank == 1 and not (folder / "go").exists():
            time.sleep(0.01)
        return write(self, *args)

    with runtime() as here:
        FileSystemWriter.write_data = waiting  # type: ignore[method-assign]
        try:
            checkpointer = Checkpointer(folder, CheckpointConfig(async_save=True), here)
            tensors = numbers(here, 1.0)
            expected = values(tensors)
            checkpointer.save(7, tensors, {"step": 7})
            for tensor in tensors.values():
                tensor.add_(100.0)
            early = (checkpointer.written, [p.name for p in committed(folder)])
            here.barrier()
            if here.is_first:
                (folder / "go").touch()
            while not checkpointer.written:
                time.sleep(0.01)
            before = [p.name for p in committed(folder)]
            here.barrier()
            checkpointer.finish()
            again = numbers(here, 0.0)
            state = checkpointer.load(folder / "checkpoints" / "step_000007", again)
            return {"early": early, "before": before, "equal": values(again) == expected, "step": state["step"]}
        finally:
            FileSystemWriter.write_data = write  # type: ignore[method-assign]


def test_a_background_save_holds_what_was_there_when_it_began(worlds: Worlds, tmp_path: Path) -> None:
    for seen in worlds[2].run(save_slowly, tmp_path):
        assert seen == {"early": (False, []), "before": [], "equal": True, "step": 7}
    assert [step_of(p) for p in committed(tmp_path)] == [7]


def save_some(folder: Path, keep: int, steps: list[int]) -> None:
    with runtime() as here:
        checkpointer = Checkpointer(folder, CheckpointConfig(keep=keep), here)
        for step in steps:
            checkpointer.save(step, numbers(here, step), {"step": step})


def load_some(folder: Path, begin: int) -> tuple[list[int], dict[str, list[Any]], dict[str, list[Any]]]:
    with runtime() as here:
        checkpointer = Checkpointer(folder, CheckpointConfig(), here)
        tensors = numbers(here, 0.0)
        newest = committed(folder)[-1]
        checkpointer.load(newest, tensors)
        checkpointer.begin(begin)
        here.barrier()
        left = [step_of(p) for p in committed(folder)]
        return left, values(tensors), values(numbers(here, step_of(newest)))


def test_the_last_ones_are_kept_and_load_on_any_number_of_ranks(worlds: Worlds, tmp_path: Path) -> None:
    for keep, left in ((2, [999_999, 1_000_000]), (1, [1_000_000]), (0, [1, 2, 999_999, 1_000_000])):
        folder = tmp_path / str(keep)
        worlds[2].run(save_some, folder, keep, [1, 2, 999_999, 1_000_000])
        assert [step_of(p) for p in committed(folder)] == left
    for size in (1, 2, 4):
        for _, loaded, expected in worlds[size].run(load_some, tmp_path / "2", 2_000_000):
            assert loaded == expected
    for left, _, _ in worlds[2].run(load_some, tmp_path / "0", 2):
        assert left == [1, 2]
    aside = tmp_path / "0" / "checkpoints" / "replaced"
    assert read_state(aside / "step_1000000")["step"] == 1_000_000


def made(folder: Path, step: int, fingerprint: dict[str, int]) -> Path:
    place = folder / "checkpoints" / f"step_{step:06d}"
    place.mkdir(parents=True)
    (place / "trainer.json").write_text(
        f'{{"step": {step}, "fingerprint": {str(fingerprint).replace(chr(39), chr(34))}}}'
    )
    return place


def test_what_to_resume_from(tmp_path: Path) -> None:
    assert find_resume("auto", tmp_path) is None
    second, third = made(tmp_path, 2, {}), made(tmp_path, 1_000_003, {})
    torn = tmp_path / "checkpoints" / "step_2000000.partial"
    torn.mkdir()
    assert find_resume("auto", tmp_path) == third
    assert find_resume("never", tmp_path) is None
    assert find_resume(str(second), Path("elsewhere")) == second
    with pytest.raises(ConfigError, match=r"is not a committed checkpoint .*; committed there: .*step_000002"):
        find_resume(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="is not a committed checkpoint"):
        find_resume(str(torn), tmp_path)


def test_another_model_is_named(tmp_path: Path) -> None:
    place = made(tmp_path, 2, {"hidden_size": 64, "vocab_size": 104})
    check_fingerprint(place, {"hidden_size": 64, "vocab_size": 104})
    with pytest.raises(ConfigError, match=r"another model \(hidden_size: saved 64, now 128\)"):
        check_fingerprint(place, {"hidden_size": 128, "vocab_size": 104})


def test_a_small_file_on_a_full_disk_is_no_file(tmp_path: Path) -> None:
    """Less than a buffer: what is written only when the file is closed must not be lost without a word."""
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "000000.rows").symlink_to("/dev/full")
    here: Any = SimpleNamespace(pool=SimpleNamespace(name="global"), control=None)
    files = {"carried/000000.rows": torch.zeros(100, dtype=torch.uint8)}
    problem, _ = Checkpointer(tmp_path, CheckpointConfig(), here)._write(tmp_path, {}, files)
    assert "No space left on device" in problem


def test_what_is_in_flight_is_not_spoilt_by_another_config() -> None:
    def resumed(*overrides: str, n: int = 4) -> None:
        check_in_flight(state, compose(["experiment=tiny", f"rollout.n={n}", *overrides]))

    off = ("trainer.schedule=one_step_off", "+pools.rollout.n_gpus_per_node=1", "rollout.pool=rollout")
    state: dict[str, Any] = {"ahead": [{}, {}], "carried": {"n": 4, "groups": []}}
    resumed(*off)
    with pytest.raises(ConfigError, match=r"carries 2 steps of rollout\.n=4 that are not trained on, now rollout\.n=2"):
        resumed(*off, n=2)
    with pytest.raises(
        ConfigError, match=r"drawn under older weights, but trainer\.schedule=colocated .* corrects nothing"
    ):
        resumed()
    for chosen in ("rollout_is=token", "rollout_is=null", "bypass_mode=true"):
        resumed(f"algorithm.rollout_correction.{chosen}")
    state = {"ahead": [], "carried": {"n": 4, "groups": [{}]}}
    with pytest.raises(ConfigError, match=r"carries 1 groups of rollout\.n=4 begun replies, drawn under older weights"):
        resumed()
    resumed("rollout.partial=true", "rollout.max_new_tokens_per_step=2")
    state = {"ahead": [], "carried": {"n": 4, "groups": []}}
    resumed(n=2)
