"""PPO: a critic that learns what replies are worth, an actor that gets better by it."""

from typing import Any

import pytest
import torch

from spmd_rl.engines.fsdp import FsdpEngine, full
from spmd_rl.models.attention import NAME
from spmd_rl.models.loading import build_meta, load_hf_config
from spmd_rl.models.value import ValueModel
from spmd_rl.observe.metrics import deterministic
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import steps_taken, train, with_trainer
from tests.world import Worlds

PPO = ["algorithm.adv_estimator=gae"]
THOROUGH = ["critic.ppo_mini_batch_size=2", "critic.ppo_epochs=2", "actor.ppo_mini_batch_size=4", "algorithm.lam=0.95"]


def test_thirty_steps_raise_the_reward(worlds: Worlds) -> None:
    steps = worlds[1].run(train, [*PPO, "data.train_batch_size=8", "actor.ppo_mini_batch_size=8"], 30, timeout_s=400)[0]
    scores = [m["critic/score/mean"] for m in steps]
    assert sum(scores[-5:]) > 2 * sum(scores[:5])
    assert steps[0]["critic/values/max"] == 0  # a fresh head expects nothing
    assert abs(steps[-1]["critic/values/mean"] - scores[-1]) < 0.5 * scores[-1]
    wanted = (
        "vf_loss",
        "vf_clipfrac",
        "vpred_mean",
        "grad_norm",
        "lr",
        "vf_explained_var",
        "values/mean",
        "values/min",
    )
    assert all(f"critic/{name}" in m for m in steps for name in wanted)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{role}.{name}": full(p.detach()).clone()
        for role, engine in trainer.engines.items()
        if isinstance(engine, FsdpEngine)
        for name, p in engine.model.named_parameters()
    }


def _warmed_up(trainer: Trainer) -> tuple[Any, ...]:
    before, seen = _weights(trainer), []
    trainer.log = lambda m, step: seen.append((dict(m), _weights(trainer)))  # type: ignore[method-assign,assignment]
    trainer.run(None)
    actor = [name for name in before if name.startswith("actor.")]
    same = [all(torch.equal(before[n], weights[n]) for n in actor) for _, weights in seen]
    return same, [("actor/lr" in m, m["critic/grad_norm"] > 0) for m, _ in seen], trainer.engines["actor"].version


def test_the_actor_waits_while_the_critic_warms_up(worlds: Worlds) -> None:
    warm = [*PPO, "critic.warmup_steps=2", "actor.optim.schedule=cosine"]
    same, learns, updates = worlds[1].run(with_trainer, _warmed_up, warm, 4)[0]
    assert same == [True, True, False, False]
    assert learns == [(False, True), (False, True), (True, True), (True, True)]
    assert updates == 2


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "2 ranks": (2, []),
    "2 ranks, critic with ulysses": (2, ["critic.engine.fsdp.ulysses_size=2"]),
    "2 ranks, actor and ref with ulysses": (2, ["actor.engine.fsdp.ulysses_size=2", "ref.engine.fsdp.ulysses_size=2"]),
    "4 ranks, critic ddp x fsdp": (4, ["critic.engine.fsdp.fsdp_size=2", "actor.engine.fsdp.ulysses_size=2"]),
}
WITH_REF = [*PPO, *THOROUGH, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"]


@pytest.fixture(scope="module")
def alone(worlds: Worlds) -> list[dict[str, float]]:
    return worlds[1].run(train, WITH_REF)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_role_in_its_own_layout_is_the_same_run(
    worlds: Worlds, alone: list[dict[str, float]], layout: str
) -> None:
    """Rows go from the actor's layout to the critic's and the reference's and back; nothing depends on it."""
    size, overrides = LAYOUTS[layout]
    for steps in worlds[size].run(train, [*WITH_REF, *overrides]):
        for mine, theirs in zip(steps, alone, strict=True):
            assert deterministic(mine) == pytest.approx(deterministic(theirs), rel=5e-4, abs=5e-5)


def _resumed(trainer: Trainer) -> Any:
    """Two steps and a save; then what a third step gives, here and after loading into the same trainer."""
    seen = steps_taken(trainer)
    trainer.save()
    folder = next((trainer.checkpointer.output_dir / "checkpoints").glob("step_*"))
    third = trainer.step(3)
    assert third is not None
    trainer.load(folder)
    again = trainer.step(3)
    assert again is not None
    return len(seen), third, again


def test_a_checkpoint_holds_the_critic(worlds: Worlds, tmp_path: Any) -> None:
    count, third, again = worlds[2].run(with_trainer, _resumed, [*PPO, f"trainer.output_dir={tmp_path}"], 2)[0]
    assert count == 2
    assert again == third


def test_value_model_is_refused_without_packed_attention() -> None:
    from spmd_rl.config import ModelConfig

    hf_config = load_hf_config(ModelConfig(path="tiny-digits"))
    assert ValueModel(build_meta(hf_config)).score.weight.shape == (1, hf_config.hidden_size)
    with pytest.raises(ValueError, match=NAME):
        ValueModel(build_meta(hf_config, attention="sdpa"))
