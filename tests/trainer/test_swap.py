"""Runs whose roles take turns on the device: the same to the last bit as those whose roles stay."""

from pathlib import Path

import pytest

from spmd_rl.observe.jsonl import read_metrics
from tests.trainer.launched import STEPS, lines, run
from tests.trainer.runs import train
from tests.world import Worlds

ROLES = ("actor", "ref", "critic")
PPO = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4", "critic.engine={gradient_checkpointing: false}"]
TURNS = [f"{role}.engine.offload_params=true" for role in ROLES] + [
    f"{role}.engine.offload_optimizer=true" for role in ("actor", "critic")
]


def test_a_run_that_is_saved_validated_and_resumed(worlds: Worlds, tmp_path: Path) -> None:
    stays, moves, resumed = (tmp_path / name for name in ("stays", "moves", "resumed"))
    assert worlds[2].run(run, [*PPO, f"trainer.output_dir={stays}"]) == [(0, "")] * 2
    assert worlds[2].run(run, [*PPO, *TURNS, f"trainer.output_dir={moves}"]) == [(0, "")] * 2
    assert lines(moves) == lines(stays)
    (moves / "checkpoints").rename(tmp_path / "kept")
    again = f"trainer.resume={tmp_path / 'kept' / 'step_000002'}"
    assert worlds[2].run(run, [*PPO, *TURNS, again, f"trainer.output_dir={resumed}"]) == [(0, "")] * 2
    assert lines(resumed) == lines(stays)[3:]
    rows = [row for row in read_metrics(moves / "metrics.jsonl") if "perf/swap_out_gb" in row]
    assert len(rows) == STEPS
    assert all(
        row[f"perf/swap_{way}_gb_per_s"] > 0 and row[f"perf/swap_{way}_gb"] > 0 for row in rows for way in ("out", "in")
    )
    assert not any("perf/swap_out_gb" in row for row in read_metrics(stays / "metrics.jsonl"))


@pytest.mark.parametrize("filtering", ["false", "true"])
def test_the_optimizer_goes_once_a_step_however_often_is_generated(worlds: Worlds, filtering: str) -> None:
    several = [f"algorithm.filter_groups.enable={filtering}", "algorithm.filter_groups.max_num_gen_batches=10"]
    (steps,) = worlds[1].run(train, [*several, "actor.engine.offload_optimizer=true"])
    sizes = [(step["perf/swap_out_gb"], step["perf/swap_in_gb"]) for step in steps]
    assert sizes[0] == (0, 0)  # AdamW has no state before its first step
    assert sizes[1] == sizes[2]
    assert sizes[1][0] == sizes[1][1] > 0
    plain = worlds[1].run(train, several)[0]
    assert [s["actor/grad_norm"] for s in steps] == [s["actor/grad_norm"] for s in plain]
