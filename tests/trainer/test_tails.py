"""Steps that end before every reply has: the same on any ranks, the same after a resume, and what a reader would
choose by hand from whole replies."""

import json
import math
import shutil
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.assemble.rl import check_choices
from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.observe.metrics import deterministic
from spmd_rl.runtime.exchange import gather
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer import tails
from spmd_rl.trainer.collect import Collected
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import REWARDS, many, with_trainer
from tests.trainer.test_pools import apart
from tests.world import RankError, Worlds

N, WANTED, STEPS, LONGEST = 3, 4, 4, 12
BASE = [
    f"data.train_batch_size={WANTED}",
    f"actor.ppo_mini_batch_size={WANTED}",
    f"rollout.n={N}",
    f"data.max_response_length={LONGEST}",
    "rollout.stop_token_ids=[10,20,30,40,50,60,70,80]",
    "actor.optim.eps=1e-5",
]
FROZEN = "actor.optim.lr=0"
"""Weights stay, so that replies that are carried are those that one go would draw."""
ROUNDS = "rollout.segment_tokens=3"
OVER = [ROUNDS, "rollout.over_sampling=1.75"]
PARTIAL = ["rollout.partial=true"]
CASES: dict[str, list[str]] = {
    "whole": [],
    "rounds": [ROUNDS],
    "over": OVER,
    "over, partial": [*OVER, *PARTIAL],
    "tokens, partial": ["rollout.max_new_tokens_per_step=5", *PARTIAL],
    "tokens": ["rollout.max_new_tokens_per_step=5"],
    "mask": ["rollout.truncated=mask"],
    "drop": [*OVER, "rollout.truncated=drop_group"],
    "balance": ["rollout.balance=expected_length", "trainer.total_epochs=3", "data.train.size=8"],
    "balance, partial": [*OVER, *PARTIAL, "rollout.balance=expected_length", "data.train.size=10"],
}
COLUMNS = ["uid", "sample", "begun_at", "responses", "rollout_log_probs", "finished", "score", "response_mask"]


def watched(trainer: Trainer) -> dict[str, Any]:
    """What a run trained on, step by step, and its metrics."""
    steps: list[dict[str, Any]] = []
    metrics: list[dict[str, float]] = []
    mine: list[list[int]] = []
    produce = trainer.produce

    def note(step: int) -> Any:
        found = produce(step)
        batch = found.batch if isinstance(found, Collected) else None
        if isinstance(batch, Batch):
            whole = gather(batch, COLUMNS, trainer.runtime.everyone)
            ragged = {name: whole[name].rows() for name in COLUMNS if isinstance(whole[name], Ragged)}
            plain = {name: whole[name].tolist() for name in COLUMNS if name not in ragged}
            plain |= {name: [row.tolist() for row in rows] for name, rows in ragged.items()}
            steps.append({"step": step, **plain})
            mine.append(batch["uid"].tolist()[::N])
        return found

    trainer.produce = note  # type: ignore[method-assign,assignment]
    trainer.log = lambda m, step: metrics.append(dict(m))  # type: ignore[method-assign,assignment]
    folder = Path(trainer.config.trainer.output_dir) / "checkpoints"
    trainer.run(max(folder.glob("step_*"), default=None) if trainer.config.trainer.resume == "auto" else None)
    return {"steps": steps, "metrics": metrics, "order": trainer.order.state_dict(), "mine": mine}


def run(overrides: list[str], steps: int = STEPS) -> dict[str, Any]:
    return with_trainer(watched, [*BASE, "trainer.resume=never", *overrides], steps)


@pytest.fixture(scope="module")
def alone(worlds: Worlds) -> "cache[[tuple[str, ...]], dict[str, Any]]":
    """A run on one rank, made once."""
    return cache(lambda overrides: worlds[1].run(run, list(overrides))[0])


def case(name: str, *more: str) -> tuple[str, ...]:
    return (*CASES[name], *more)


