"""Roles on pools of their own: the same run as with all of them on one pool, up to summation order."""

import pytest
import torch

from tests.trainer.recording import Record, record
from tests.world import Worlds

STEPS = 3
RUN = [
    "data.train_batch_size=6",
    "actor.ppo_mini_batch_size=3",
    "critic.ppo_mini_batch_size=2",
    "critic.optim={lr: 1e-3, eps: 1e-5}",
    "critic.engine={gradient_checkpointing: false, max_tokens_per_micro_batch: 512}",
    "ref.engine.max_tokens_per_micro_batch=512",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
]
"""PPO with a reference: every role that holds a model plays."""


def apart(**pools: int) -> list[str]:
    """Each of these roles on a pool of its own, of so many ranks."""
    out = [f"+pools.{role}.n_gpus_per_node={size}" for role, size in pools.items()]
    out += [f"{'reward.model' if role == 'reward' else role}.pool={role}" for role in pools]
    return [*out, "trainer.schedule=sequential"] if "rollout" in pools else out


APART: dict[str, tuple[int, list[str]]] = {
    "rollout": (2, apart(rollout=1)),
    "ref": (2, apart(ref=1)),
    "critic": (2, apart(critic=1)),
    "3 rollout": (4, apart(rollout=3)),
    "3 + 1 rollout": (4, apart(rollout=1)),
    "2 critic, ulysses": (4, [*apart(critic=2), "critic.engine.fsdp.ulysses_size=2"]),
    "rollout, ref, critic": (4, apart(rollout=1, ref=1, critic=1)),
}


@pytest.fixture(scope="module")
def together(worlds: Worlds) -> Record:
    """The run on one rank."""
    return worlds[1].run(record, RUN, STEPS)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", APART)
def test_pools_change_nothing(worlds: Worlds, together: Record, case: str) -> None:
    size, overrides = APART[case]
    ranks = worlds[size].run(record, [*RUN, *overrides], STEPS)
    same_run(ranks[0], together)


def same_run(got: Record, expected: Record) -> None:
    """The same samples, and losses, gradients and metrics up to summation order."""
    assert len(got.rows) == len(expected.rows) == STEPS
    for step, (mine, theirs) in enumerate(zip(got.rows, expected.rows, strict=True), start=1):
        for name in ("uid", "sample", "prompts", "responses", "score"):
            assert mine[name] == theirs[name], f"step {step}: {name}"
        assert torch.allclose(mine["advantages"], theirs["advantages"], atol=1e-5)
    assert len(got.losses) == len(expected.losses) > 0
    assert got.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    for true, other in zip(expected.gradients, got.gradients, strict=True):
        assert true.keys() == other.keys()
        norm = sum(g.double().norm() ** 2 for g in true.values()) ** 0.5
        assert norm > 0
        assert sum((true[n] - other[n]).double().norm() ** 2 for n in true) ** 0.5 <= 1e-4 * norm
    for mine, theirs in zip(got.metrics, expected.metrics, strict=True):
        known = {name: value for name, value in theirs.items() if name in mine}
        assert {name: mine[name] for name in known} == pytest.approx(known, rel=2e-4, abs=2e-5)
        assert "actor/pg_loss" in known
