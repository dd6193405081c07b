"""Every policy loss, aggregation and the value loss: one total loss and gradient, whatever ranks and micro-batches.

Real gloo ranks, the real engine, float64.
"""

from typing import Any

import pytest
import torch

from spmd_rl.algorithms import AGGREGATIONS, POLICY_LOSSES
from tests.trainer.losses import Case, measured
from tests.world import Worlds

KL = ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.3", "actor.kl_loss_type=k3+", "actor.entropy_coeff=0.1"]
REJECTING = [
    "algorithm.rollout_correction.bypass_mode=true",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=1.3",
]
CASES = {
    **{name: Case([f"actor.policy_loss.loss_mode={name}"]) for name in POLICY_LOSSES},
    **{
        name: Case([f"actor.policy_loss.loss_mode={name}", "actor.clip_ratio=0.002"]) for name in ("dppo_tv", "dppo_kl")
    },
    **{
        f"weighted {name}": Case([f"actor.policy_loss.loss_mode={name}"], weighted=True)
        for name in ("vanilla", "geo_mean")
    },
    **{f"{mode} with kl and entropy": Case([f"actor.loss_agg_mode={mode}", *KL]) for mode in AGGREGATIONS},
    "bypass, clipped": Case([*REJECTING, "algorithm.rollout_correction.loss_type=ppo_clip"]),
    "bypass, reinforce": Case([*REJECTING, "algorithm.rollout_correction.loss_type=reinforce"]),
}
ULYSSES = ["actor.engine.fsdp.ulysses_size=2", "critic.engine.fsdp.ulysses_size=2"]
LAYOUTS: dict[str, tuple[int, list[str], int]] = {
    "1 rank, a row a micro-batch": (1, [], 20),
    "2 ranks": (2, [], 200),
    "2 ranks, small micro-batches": (2, ["actor.engine.fsdp.fsdp_size=1"], 25),
    "2 ranks, ulysses": (2, ULYSSES, 40),
    "4 ranks, small micro-batches": (4, [], 20),
    "4 ranks, ddp x fsdp": (4, ["actor.engine.fsdp.fsdp_size=2", "critic.engine.fsdp.fsdp_size=2"], 200),
}


@pytest.fixture(scope="module")
def whole(worlds: Worlds) -> dict[str, Any]:
    """The mini-batch on one rank in one micro-batch."""
    return worlds[1].run(measured, CASES, [], 200)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_of_any_split(worlds: Worlds, whole: dict[str, Any], layout: str) -> None:
    size, overrides, budget = LAYOUTS[layout]
    ranks = worlds[size].run(measured, CASES, overrides, budget)
    for name, (loss, gradient) in ranks[0].items():
        expected, true = whole[name][0], torch.tensor(whole[name][1], dtype=torch.float64)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12), name
        assert (torch.tensor(gradient, dtype=torch.float64) - true).norm() <= 1e-9 * true.norm(), name
        assert all(rank[name][0] == loss for rank in ranks), name


def test_the_cases_differ_from_each_other(whole: dict[str, Any]) -> None:
    norms = {name: torch.tensor(gradient).norm().item() for name, (_, gradient) in whole.items()}
    assert all(norm > 1e-3 for norm in norms.values())
    equal = {"reinforce": "gpg", "bypass_mode": "vanilla"}  # without weights they are the same loss
    assert all(norms[name] == norms[other] for name, other in equal.items())
    assert len({round(norm, 9) for norm in norms.values()}) == len(norms) - len(equal)
