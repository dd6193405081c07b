"""Roles on pools of their own: the same run as with all of them on one pool, up to summation order."""

import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.trainer.trainer import Trainer
from tests.trainer.launched import lines, run
from tests.trainer.recording import REWARD, TINY, Record, record
from tests.trainer.runs import steps_taken, with_trainer
from tests.world import Worlds

STEPS = 2
ENGINE = "{gradient_checkpointing: false, max_tokens_per_micro_batch: 512}"
RUN = [
    "data.train_batch_size=6",
    "actor.ppo_mini_batch_size=3",
    "critic.ppo_mini_batch_size=2",
    "critic.optim={lr: 1e-3, eps: 1e-5}",
    f"critic.engine={ENGINE}",
    f"ref.engine={ENGINE}",
    f"teacher.engine={ENGINE}",
    f"reward.model.engine={ENGINE}",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "reward.model.enable=true",
    "reward.model.path=tiny-classifier",
    "teacher.enable=true",
    "teacher.path=tiny-digits",
    "teacher.top_k=8",
    "model.random_init=true",
    "model.seed=3",
    "ref.path=tiny-digits",
    "critic.path=tiny-digits",
]
"""PPO with a reference, a reward model and a teacher: every role plays."""


def apart(**pools: int) -> list[str]:
    """Each of these roles on a pool of its own, of so many ranks."""
    out = [f"+pools.{role}.n_gpus_per_node={size}" for role, size in pools.items()]
    out += [f"{'reward.model' if role == 'reward' else role}.pool={role}" for role in pools]
    return [*out, "trainer.schedule=sequential"] if "rollout" in pools else out


ROLES = ("rollout", "ref", "critic", "reward", "teacher")
APART: dict[str, tuple[int, list[str]]] = {
    **{role: (2, apart(**{role: 1})) for role in ROLES},
    **{", ".join(three): (4, apart(**dict.fromkeys(three, 1))) for three in combinations(ROLES, 3)},
    "3 rollout": (4, apart(rollout=3)),
    "3 + 1 rollout": (4, apart(rollout=1)),
    "2 critic, ulysses": (4, [*apart(critic=2), "critic.engine.fsdp.ulysses_size=2"]),
    "ulysses + 2 teacher": (4, [*apart(teacher=2), "actor.engine.fsdp.ulysses_size=2"]),
}


@pytest.fixture(scope="module")
def together(worlds: Worlds) -> Record:
    """The run on one rank."""
    return worlds[1].run(record, RUN, STEPS)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", APART)
def test_pools_change_nothing(worlds: Worlds, together: Record, case: str) -> None:
    size, overrides = APART[case]
    same_run(worlds[size].run(record, [*RUN, *overrides], STEPS)[0], together)


def test_every_role_has_a_say(together: Record) -> None:
    for metrics in together.metrics:
        for name in ("actor/kl_loss", "actor/teacher_kl_loss", "actor/reward_kl_penalty", "critic/vf_loss"):
            assert abs(metrics[name]) > 1e-6, name
        assert metrics["critic/score/max"] > metrics["critic/score/min"]


LAGGED = [
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "actor.optim.lr=3e-3",
]
DAPO = [
    *LAGGED,
    "algorithm.filter_groups.enable=true",
    f"reward.functions=['{REWARD}:rarely']",
]
TOKEN = "algorithm.rollout_correction.rollout_is=token"


@pytest.mark.parametrize(
    ("case", "size", "rollouts", "lag"),
    [(LAGGED, 2, 1, 1), (LAGGED, 4, 3, 1), (LAGGED, 4, 2, 3), (DAPO, 4, 2, 1)],
    ids=["1+1", "1+3", "2+2, 3 steps ahead", "dynamic sampling"],
)
def test_one_step_off_is_the_run_that_lags(worlds: Worlds, case: list[str], size: int, rollouts: int, lag: int) -> None:
    """Against a loop of a few lines on one rank; it asks for the weights of samples that are the schedule's default."""
    (expected,) = worlds[1].run(record, [*case, TOKEN], 5, TINY, lag)
    off = ["trainer.schedule=one_step_off", f"trainer.staleness={lag}"]
    got = worlds[size].run(record, [*case, *apart(rollout=rollouts), *off], 5)[0]
    same_run(got, expected, 5)
    assert got.metrics[-1]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.2)
    assert got.metrics[0]["rollout_corr/kl"] == pytest.approx(0, abs=1e-4)
    assert got.metrics[-1]["rollout_corr/kl"] > 10 * abs(got.metrics[0]["rollout_corr/kl"])


