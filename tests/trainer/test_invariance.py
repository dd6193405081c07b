"""Law 8: the same config and seed on any number of ranks, in any layout, is the same run up to summation order."""

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.trainer.recording import Record, record
from tests.world import Worlds

STEPS = 3
LAYOUTS = {
    "fsdp 2": (2, []),
    "ddp 2": (2, ["actor.engine.fsdp.fsdp_size=1"]),
    "ulysses 2": (2, ["actor.engine.fsdp.ulysses_size=2"]),
    "fsdp 4": (4, []),
    "ddp 2 x fsdp 2": (4, ["actor.engine.fsdp.fsdp_size=2"]),
    "ddp 2 x fsdp 2, ulysses 2": (4, ["actor.engine.fsdp.fsdp_size=2", "actor.engine.fsdp.ulysses_size=2"]),
}
CASES: dict[str, list[str]] = {
    "plain": [],
    "uneven": ["data.train_batch_size=7", "actor.ppo_mini_batch_size=7", "rollout.n=3"],
    "fewer rows than ranks": ["data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=2"],
    "mini-batches": [
        "data.train_batch_size=6",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_epochs=2",
        "actor.shuffle=true",
        "actor.engine.max_tokens_per_micro_batch=160",
        "rollout.max_batch_rows=5",
    ],
    "kl": [
        "data.train_batch_size=5",
        "actor.ppo_mini_batch_size=5",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.1",
        "actor.entropy_coeff=0.01",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.05",
    ],
    "statistics": [
        "data.train_batch_size=6",
        "actor.ppo_mini_batch_size=3",
        "actor.policy_loss.loss_mode=clip_cov",
        "actor.policy_loss.clip_cov_ratio=0.1",
        "actor.policy_loss.clip_cov_lb=-1.0",
        "algorithm.adv_estimator=reinforce_plus_plus",
    ],
}
ULYSSES = "ddp 2 x fsdp 2, ulysses 2"
RUNS = [
    *(("plain", layout) for layout in LAYOUTS),
    *(("uneven", layout) for layout in ("fsdp 2", "fsdp 4", ULYSSES)),
    *(("fewer rows than ranks", layout) for layout in ("fsdp 4", ULYSSES)),
    *(("mini-batches", layout) for layout in ("ddp 2", ULYSSES)),
    *(("kl", layout) for layout in ("fsdp 2", ULYSSES)),
    ("statistics", "ddp 2 x fsdp 2"),
]


@pytest.fixture(scope="module")
def alone(worlds: Worlds) -> "cache[[str], Record]":
    """A case's run on one rank, made once."""
    return cache(lambda case: worlds[1].run(record, CASES[case], STEPS)[0])


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)]).double()


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_the_same_run_on_any_ranks(worlds: Worlds, alone: "cache[[str], Record]", case: str, layout: str) -> None:
    size, overrides = LAYOUTS[layout]
    expected, ranks = alone(case), worlds[size].run(record, [*CASES[case], *overrides], STEPS)
    got = ranks[0]
    updates = len(expected.losses) // STEPS
    assert len(expected.rows) == STEPS
    assert len(got.losses) == len(got.gradients) == STEPS * updates
    for step in range(STEPS):
        for name in ("uid", "sample", "prompts", "responses", "score"):
            assert got.rows[step][name] == expected.rows[step][name], f"step {step + 1}: {name}"
        advantages = expected.rows[step]["advantages"]
        assert torch.allclose(got.rows[step]["advantages"], advantages, atol=1e-6)
        assert got.metrics[step].keys() == expected.metrics[step].keys()
        assert got.metrics[step] == pytest.approx(expected.metrics[step], rel=2e-4, abs=2e-5)
        for update in range(step * updates, (step + 1) * updates):
            true, other = flat(expected.gradients[update]), flat(got.gradients[update])
            assert true.norm() > 0
            assert (true - other).norm() <= 1e-5 * true.norm()
            assert abs(got.losses[update] - expected.losses[update]) <= 1e-5 * advantages.abs().mean()
    for other in ranks[1:]:
        assert other.metrics == got.metrics


def test_the_cases_are_not_trivial(worlds: Worlds, alone: "cache[[str], Record]") -> None:
    for case in CASES:
        seen = alone(case)
        for row in seen.rows:
            lengths = [len(r) for r in row["responses"]]
            assert len(set(row["score"])) > 1
            assert len(lengths) < 8 or len(set(lengths)) > 1
            assert row["advantages"].abs().max() > 0.1
    assert len(alone("mini-batches").losses) == STEPS * 3 * 2
    assert alone("kl").metrics[-1]["actor/kl_loss"] > 0
    assert alone("kl").metrics[-1]["actor/reward_kl_penalty"] != 0
    few = worlds[4].run(record, CASES["fewer rows than ranks"], 1)
    assert sorted(r.own_rows[0] for r in few) == [0, 0, 1, 1]
