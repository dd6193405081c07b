"""DAPO: groups without signal are replaced by new prompts; the same ones on any number of ranks, with the same end."""

from typing import Any

import pytest

from spmd_rl.observe.metrics import deterministic
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import REWARDS, many, with_trainer
from tests.world import Worlds

DAPO = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    f"reward.functions=['{REWARDS}:rarely']",
    "data.train_batch_size=3",
    "actor.ppo_mini_batch_size=3",
    "reward.overlong_buffer_len=4",
    "trainer.seed=1",
]
RUNS_OUT = [*DAPO, "data.train.size=30", "trainer.total_epochs=2", "trainer.total_training_steps=null"]


def watched(trainer: Trainer) -> dict[str, Any]:
    """What a run sampled and trained on."""
    shards, rounds = [], []
    consume, sample = trainer.consume, trainer.sample

    def note_rows(shard: Any) -> dict[str, float]:
        shards.append({"uid": shard.uids.tolist(), "lengths": shard.lengths})
        return consume(shard)

    def note_prompts(prompts: Any, step: int) -> Any:
        rounds.append([step, *(p.uid for p in prompts)])
        return sample(prompts, step)

    trainer.consume, trainer.sample = note_rows, note_prompts  # type: ignore[method-assign,assignment]
    metrics: list[dict[str, float]] = []
    trainer.log = lambda m, step: metrics.append(dict(m))  # type: ignore[method-assign,assignment]
    trainer.run(None)
    return {
        "shards": shards,
        "rounds": rounds,
        "metrics": metrics,
        "done": trainer.done,
        "order": trainer.order.state_dict(),
    }


def run(overrides: list[str], steps: int) -> dict[str, Any]:
    return with_trainer(watched, overrides, steps)


@pytest.fixture(scope="module")
def alone(worlds: Worlds) -> dict[str, Any]:
    return worlds[1].run(run, DAPO, 3)[0]


def test_groups_without_signal_are_replaced_in_order(alone: dict[str, Any]) -> None:
    assert alone["done"] == 3
    for step, (shard, metrics) in enumerate(zip(alone["shards"], alone["metrics"], strict=True), start=1):
        sampled = [uid for number, *uids in alone["rounds"] if number == step for uid in uids]
        groups = shard["uid"][::4]
        assert len(shard["uid"]) == 12
        assert shard["uid"] == [uid for uid in groups for _ in range(4)]
        assert groups == [uid for uid in sampled if uid in groups]  # in the order of sampling
        assert metrics["train/num_sampled_prompts"] == len(sampled)
        assert metrics["train/num_gen_batches"] == len(sampled) / 3
        assert metrics["train/signal_ratio"] * len(sampled) == 3 + metrics["train/num_surplus_groups"]
        assert metrics["actor/grad_norm"] > 0
    assert max(metrics["train/num_gen_batches"] for metrics in alone["metrics"]) > 1
    uids = [uid for _, *uids in alone["rounds"] for uid in uids]
    assert len(uids) == len(set(uids))


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_prompts_on_any_ranks(worlds: Worlds, alone: dict[str, Any], size: int) -> None:
    for found in worlds[size].run(run, DAPO, 3):
        for name in ("shards", "rounds", "done", "order"):
            assert found[name] == alone[name], name
        for mine, theirs in zip(found["metrics"], alone["metrics"], strict=True):
            assert deterministic(mine) == pytest.approx(deterministic(theirs), rel=2e-4, abs=2e-5)


def test_the_run_ends_when_the_data_does(worlds: Worlds) -> None:
    (first,) = worlds[1].run(run, RUNS_OUT, 3)
    assert 0 < first["done"] < 20
    assert (first["order"]["epoch"], first["order"]["offset"]) == (2, 0)
    assert sum(len(uids) for _, *uids in first["rounds"]) == 60
    for found in worlds[2].run(run, RUNS_OUT, 3):
        assert (found["done"], found["rounds"], found["shards"]) == (first["done"], first["rounds"], first["shards"])


@pytest.mark.parametrize("size", [1, 2])
def test_too_many_rounds_are_an_error_that_says_what_to_do(worlds: Worlds, size: int) -> None:
    hopeless = [*DAPO, f"reward.functions=['{REWARDS}:never']", "algorithm.filter_groups.max_num_gen_batches=3"]
    for (found,) in worlds[size].run(many, [hopeless]):
        assert found.startswith(
            "ConfigError: dynamic sampling: 0 of the 3 groups with signal were found among 9 prompts"
        )
        assert "max_num_gen_batches=3" in found
        assert "raise rollout.n" in found
