"""NaN and inf are caught where they appear: phase, rank and prompt are named, and no weight has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmd_rl.data.batch import Ragged
from spmd_rl.engines.fsdp import FsdpEngine, full
from spmd_rl.trainer.finite import NonFinite
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import with_trainer
from tests.world import Worlds

Plant = Callable[[Trainer], None]


def _spoil_row(column: Ragged, row: int, value: float) -> Ragged:
    values = column.values.clone()
    values[int(column.lengths[:row].sum())] = value
    return Ragged(values, column.lengths)


def _columns(role: str, name: str, value: float) -> Plant:
    def plant(trainer: Trainer) -> None:
        model = getattr(trainer.roles, role)
        real = model.columns
        model.columns = lambda shard, want: (
            found := real(shard, want),
            found | {name: _spoil_row(found[name], 1, value)},
        )[-1]

    return plant


def in_score(trainer: Trainer) -> None:
    real = trainer.roles.reward.score

    def score(*args: Any) -> Any:
        batch = real(*args)
        batch["score"][1] = torch.inf
        return batch

    trainer.roles.reward.score = score  # type: ignore[method-assign]


def in_advantages(trainer: Trainer) -> None:
    fn = trainer.estimator.fn
    spoil = lambda scores, group: fn(scores, group) * torch.nan  # noqa: E731
    trainer.estimator = type(trainer.estimator)(spoil, (), (), True)


def in_update(trainer: Trainer) -> None:
    engine = trainer.roles.actor.engine
    assert isinstance(engine, FsdpEngine)
    real = engine._outputs

    def outputs(batch: Any, want: Any) -> Any:
        found = dict(real(batch, want))
        if "entropy" in want and len(found["log_probs"]):
            found["log_probs"] = torch.where(torch.arange(len(found["log_probs"])) == 0, torch.nan, found["log_probs"])
        return found

    engine._outputs = outputs  # type: ignore[method-assign]


PLANTS: dict[str, tuple[Plant, list[str], str]] = {
    "score": (in_score, [], "phase reward"),
    "old_log_probs": (_columns("actor", "log_probs", torch.nan), ["actor.ppo_epochs=2"], "phase old_log_prob"),
    "ref_log_probs": (_columns("ref", "log_probs", -torch.inf), ["actor.use_kl_loss=true"], "phase ref"),
    "values": (_columns("critic", "values", torch.nan), ["algorithm.adv_estimator=gae"], "phase values"),
    "advantages": (in_advantages, [], "phase adv"),
    "log_probs": (in_update, [], "phase update_actor"),
}


def caught(name: str) -> tuple[str, bool, list[int]]:
    """(the message, whether all weights are as before, the uids of the step)."""

    def use(trainer: Trainer) -> tuple[str, bool, list[int]]:
        def weights() -> list[torch.Tensor]:
            engines = [e for e in trainer.engines.values() if isinstance(e, FsdpEngine)]
            return [full(p.detach()).clone() for e in engines for p in e.model.parameters()]

        before = weights()
        PLANTS[name][0](trainer)
        shard = None
        try:
            shard = trainer.deliver(trainer.produce(1), 1)
            assert shard is not None
            trainer.consume(shard)
        except NonFinite as error:
            same = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
            return str(error), same, [] if shard is None else shard.batch["uid"].tolist()
        return "nothing was raised", False, []

    return with_trainer(use, PLANTS[name][1])


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_value_is_caught_in_its_phase(worlds: Worlds, name: str) -> None:
    message, untouched, uids = worlds[1].run(caught, name)[0]
    assert message.startswith(f"{PLANTS[name][2]}, pool global, rank 0: {name} is ")
    assert untouched
    if uids:
        assert any(f"at uid {uid} (row " in message for uid in uids)


def test_every_rank_names_itself(worlds: Worlds) -> None:
    messages = [message for message, _, _ in worlds[2].run(caught, "advantages")]
    for rank, message in enumerate(messages):
        assert f"pool global, rank {rank}: advantages is nan at uid" in message
