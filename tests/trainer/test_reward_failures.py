"""A reward that fails for all replies of a step ends the run on every rank; one that fails for some is counted."""

from pathlib import Path

import pytest

from spmd_rl.config.load import compose
from spmd_rl.trainer.checkpoint import committed
from spmd_rl.trainer.collect import decides
from tests.trainer.launched import REWARD, lines, shown
from tests.trainer.test_pools import apart
from tests.world import Worlds

FAILS = [f"reward.functions=['{REWARD}:broken']", "data.val.task=null", "observe.trackers=[console,jsonl]"]
DAPO = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=0"]
OFF = ["trainer.schedule=one_step_off", "trainer.staleness=2"]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, []),
        (2, ["reward.num_workers=1"]),
        (2, DAPO),
        (2, ["rollout.over_sampling=1.5", "data.train.size=24", "rollout.segment_tokens=4"]),
        (4, [*apart(rollout=2), *DAPO]),
        (4, [*apart(rollout=3), *OFF]),
    ],
    ids=["alone", "two ranks", "dynamic sampling", "in rounds", "pools, dynamic sampling", "pools, one step off"],
)
def test_all_replies_of_a_step(worlds: Worlds, tmp_path: Path, size: int, settings: list[str]) -> None:
    first, *others = worlds[size].run(shown, [*FAILS, *settings, f"trainer.output_dir={tmp_path}"])
    assert [first[0], *(status for status, _, _ in others)] == [2] * size
    assert (
        first[2].count("error: the reward failed for 16 of the 16 replies of step 1, so there is nothing to learn") == 1
    )
    assert "the last one: reward 'broken': ValueError: no key in True. The first ones are in the log" in first[2]
    assert f"Mend reward.functions=['{REWARD}:broken'] (reward.num_workers=0 calls" in first[2]
    assert all("error: " not in said for _, _, said in others)
    assert lines(tmp_path) == []
    if size == 4:
        rollouts = 3 if "trainer.staleness=2" in settings else 2
        schedule = "one_step_off" if rollouts == 3 else "sequential"
        ranks = ("0", "1-3") if rollouts == 3 else ("0-1", "2-3")
        pools = f"global {ranks[0]}: actor · ref  |  rollout {ranks[1]}: rollout  ·  schedule {schedule}"
        assert f"  pools    {pools}\n" in first[1]
        assert "\n  ref      fsdp  fsdp=" in first[1]


def test_a_function_that_hangs_for_all(worlds: Worlds, tmp_path: Path) -> None:
    hangs = [*FAILS, f"reward.functions=['{REWARD}:hangs']", "reward.timeout_s=0.1", "reward.num_workers=1"]
    (_, _, said), _ = worlds[2].run(shown, [*hangs, f"trainer.output_dir={tmp_path}"])
    assert "failed for 16 of the 16 replies of step 1" in said
    assert "reward 'hangs': not called: 4 calls of this function took too long or ended their process." in said
    assert "raise reward.timeout_s=0.1 where" in said


def test_some_replies_are_counted_and_shown(worlds: Worlds, tmp_path: Path) -> None:
    some = [f"reward.functions=['{REWARD}:sometimes']", "observe.trackers=[console,jsonl]"]
    some += ["rollout.val_n=4", "rollout.val_temperature=1.0"]
    found = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        status, out, _ = worlds[size].run(shown, [*some, f"trainer.output_dir={folder}"])[0]
        assert status == 0
        rows = lines(folder)
        for row in rows[1:]:
            failed, count = row["reward/errors"], row["reward/replies"]
            assert 0 < failed < count == 16
            assert f"  reward errors {failed:g}/16  " in out
        assert 0 < rows[0]["val-aux/reward/errors"] < 24
        assert f"  reward errors {rows[0]['val-aux/reward/errors']:g}\n" in out
        found.append([(row.get("reward/errors"), row["val-aux/reward/errors"]) for row in rows])
    assert found[0] == found[1]


def test_a_step_ahead_that_fails_is_in_no_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    """It would be trained on with the scores of failed replies, however the function was mended."""
    calls = f"reward.kwargs={{file: '{tmp_path}/calls', after: 32}}"  # two of the steps
    fails = [*FAILS, f"reward.functions=['{REWARD}:later']", calls, "reward.num_workers=0"]
    pools = [*apart(rollout=1), "trainer.schedule=one_step_off", "trainer.save_freq=1"]
    (status, out, err), _ = worlds[2].run(shown, [*fails, *pools, f"trainer.output_dir={tmp_path / 'run'}"])
    assert status == 2
    assert "the reward failed for 16 of the 16 replies of step 3" in err
    assert "not saved after step 2: the reward failed for a step that is sampled ahead" in out
    assert [folder.name for folder in committed(tmp_path / "run")] == ["step_000001"]


def test_few_replies_and_those_that_a_model_scores_decide_nothing() -> None:
    config = compose(["data.train_batch_size=4", "rollout.n=4"])
    assert decides(16, config)
    assert not decides(12, config)
    config.reward.model.enable = True
    assert not decides(16, config)