def same_steps(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, true in zip(got, expected, strict=True):
        for column, values in true.items():
            if column not in ("rollout_log_probs", "score"):
                assert mine[column] == values, f"step {true['step']}: {column}"
        assert mine["score"] == pytest.approx(true["score"], abs=1e-5)
        for a, b in zip(mine["rollout_log_probs"], true["rollout_log_probs"], strict=True):
            assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("whole", "mask")])
def test_the_same_run_on_two_ranks(worlds: Worlds, alone: Any, name: str) -> None:
    expected, ranks = alone(case(name)), worlds[2].run(run, list(case(name)))
    for got in ranks:
        assert got["order"] == expected["order"]
        assert len(got["steps"]) == STEPS
        same_steps(got["steps"], expected["steps"])
        for mine, true in zip(got["metrics"], expected["metrics"], strict=True):
            assert deterministic(mine) == pytest.approx(deterministic(true), rel=1e-3, abs=1e-4)
    assert any(metrics["actor/grad_norm"] > 0 for metrics in expected["metrics"])


def test_rounds_change_nothing(alone: Any) -> None:
    whole, rounds = alone(case("whole")), alone(case("rounds"))
    for mine, true in zip(rounds["steps"], whole["steps"], strict=True):
        assert {name: mine[name] for name in COLUMNS if name != "rollout_log_probs"} == {
            name: true[name] for name in COLUMNS if name != "rollout_log_probs"
        }
    for metrics, step in zip(rounds["metrics"], rounds["steps"], strict=True):
        assert metrics["rollout/rounds"] == -(-max(map(len, step["responses"])) // 3)
    assert all(m["rollout/dropped_groups"] == m["rollout/carried_groups"] == 0 for m in rounds["metrics"])


class ByHand:
    """The rules of docs/tails.md, applied to whole replies: no engine, no rounds, no ranks."""

    def __init__(
        self, replies: dict[int, dict[str, Any]], segment: int, limit: int, flight: int, partial: bool
    ) -> None:
        """`replies`: uid -> what a single go draws for it, in the order in which prompts are met."""
        self.replies, self.segment, self.limit = replies, segment, limit
        self.flight, self.partial = flight, partial
        self.order = list(replies)
        self.rounds: list[int] = []
        """Of each step."""

    def steps(self, count: int) -> list[list[int]]:
        """The uids that each step trains on."""
        found, carried = [], dict[int, int]()  # uid -> tokens a reply may have so far
        for _ in range(count):
            fresh = [self.order.pop(0) for _ in range(self.flight - len(carried))]
            have = {**carried, **dict.fromkeys(fresh, 0)}
            spent = 0
            self.rounds.append(0)
            while not self._ends(have, spent):
                self.rounds[-1] += 1
                new = min(self.segment or LONGEST, self.limit - spent % self.limit if self.limit else LONGEST)
                have, spent = {uid: tokens + new for uid, tokens in have.items()}, spent + new
            chosen = [uid for uid in have if self.complete(uid, have[uid])][:WANTED]
            found.append(chosen)
            carried = {uid: tokens for uid, tokens in have.items() if uid not in chosen} if self.partial else {}
        return found

    def _ends(self, have: dict[int, int], spent: int) -> bool:
        ready = sum(self.complete(uid, tokens) for uid, tokens in have.items())
        return ready >= WANTED or ready == len(have) or bool(ready and self.limit and spent >= self.limit)

    def complete(self, uid: int, tokens: int) -> bool:
        return all(len(reply) <= tokens for reply in self.replies[uid]["responses"])


def test_what_is_chosen_is_what_a_reader_chooses_from_whole_replies(worlds: Worlds, alone: Any) -> None:
    """With weights that stay, a step's replies are known beforehand: those of a run that begins all its groups and ends
    none early."""
    often = f"rollout.stop_token_ids={list(range(8, 104, 4))}".replace(" ", "")  # so that steps do end early on any CPU
    settings = [f"data.train_batch_size={7}", "actor.ppo_mini_batch_size=7", FROZEN, often]
    (whole,) = worlds[1].run(run, settings, STEPS)  # step k meets the prompts that `over` begins in step k
    replies: dict[int, dict[str, Any]] = {}
    for step in whole["steps"]:
        for at in range(0, len(step["uid"]), N):
            replies[step["uid"][at]] = {name: step[name][at : at + N] for name in ("responses", "rollout_log_probs")}
    assert len({max(len(r) for r in group["responses"]) for group in replies.values()}) > 3
    reader = ByHand(replies, segment=3, limit=0, flight=7, partial=False)
    found = alone(case("over", FROZEN, often))
    assert [step["uid"][::N] for step in found["steps"]] == reader.steps(STEPS)
    for step in found["steps"]:
        for at, uid in enumerate(step["uid"][::N]):
            assert step["responses"][at * N : (at + 1) * N] == replies[uid]["responses"]
    assert [m["rollout/rounds"] for m in found["metrics"]] == reader.rounds
    assert min(reader.rounds) < 4
    assert all(m["rollout/dropped_groups"] == 3 and m["rollout/dropped_tokens"] > 0 for m in found["metrics"])


@pytest.mark.parametrize(
    ("name", "segment", "limit", "flight"), [("over, partial", 3, 0, 7), ("tokens, partial", 0, 5, WANTED)]
)
def test_carried_groups_are_those_of_one_go(
    alone: Any, worlds: Worlds, name: str, segment: int, limit: int, flight: int
) -> None:
    """Each group's replies are drawn with the noise of the step that began it, wherever it was continued."""
    found = alone(case(name, FROZEN))
    begun: dict[int, int] = {}
    for step in found["steps"]:
        begun |= dict(zip(step["uid"], step["begun_at"], strict=True))
    first = {uid for uid, step in begun.items() if step == 1}
    (whole,) = worlds[1].run(run, [f"data.train_batch_size={flight}", f"actor.ppo_mini_batch_size={flight}", FROZEN], 1)
    true = {}
    for at in range(0, len(whole["steps"][0]["uid"]), N):
        group = {name: whole["steps"][0][name][at : at + N] for name in ("responses", "rollout_log_probs")}
        true[whole["steps"][0]["uid"][at]] = group
    late = 0
    for number, step in enumerate(found["steps"], start=1):
        for at, uid in enumerate(step["uid"][::N]):
            if uid in first:
                late += number > 1
                rows = slice(at * N, (at + 1) * N)
                assert step["responses"][rows] == true[uid]["responses"]
                for mine, theirs in zip(step["rollout_log_probs"][rows], true[uid]["rollout_log_probs"], strict=True):
                    assert mine == pytest.approx(theirs, abs=1e-5)
    assert late > 0
    hand = ByHand(true, segment, limit, flight, partial=True).steps(1)
    assert found["steps"][0]["uid"][::N] == hand[0]
    trained = [uid for step in found["steps"] for uid in step["uid"][::N]]
    assert len(trained) == len(set(trained))
    assert max(m["rollout/carried_groups"] for m in found["metrics"]) > 0
    assert all(m["rollout/dropped_groups"] == 0 for m in found["metrics"])


def test_tokens_of_a_step_are_counted_exactly(alone: Any) -> None:
    found = alone(case("tokens, partial"))
    before, longest = 0.0, 5 * N * WANTED
    for step, metrics in zip(found["steps"], found["metrics"], strict=True):
        trained = sum(len(r) for r in step["responses"])
        assert metrics["rollout/new_tokens"] == trained + metrics["rollout/carried_tokens"] - before
        assert metrics["rollout/new_tokens"] <= longest or metrics["rollout/rounds"] > 1
        before = metrics["rollout/carried_tokens"]
        assert metrics["rollout/groups"] == len(step["uid"]) / N
    assert any(m["rollout/stopped_by_tokens"] for m in found["metrics"])
    assert any(m["rollout/earlier_tokens_ratio"] > 0 for m in found["metrics"])
    assert max(m["rollout/steps_in_flight/max"] for m in found["metrics"]) >= 1
    assert any(m["rollout/groups"] < WANTED for m in found["metrics"])


def test_log_probs_of_carried_tokens_are_those_they_were_drawn_with(alone: Any) -> None:
    """Under weights that move, the correction sees the difference, and only where tokens are from earlier steps."""
    for name in ("over, partial", "tokens, partial"):
        for metrics in alone(case(name))["metrics"]:
            earlier, off = metrics["rollout/earlier_tokens_ratio"], metrics["rollout_corr/k3_kl"]
            assert (off > 1e-6) == (earlier > 0), (name, earlier, off)


@pytest.mark.parametrize("name", ["over, partial", "balance, partial"])
def test_a_resumed_run_continues_with_the_very_same_tokens(
    worlds: Worlds, alone: Any, name: str, tmp_path: Path
) -> None:
    expected, folder = alone(case(name)), tmp_path / "run"
    settings = [*CASES[name], "trainer.resume=auto", "trainer.save_freq=2", f"trainer.output_dir={folder}"]
    worlds[2].run(run, settings, 2)
    assert json.loads((folder / "checkpoints/step_000002/trainer.json").read_text())["carried"]["groups"]
    for size in (2, 1, 4):
        copy = shutil.copytree(folder, tmp_path / f"on {size}")
        for got in worlds[size].run(run, [*settings, f"trainer.output_dir={copy}"], STEPS):
            assert len(got["steps"]) == STEPS - 2
            for mine, true in zip(got["steps"], expected["steps"][2:], strict=True):
                for column in ("uid", "sample", "responses", "begun_at"):
                    assert mine[column] == true[column], (size, column)
            assert got["order"] == expected["order"]


JUDGED = [
    *CASES["balance, partial"],
    "reward.model.enable=true",
    "reward.model.path=tiny-classifier",
    "reward.model.engine={gradient_checkpointing: false, max_tokens_per_micro_batch: 2048}",
]


def test_rollout_and_reward_model_on_pools_of_their_own(worlds: Worlds, alone: Any, tmp_path: Path) -> None:
    """In turn the run is that of one pool; ahead of the training, one that is cut off goes on as if it had not been."""
    expected, pools = alone(tuple(JUDGED)), [*JUDGED, *apart(rollout=2, reward=1)]
    in_turn = worlds[4].run(run, pools)
    sampling = [found for found in in_turn if found["steps"]]
    assert len(sampling) == 2
    for found in sampling:
        same_steps(found["steps"], expected["steps"])
    for found in in_turn:
        for mine, true in zip(found["metrics"], expected["metrics"], strict=True):
            assert mine["rollout/carried_tokens"] == true["rollout/carried_tokens"]
            assert mine["actor/grad_norm"] == pytest.approx(true["actor/grad_norm"], rel=1e-3, abs=1e-4)
    ahead = [*pools, "trainer.schedule=one_step_off", "trainer.save_freq=2"]
    ranks = worlds[4].run(run, [*ahead, f"trainer.output_dir={tmp_path / 'whole'}"])
    whole = next(found["steps"] for found in ranks if found["steps"])
    saved = "checkpoints/step_000002"
    shutil.copytree(tmp_path / "whole" / saved, tmp_path / "cut" / saved)
    assert json.loads((tmp_path / "cut" / saved / "trainer.json").read_text())["carried"]["groups"]
    ranks = worlds[4].run(run, [*ahead, "trainer.resume=auto", f"trainer.output_dir={tmp_path / 'cut'}"])
    again = next(found["steps"] for found in ranks if found["steps"])
    assert [step["step"] for step in again] == [4]  # step 3 lies in the checkpoint, sampled
    same_steps(again, whole[3:])


def test_carried_groups_are_not_lost_when_the_settings_go(worlds: Worlds, tmp_path: Path) -> None:
    settings = ["trainer.resume=auto", "trainer.save_freq=2", f"trainer.output_dir={tmp_path}"]
    worlds[1].run(run, [*CASES["over, partial"], *settings], 2)
    carried = json.loads((tmp_path / "checkpoints/step_000002/trainer.json").read_text())["carried"]["groups"]
    with pytest.raises(RankError, match=rf"carries \d+ groups of rollout.n={N} begun replies, now rollout.n=2"):
        worlds[1].run(run, [*CASES["over, partial"], *settings, "rollout.n=2"], 4)
    with pytest.raises(RankError, match=r"drawn under older weights, but .* corrects nothing"):
        worlds[1].run(run, settings, 4)
    (found,) = worlds[1].run(run, [*settings, "algorithm.rollout_correction.rollout_is=token"], 4)
    assert [uid for uid in found["steps"][0]["uid"][::N] if uid in [g["uid"] for g in carried]] == [
        g["uid"] for g in carried
    ][:WANTED]
    assert set(found["steps"][0]["begun_at"]) < {1, 2, 3}
    assert set(found["steps"][1]["begun_at"]) == {4}


def test_masked_and_dropped_replies(alone: Any) -> None:
    whole, masked, dropped = (alone(case(name)) for name in ("whole", "mask", "drop"))
    first, plain = masked["steps"][0], whole["steps"][0]
    assert first["responses"] == plain["responses"]
    assert set(first["finished"]) == {True, False}
    for mask, finished in zip(first["response_mask"], first["finished"], strict=True):
        assert set(mask) == {float(finished)}
    assert masked["metrics"][0]["actor/grad_norm"] != whole["metrics"][0]["actor/grad_norm"] > 0
    assert masked["metrics"][0]["response_length/clip_ratio"] == plain["finished"].count(False) / len(plain["finished"])
    for step in dropped["steps"]:
        assert all(step["finished"])
    assert sum(m["rollout/dropped_groups"] for m in dropped["metrics"]) > 0


def test_a_step_that_is_masked_as_a_whole_changes_nothing(worlds: Worlds) -> None:
    (found,) = worlds[1].run(run, ["rollout.truncated=mask", "data.max_response_length=1", "rollout.stop_token_ids=[]"])
    masked = [not any(step["finished"]) for step in found["steps"]]
    assert any(masked)
    for metrics, whole in zip(found["metrics"], masked, strict=True):
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["actor/grad_norm"] == 0 or not whole


def clocked(overrides: list[str], ticks: list[float]) -> dict[str, Any]:
    """With a clock that says on the first rank, and nonsense on the others."""
    clock = tails.monotonic

    def use(trainer: Trainer) -> dict[str, Any]:
        said = iter(ticks) if trainer.runtime.env.is_first else iter(range(10**9))
        tails.monotonic = lambda: float(next(said))  # type: ignore[attr-defined]
        shown: list[dict[str, Any]] = []
        trainer.trackers.samples = lambda rows, step, kind="train": shown.extend(rows)  # type: ignore[method-assign]
        return {**watched(trainer), "shown": shown}

    try:
        return with_trainer(use, [*BASE, "trainer.resume=never", *overrides], 1)
    finally:
        tails.monotonic = clock  # type: ignore[assignment]


def test_one_clock_decides_and_what_it_decided_is_written_down(worlds: Worlds, alone: Any, tmp_path: Path) -> None:
    settings = [ROUNDS, *PARTIAL, "rollout.time_limit_s=10", FROZEN, f"trainer.output_dir={tmp_path}"]
    reference = alone(case("rounds", FROZEN))["steps"][0]
    lengths = [max(map(len, reference["responses"][at : at + N])) for at in range(0, N * WANTED, N)]
    first = -(-min(lengths) // 3)  # rounds until there is a group to train on
    ranks = worlds[2].run(clocked, settings, [0.0, 11.0, *range(12, 99)])
    for found in ranks:
        metrics = found["metrics"][0]
        assert metrics["rollout/stopped_by_clock"] == 1
        assert metrics["rollout/rounds"] == first
        assert [row["begun_at"] for row in found["shown"]] == found["steps"][0]["begun_at"]
        assert found["steps"][0]["uid"][::N] == [
            uid for uid, n in zip(reference["uid"][::N], lengths, strict=True) if n <= 3 * first
        ]
        assert metrics["rollout/carried_groups"] == WANTED - metrics["rollout/groups"] > 0
    in_time = worlds[2].run(clocked, settings, [0.0] * 99)
    assert all(found["steps"][0]["uid"] == reference["uid"] for found in in_time)
    assert all(found["metrics"][0]["rollout/stopped_by_clock"] == 0 for found in in_time)


def test_balance_follows_what_replies_were_like(worlds: Worlds, alone: Any) -> None:
    """The second epoch is dealt out by the first one's lengths, as evenly as can be: the same rows, other ranks."""
    even, balanced = (
        worlds[2].run(run, ["data.train.size=8", "trainer.total_epochs=3", f"rollout.balance={how}", FROZEN])
        for how in ("none", "expected_length")
    )
    assert [s["responses"] for s in even[0]["steps"]] == [s["responses"] for s in balanced[0]["steps"]]
    length = {}
    for step in even[0]["steps"][:2]:
        for at, uid in enumerate(step["uid"][::N]):
            length[uid] = math.ceil(sum(map(len, step["responses"][at * N : (at + 1) * N])) / N)
    uneven = 0
    for number, step in enumerate(even[0]["steps"][2:], start=2):
        uids = step["uid"][::N]
        costs = [length[uid % 8] for uid in uids]
        splits = [sum(c for c, one in zip(costs, bits, strict=True) if one) for bits in product((0, 1), repeat=4)]
        best = min(abs(2 * part - sum(costs)) for part in splits)
        gaps = [
            abs(2 * sum(length[uid % 8] for uid in ranks[0]["mine"][number]) - sum(costs)) for ranks in (even, balanced)
        ]
        assert gaps[1] == best
        assert sorted(uid for rank in balanced for uid in rank["mine"][number]) == sorted(uids)
        uneven += gaps[0] > best
    assert uneven


def plan_of(*overrides: str) -> Plan:
    config = compose(["experiment=tiny", "trainer.device=cpu", *overrides])
    return Plan.from_config(config, Cluster.from_config(config))


def test_warnings_say_what_is_given_up() -> None:
    limit = ["rollout.max_new_tokens_per_step=4", "rollout.partial=true"]
    (off,) = plan_of(*limit, "algorithm.rollout_correction.rollout_is=null").warnings
    assert "set algorithm.rollout_correction.rollout_is=auto" in off
    assert plan_of(*limit).warnings == []
    clock = plan_of("rollout.time_limit_s=4", "rollout.segment_tokens=4").warnings
    assert len(clock) == 1
    assert "another run or world size gives other results" in clock[0]


def test_too_few_prompts_and_greedy_baselines(worlds: Worlds) -> None:
    few = [*OVER, "data.train.size=6"]
    (said,) = worlds[1].run(
        many,
        [
            [*BASE, *few],
            [
                *BASE,
                *CASES["drop"],
                f"reward.functions=['{REWARDS}:length']",
                "data.max_response_length=1",
                "rollout.segment_tokens=1",
            ],
        ],
    )
    assert "rollout.over_sampling=1.75 × data.train_batch_size=4 = 7 > 6 prompts" in said[0]
    assert "each of the step's 7 groups has a reply of data.max_response_length=1 tokens" in said[1]
    config: Config = compose(["experiment=tiny", "algorithm.adv_estimator=remax", ROUNDS])
    with pytest.raises(ConfigError, match="adv_estimator=remax needs a greedy reply beside each sampled one"):
        check_choices(config)
