"""Whole runs with `engine=megatron`: the same as FSDP's, also with models of different layouts in one process."""

from typing import Any

import pytest

from tests.engines.megatron.ranks import M
from tests.trainer.runs import many
from tests.world import Worlds

RUN = [
    "actor.optim.eps=1e-5",
    "critic.optim.eps=1e-5",
    "data.max_response_length=12",
    "rollout.stop_token_ids=[10,20,30,40,50,60,70,80]",
    "actor.ppo_mini_batch_size=2",
    "actor.engine.max_tokens_per_micro_batch=160",
    "actor.use_kl_loss=true",
    "actor.entropy_coeff=0.01",
]
PPO = ["algorithm.adv_estimator=gae", "critic.engine.max_tokens_per_micro_batch=160"]


def sizes(role: str, *values: str) -> list[str]:
    return [f"{role}.engine.megatron.{value}" for value in values]


@pytest.fixture(scope="module")
def fsdp(worlds: Worlds) -> Any:
    return worlds[1].run(many, [RUN, [*RUN, *PPO]])[0]


def agree(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(got) == len(expected) == 3, got
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        timed = ("timing", "perf/")
        wanted = {name: value for name, value in theirs.items() if not name.startswith(timed)}
        assert {name: mine[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "cp=2"])
def test_three_steps_of_grpo(worlds: Worlds, fsdp: Any, layout: str) -> None:
    run = [*RUN, "engine=megatron", *sizes("actor", layout), *sizes("ref", "tp=2")]
    (got,) = worlds[2].run(many, [run])[0]
    agree(got, fsdp[0])


def test_actor_reference_and_critic_each_in_a_layout_of_its_own(worlds: Worlds, fsdp: Any) -> None:
    layouts = [*sizes("actor", "tp=2"), *sizes("ref", "pp=2"), *sizes("critic", "cp=2")]
    (got,) = worlds[2].run(many, [[*RUN, *PPO, "engine=megatron", *layouts]])[0]
    agree(got, fsdp[1])


def test_engines_may_be_mixed(worlds: Worlds, fsdp: Any) -> None:
    (got,) = worlds[2].run(many, [[*RUN, *PPO, "critic.engine.name=megatron", *sizes("critic", "pp=2")]])[0]
    agree(got, fsdp[1])


def test_mistakes_are_found_before_a_model_is_loaded(worlds: Worlds) -> None:
    cases = [["engine=megatron", f"{M}.tp=3"], ["engine=megatron", f"{M}.ep=2"]]
    cases += [["engine=megatron", "actor.engine.compile=true"], ["engine=megatron", "model.lora.rank=4"]]
    three, experts, compiled, adapters = worlds[1].run(many, cases)[0]
    assert "tp·cp·pp = 3·1·1 = 3 does not divide the 1 ranks" in three
    assert "etp·ep·pp = 1·2·1 = 2 does not divide the 1 ranks" in experts
    assert "actor.engine.compile=true needs actor.engine.name=fsdp" in compiled
    assert "model.lora.rank=4 needs actor.engine.name=fsdp" in adapters
