"""Each advantage and each loss in three full steps of the tiny model; what they have to be given is there and right."""

import math
from typing import Any

import pytest
import torch

from spmd_rl.algorithms import ADVANTAGES, POLICY_LOSSES
from spmd_rl.data.batch import Batch
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import REWARDS, many, train, with_trainer
from tests.world import Worlds

TWO_REWARDS = f"reward.functions=['{REWARDS}:digits','{REWARDS}:length']"
RUNS: dict[str, list[str]] = {
    **{f"advantage {name}": [f"algorithm.adv_estimator={name}"] for name in ADVANTAGES},
    **{
        f"loss {name}": [f"actor.policy_loss.loss_mode={name}", "actor.ppo_mini_batch_size=2", "actor.ppo_epochs=2"]
        for name in POLICY_LOSSES
    },
    "gdpo, two rewards": ["algorithm.adv_estimator=gdpo", TWO_REWARDS, "algorithm.gdpo_weights=[1.0,0.5]"],
    "kl in reward, adaptive": [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 1e-9, horizon: 100}",
    ],
    "kl in loss": ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.entropy_coeff=0.01"],
    "one sample a prompt": ["rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
    "a prompt of an epoch's end": ["data.train.size=6", "data.drop_last=false"],
}


@pytest.mark.parametrize("name", RUNS)
def test_three_steps(worlds: Worlds, name: str) -> None:
    steps = worlds[1].run(train, RUNS[name])[0]
    assert len(steps) == 3
    for metrics in steps:
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_updates"] == 0
        assert metrics["reward/errors"] == 0
    assert len({metrics["actor/grad_norm"] for metrics in steps}) == 3
    if name == "kl in reward, adaptive":
        assert steps[2]["actor/reward_kl_penalty_coeff"] != steps[0]["actor/reward_kl_penalty_coeff"] == 0.1


def _advantages(trainer: Trainer) -> dict[str, Any]:
    """Columns of the first step."""
    shard = trainer.deliver(trainer.produce(1), 1)
    assert shard is not None
    trainer.consume(shard)
    batch: Batch = shard.batch
    rows = {str(name): batch[name].tolist() for name in batch.rows.keys()}  # noqa: SIM118 - a TensorDict
    ragged = ("advantages", "response_mask", "rollout_log_probs", "old_log_probs", "rollout_is_weights", "responses")
    return rows | {name: [r.tolist() for r in batch[name].rows()] for name in ragged if name in batch.ragged}


def first_step(overrides: list[str]) -> dict[str, Any]:
    """The batch after one step."""
    return with_trainer(_advantages, overrides)


def test_gdpo_weighs_the_functions_in_the_configs_order(worlds: Worlds) -> None:
    """Columns travel in the order of their names, `digits` before `length`; the config's order is the other one."""
    swapped = f"reward.functions=['{REWARDS}:length','{REWARDS}:digits']"
    gdpo = ["algorithm.adv_estimator=gdpo"]
    one = worlds[1].run(first_step, [*gdpo, TWO_REWARDS, "algorithm.gdpo_weights=[1.0,0.0]"])[0]
    other = worlds[1].run(first_step, [*gdpo, swapped, "algorithm.gdpo_weights=[0.0,1.0]"])[0]
    length = worlds[1].run(first_step, [*gdpo, swapped, "algorithm.gdpo_weights=[1.0,0.0]"])[0]
    assert one["advantages"] == other["advantages"]
    assert one["advantages"] != length["advantages"]


def test_remax_subtracts_the_greedy_replys_score(worlds: Worlds) -> None:
    step = worlds[1].run(first_step, ["algorithm.adv_estimator=remax", TWO_REWARDS])[0]
    for row, tokens in enumerate(step["advantages"]):
        assert tokens[0] == pytest.approx(step["score"][row] - step["reward_baselines"][row], abs=1e-6)
    assert all(len(set(step["reward_baselines"][at : at + 4])) == 1 for at in range(0, 16, 4))
    assert min(step["reward_baselines"]) > 0


def test_bypass_mode_takes_the_samplers_log_probs(worlds: Worlds) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    step = worlds[1].run(first_step, [bypass, "actor.ppo_mini_batch_size=2"])[0]
    assert step["old_log_probs"] == step["rollout_log_probs"]
    strict = [
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.001",
    ]
    more = worlds[1].run(train, [bypass, *strict, "actor.ppo_mini_batch_size=2", "actor.ppo_epochs=2"])[0]
    assert all(0 < m["rollout_corr/rollout_rs_masked_fraction"] < 1 for m in more)
    assert all(m["actor/grad_norm"] > 0 for m in more)


def test_rejection_of_one_update_is_not_carried_into_the_next(worlds: Worlds) -> None:
    """With the mask of the first update kept, the second epoch would reject from what the first one left."""
    strict = [
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.001",
    ]
    overrides = ["algorithm.rollout_correction.bypass_mode=true", *strict, "actor.ppo_epochs=3", "actor.optim.lr=0.01"]
    step = worlds[1].run(first_step, overrides)[0]
    assert all(set(row) == {1.0} for row in step["response_mask"])


def test_correction_weighs_and_rejects_over_the_batch(worlds: Worlds) -> None:
    correction = [
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.001",
        "rollout.dtype=bfloat16",
    ]
    step = worlds[1].run(first_step, correction)[0]
    masks = [m for row in step["response_mask"] for m in row]
    assert 0 < sum(masks) < len(masks)
    weights = [w for row in step["rollout_is_weights"] for w in row]
    ratio = [
        math.exp(old - new)
        for olds, news in zip(step["old_log_probs"], step["rollout_log_probs"], strict=True)
        for old, new in zip(olds, news, strict=True)
    ]
    assert torch.allclose(torch.tensor(weights), torch.tensor(ratio).clamp(max=2.0), atol=1e-5)
    metrics = worlds[1].run(train, correction)[0][-1]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.05)


def test_what_cannot_work_is_said_before_a_model_is_loaded(worlds: Worlds) -> None:
    found = worlds[1].run(many, [["trainer.roles={judge: 'a:b'}"]])[0]
    assert "trainer.roles.judge: there is no such role" in found[0]