def test_resumed_with_another_number_of_rollout_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """A checkpoint holds the steps that are in flight; whoever comes next trains on them."""
    off = ["trainer.schedule=one_step_off", "trainer.staleness=2", "trainer.save_freq=2"]

    def launch(rollouts: int, folder: str, *more: str) -> None:
        settings = [*apart(rollout=rollouts), *off, f"trainer.output_dir={tmp_path / folder}", *more]
        assert worlds[4].run(run, settings) == [(0, "")] * 4

    launch(3, "whole")
    cut = tmp_path / "whole" / "checkpoints" / "step_000002"
    launch(2, "cut", f"trainer.resume={cut}")
    assert len(list((cut / "ahead").glob("0_*.rows"))) >= 2
    whole, again = lines(tmp_path / "whole"), lines(tmp_path / "cut")
    assert [row["step"] for row in again] == [3, 4, 5]
    for mine, theirs in zip(again, whole[-3:], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)


def watch_clock(overrides: list[str]) -> tuple[str, dict[str, list[float]]]:
    """When this rank was in which stage of which step; each round of sampling takes half a second longer here."""

    def use(trainer: Trainer) -> tuple[str, dict[str, list[float]]]:
        seen: dict[str, list[float]] = {}
        sample, consume, produce = trainer.sample, trainer.consume, trainer.produce

        def slowly(prompts: Any, step: int) -> Any:
            time.sleep(0.5)
            return sample(prompts, step)

        def timed(name: str, act: Any) -> Any:
            def call(*args: Any) -> Any:
                begin = time.monotonic()
                result = act(*args)
                seen.setdefault(name, []).extend((begin, time.monotonic()))
                return result

            return call

        trainer.sample = slowly  # type: ignore[method-assign]
        trainer.consume = timed("consume", consume)  # type: ignore[method-assign]
        trainer.produce = timed("produce", produce)  # type: ignore[method-assign]
        metrics = steps_taken(trainer)
        seen["idle"] = [m["trainer/idle_s/global"] for m in metrics]
        return trainer.runtime.pool.name, seen

    return with_trainer(use, overrides, 4)


def test_refilling_does_not_hold_up_the_training(worlds: Worlds) -> None:
    """While the rollout samples round after round, the actor trains on what it has."""
    off = [*apart(rollout=1), "trainer.schedule=one_step_off"]
    found = dict(worlds[2].run(watch_clock, [*DAPO, *off]))
    begun, done = found["rollout"]["produce"][2::2], found["rollout"]["produce"][3::2]
    trained = found["global"]["consume"][1::2]
    for step in range(3):  # step + 2 is sampled while step + 1 is trained on
        assert done[step] - begun[step] >= 0.5
        assert trained[step] < done[step]
    assert max(done[i] - begun[i] for i in range(3)) >= 1.0, "no step took a second round"
    assert found["global"]["idle"][1] > 0.2


def same_run(got: Record, expected: Record, steps: int = STEPS) -> None:
    """The same samples, and losses, gradients and metrics up to summation order."""
    assert len(got.rows) == len(expected.rows) == steps
    for step, (mine, theirs) in enumerate(zip(got.rows, expected.rows, strict=True), start=1):
        for name in ("uid", "sample", "prompts", "responses"):
            assert mine[name] == theirs[name], f"step {step}: {name}"
        assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)  # a reward model packs other rows together
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
        assert {"actor/pg_loss", "critic/score/mean"} <= known.keys()
