"""A checkpoint knows nothing of layouts: saved under one, loaded under another, the run goes on as if nothing were."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.config.load import save_config
from spmd_rl.config.run import CheckpointConfig
from spmd_rl.export import export
from spmd_rl.models.checkpoint import Checkpoint
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.trainer import Trainer
from tests.engines.megatron.conftest import Families
from tests.engines.megatron.ranks import M, actor, mine, objective, whole
from tests.trainer.runs import with_trainer
from tests.world import Worlds

OPTIM = {"lr": 1e-2, "eps": 1e-4, "clip_grad": 1.0}
CASES: dict[str, tuple[str, tuple[int, list[str]], tuple[int, list[str]]]] = {
    "tp 2 -> alone": ("qwen3", (2, ["tp=2"]), (1, [])),
    "pp 2 · vpp 2 -> tp 2, tied": ("llama-tied", (2, ["pp=2", "vpp=2"]), (2, ["tp=2"])),
    "dp 2 -> pp 2, tied": ("llama-tied", (2, []), (2, ["pp=2", "distributed_optimizer=false"])),
    "tp 2 · ep 2 · etp 1 -> cp 2": ("qwen3-moe-mixed", (4, ["tp=2", "ep=2", "etp=1"]), (2, ["cp=2"])),
}


def save(folder: Path, sizes: list[str], place: Path, background: bool) -> Any:
    """Two steps, a checkpoint, one more step: the weights at the checkpoint and in the end."""
    with actor(folder, ["engine=megatron", *(f"{M}.{s}" for s in sizes)], OPTIM) as (engine, runtime):
        rows, micro = mine(engine)
        for _ in range(2):
            engine.train(rows, micro, objective)
        checkpointer = Checkpointer(place, CheckpointConfig(async_save=background), runtime)
        checkpointer.save(2, {"actor": engine.state()}, {"versions": {"actor": engine.version}})
        then = whole(engine)
        engine.train(rows, micro, objective)
        checkpointer.finish()
        return then, whole(engine)


def resume(folder: Path, sizes: list[str], place: Path) -> Any:
    """The checkpoint into a fresh engine, one step: weights before and after, and what AdamW counts."""
    with actor(folder, ["engine=megatron", *(f"{M}.{s}" for s in sizes)], OPTIM) as (engine, runtime):
        rows, micro = mine(engine)
        tensors = {"actor": engine.state()}
        checkpointer = Checkpointer(place, CheckpointConfig(), runtime)
        state = checkpointer.load(place / "checkpoints" / "step_000002", tensors)
        engine.load_state(tensors["actor"], state["versions"]["actor"])
        then = whole(engine)
        engine.train(rows, micro, objective)
        counted = [s["step"] for s in engine.optimizer.adam.state.values()]
        distinct = len({step.data_ptr() for step in counted}) == len(counted) == len(engine.optimizer.shares)
        return then, whole(engine), engine.version, {float(step) for step in counted}, distinct


@pytest.mark.parametrize("case", CASES)
def test_saved_under_one_layout_resumed_under_another(
    worlds: Worlds, families: Families, tmp_path: Path, case: str
) -> None:
    family, (ranks, sizes), (other_ranks, other_sizes) = CASES[case]
    folder = families.folder(family)
    then, after = worlds[ranks].run(save, folder, sizes, tmp_path, case.startswith("tp"))[0]
    for found in worlds[other_ranks].run(resume, folder, other_sizes, tmp_path):
        loaded, resumed, version, counted, distinct = found
        assert all(torch.equal(w, loaded[n]) for n, w in then.items())
        moved = sum((after[n] - then[n]).square().sum() for n in then) ** 0.5
        apart = sum((after[n] - resumed[n]).square().sum() for n in then) ** 0.5
        assert apart <= 1e-3 * moved  # a step counted wrongly would be a tenth of it
        assert (version, counted) == (3, {3.0})
        assert distinct, "AdamW adds 1 to each share's own step"


def run_and_export(folder: Path, out: Path) -> Any:
    """Two steps of a run with checkpoints; the actor's weights in the end, and the exported ones."""
    overrides = [f"model.path={folder}", "engine=megatron", f"{M}.tp=2"]
    overrides += ["trainer.save_freq=2", f"trainer.output_dir={out}"]

    def use(trainer: Trainer) -> dict[str, torch.Tensor]:
        trainer.run(None)
        save_config(trainer.config, out / "config.yaml")
        return whole(trainer.roles.actor.engine)

    return with_trainer(use, overrides, 2)


def test_a_checkpoint_is_exported(worlds: Worlds, families: Families, tmp_path: Path) -> None:
    trained = worlds[2].run(run_and_export, families.folder("qwen3-moe"), tmp_path / "run")[0]
    export(tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "out", torch.float32)
    found = Checkpoint(tmp_path / "out")
    assert found.keys() == trained.keys()
    assert all(torch.equal(w, found._files[name].get_tensor(name)) for name, w in trained.items())
