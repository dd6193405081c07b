"""Whole runs of a small MoE model in which training takes the experts that the rollout chose."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.config.load import compose
from spmd_rl.trainer.ahead import check_in_flight
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.launched import lines, run
from tests.trainer.runs import many, steps_taken, with_trainer
from tests.trainer.test_pools import apart
from tests.world import Worlds

MOE = [
    "model.path=tiny-moe",
    "data.max_response_length=12",
    "rollout.stop_token_ids=[10,20,30,40,50,60,70,80]",
    "actor.optim.eps=1e-5",
    "actor.optim.lr=3e-3",
    "actor.engine.max_tokens_per_micro_batch=160",
]
REPLAY = "actor.router_replay=rollout"
TWO_UPDATES = ["actor.ppo_mini_batch_size=2"]
ONE_UPDATE = ["actor.ppo_mini_batch_size=4"]
M = "actor.engine.megatron"
WAYS: dict[str, list[str]] = {
    "colocated": [],
    "a rollout pool": apart(rollout=1),
    "ulysses": ["actor.engine.fsdp.ulysses_size=2", "actor.engine.gradient_checkpointing=true"],
    "tp 2": ["engine=megatron", f"{M}.tp=2"],
    "pp 2": ["engine=megatron", f"{M}.pp=2"],
    "cp 2": ["engine=megatron", f"{M}.cp=2"],
    "ep 2": ["engine=megatron", f"{M}.ep=2"],
}
LOADS = ("actor/moe_load_max", "actor/moe_load_mean")


def comparable(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what the clock said, and what only the Megatron engine counts."""
    left_out = ("timing", "perf/", "trainer/idle_s", *LOADS)
    return [{name: value for name, value in step.items() if not name.startswith(left_out)} for step in steps]


@pytest.fixture(scope="module")
def alone(worlds: Worlds) -> Any:
    """On one rank: two updates a step, with replay and without; one update a step, with and without."""
    cases = [[*MOE, *TWO_UPDATES, REPLAY], [*MOE, *TWO_UPDATES], [*MOE, *ONE_UPDATE, REPLAY], [*MOE, *ONE_UPDATE]]
    return [comparable(steps) for steps in worlds[1].run(many, cases, 2)[0]]


def agree(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(got) == len(expected) == 2
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_run_in_every_layout(worlds: Worlds, alone: Any, way: str) -> None:
    if "engine=megatron" in WAYS[way]:
        pytest.importorskip("megatron.core")
    (got,) = worlds[2].run(many, [[*MOE, *TWO_UPDATES, REPLAY, *WAYS[way]]], 2)[0]
    assert isinstance(got, list), got
    agree(comparable(got), alone[0])


def test_under_the_rollouts_own_weights_it_changes_nothing(alone: Any) -> None:
    _, _, replayed, free = alone
    differs = [step.pop("actor/router_replay_differs") for step in replayed]
    assert differs == [0.0, 0.0]
    agree(replayed, free)


def test_after_an_update_it_does(alone: Any) -> None:
    replayed, free, _, _ = alone
    assert all(0 < step["actor/router_replay_differs"] < 0.5 for step in replayed)
    assert replayed[0]["actor/grad_norm"] != pytest.approx(free[0]["actor/grad_norm"], rel=1e-4)


PARTIAL = [
    *MOE,
    REPLAY,
    "actor.ppo_mini_batch_size=2",
    "data.train.size=40",
    "rollout.segment_tokens=3",
    "rollout.over_sampling=1.5",
    "rollout.partial=true",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
]
AHEAD = [*apart(rollout=1)[:-1], "trainer.schedule=one_step_off"]


@pytest.mark.parametrize("where", [[], AHEAD], ids=["colocated", "one step off"])
def test_carried_replies_keep_their_experts_over_a_resume(worlds: Worlds, tmp_path: Path, where: list[str]) -> None:
    base, saved = [*PARTIAL, *where], "checkpoints/step_000002"
    assert worlds[2].run(run, [*base, f"trainer.output_dir={tmp_path / 'whole'}"])[0] == (0, "")
    whole = lines(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / saved, tmp_path / "cut" / saved)
    in_flight = json.loads((tmp_path / "cut" / saved / "trainer.json").read_text())
    assert in_flight["carried"]["groups"]
    assert len(in_flight["ahead"]) == bool(where)
    assert worlds[2].run(run, [*base, f"trainer.output_dir={tmp_path / 'cut'}"])[0] == (0, "")
    resumed = [step for step in lines(tmp_path / "cut") if step["step"] > 2]
    assert [step["step"] for step in resumed] == [3, 4]
    assert resumed == [step for step in whole if step["step"] > 2]
    assert all(0 < step["actor/router_replay_differs"] < 0.5 for step in resumed)


def test_what_is_in_flight_must_fit() -> None:
    state: dict[str, Any] = {"ahead": [], "carried": {"n": 4, "groups": [{}]}}
    with pytest.raises(ConfigError, match=r"of actor\.router_replay=none, now rollout; put it back"):
        check_in_flight(state, compose(["experiment=tiny", "rollout.n=4", REPLAY]))


def test_a_reference_routes_for_itself(worlds: Worlds) -> None:
    assert worlds[1].run(who_replays)[0] == {"actor": True, "ref": False}


def who_replays() -> dict[str, bool]:
    def look(trainer: Trainer) -> dict[str, bool]:
        steps_taken(trainer)
        engines = {name: getattr(trainer.roles, name).engine for name in ("actor", "ref")}
        return {name: engine.replay is not None for name, engine in engines.items()}

    return with_trainer(look, [*MOE, REPLAY, "actor.use_kl_loss=true"], 1)


def test_mistakes(worlds: Worlds) -> None:
    cases = [[REPLAY], ["actor.router_replay=R2"], [*MOE, REPLAY, "actor.engine.compile=true"]]
    dense, unknown, compiled = worlds[1].run(many, cases)[0]
    assert "actor.router_replay=rollout: the routers of llama are not known here" in dense
    assert "actor.router_replay=R2 is not one of none, rollout" in unknown
    assert "does not go through torch.compile; set actor.engine.compile=false" in compiled
