"""Who is on the device in which phase, with real pieces on a CPU."""

from collections.abc import Mapping

import pytest
import torch

from spmd_rl.engines.host_pool import Swap
from spmd_rl.roles.residency import Residency

STEP = ("weight_sync", "decode", "reward", "old_log_prob", "ref", "adv", "update_actor")
Where = dict[str, dict[str, str]]


def residency(*names: str, early: Mapping[str, frozenset[str]] | None = None) -> Residency:
    made = Residency(early=early or {})
    for name in names:
        x = torch.ones(1000)
        made.register(name, Swap(name, lambda x=x: [x], torch.device("cpu")))  # type: ignore[misc]
    return made


def walk(made: Residency, phases: tuple[str, ...] = STEP) -> Where:
    """Phase -> piece -> its state while the phase runs."""
    seen: Where = {}
    for phase in phases:
        made.enter(phase)
        seen[phase] = {name: piece.state for name, piece in made.pieces.items()}  # type: ignore[attr-defined]
    return seen


def test_the_optimizer_leaves_while_weights_are_sent_and_is_gone_when_decoding_begins() -> None:
    made = residency("actor.params", "actor.optimizer", "ref.params")
    seen = walk(made)
    assert seen["weight_sync"] == {"actor.params": "here", "actor.optimizer": "leaving", "ref.params": "leaving"}
    assert set(seen["decode"].values()) == {"away"}
    assert seen["old_log_prob"] == {"actor.params": "here", "actor.optimizer": "away", "ref.params": "away"}
    assert seen["ref"] == {"actor.params": "away", "actor.optimizer": "away", "ref.params": "here"}
    assert seen["update_actor"] == {"actor.params": "here", "actor.optimizer": "here", "ref.params": "away"}


def test_what_has_room_comes_early_and_is_awaited_only_where_it_is_needed() -> None:
    early = dict.fromkeys(("reward", "old_log_prob", "ref", "adv"), frozenset({"actor.optimizer"}))
    made = residency("actor.params", "actor.optimizer", early=early)
    seen = walk(made)
    assert {phase: seen[phase]["actor.optimizer"] for phase in STEP} == {
        "weight_sync": "leaving", "decode": "away", "reward": "coming", "old_log_prob": "coming", "ref": "coming",
        "adv": "coming", "update_actor": "here",
    }  # fmt: skip
    assert walk(made)["decode"] == {"actor.params": "away", "actor.optimizer": "away"}


def test_decoding_again_without_a_sync_fetches_nothing() -> None:
    made = residency("actor.params", "actor.optimizer")
    walk(made, ("weight_sync", "decode"))
    made.take()
    assert walk(made, ("decode", "reward", "decode"))["decode"] == {"actor.params": "away", "actor.optimizer": "away"}
    assert made.take()["perf/swap_in_gb"] == 0


def test_generate_is_the_rollouts_own_affair() -> None:
    made = residency("actor.optimizer")
    with made.hold("generate"):
        assert made.pieces["actor.optimizer"].state == "here"  # type: ignore[attr-defined]
    with made.hold("old_log_prob"):
        assert made.pieces["actor.optimizer"].state == "away"  # type: ignore[attr-defined]
    with made.hold("save"):
        assert made.pieces["actor.optimizer"].state == "here"  # type: ignore[attr-defined]


def test_metrics_say_what_moved() -> None:
    made = residency("actor.params", "actor.optimizer")
    walk(made)
    found = made.take()
    assert set(found) == {
        f"{kind}{way}{unit}"
        for way in ("swap_out", "swap_in")
        for kind, unit in (("perf/", "_gb"), ("perf/", "_gb_per_s"), ("timing_s/", ""))
    }
    # parameters leave for `decode` and `ref`, and come back twice; the optimizer does so once
    assert found["perf/swap_out_gb"] == found["perf/swap_in_gb"] == pytest.approx(3 * 4000 / 2**30)
    assert found["perf/swap_out_gb_per_s"] > 0
    assert found["timing_s/swap_in"] > 0
    assert made.take()["perf/swap_out_gb"] == 0
    assert Residency().take() == {}


def test_a_piece_that_no_phase_needs_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"piece 'actor\.weights' is needed by no phase"):
        residency("actor.weights")
