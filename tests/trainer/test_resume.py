"""Interrupted and resumed equals uninterrupted; a killed rank costs the work since the last save and nothing else."""

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spmd_rl.trainer.checkpoint import Checkpointer, committed
from tests.trainer import launched
from tests.trainer.launched import PLACES, STEPS, lines, marked, new_mark, run, shown, torchrun, wait_until
from tests.world import RankError, Worlds

Line = dict[str, Any]


@pytest.fixture(scope="module")
def whole(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody interrupts, on 2 ranks."""
    folder = tmp_path_factory.mktemp("whole")
    assert worlds[2].run(run, [f"trainer.output_dir={folder}"]) == [(0, "")] * 2
    return folder


def steps_of(folder: Path) -> list[str]:
    return [path.name for path in committed(folder)]


def scalars(folder: Path, tag: str = "critic/score/mean") -> list[tuple[int, float]]:
    """What TensorBoard shows of a tag."""
    shown = EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars(tag)]


def test_the_run_itself(whole: Path) -> None:
    rows = lines(whole)
    assert [row["step"] for row in rows] == [*range(STEPS + 1)]
    assert steps_of(whole) == ["step_000002", "step_000004", "step_000005"]
    assert len({row["actor/lr"] for row in rows[1:]}) == STEPS
    assert len({row["actor/reward_kl_penalty_coeff"] for row in rows[1:]}) == STEPS
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])


def test_kill_9_of_a_rank_in_a_step(worlds: Worlds, whole: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", new_mark()
    settings = [f"trainer.output_dir={folder}", "reward.num_workers=1"]
    with torchrun(2, launched.__file__, "step", *settings, mark=mark) as process:
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode != 0, said
    assert "exitcode  : -9" in said
    assert wait_until(lambda: not marked(mark), 20), marked(mark)
    assert steps_of(folder) == ["step_000002"], said
    assert lines(folder) == lines(whole)[:4]
    for size in (1, 4):
        other = shutil.copytree(folder, tmp_path / f"on {size}")
        assert worlds[size].run(run, [f"trainer.output_dir={other}"]) == [(0, "")] * size
        assert_equal(lines(other), lines(whole), exactly=False)
    check_resumed(worlds, folder, whole)


@pytest.mark.parametrize("place", ["write", "commit"])
def test_kill_9_of_a_rank_in_a_save(worlds: Worlds, whole: Path, tmp_path: Path, place: str) -> None:
    with pytest.raises(RankError, match="of 2 ended"):
        worlds[2].run(run, [f"trainer.output_dir={tmp_path}"], PLACES[place])
    assert steps_of(tmp_path) == ["step_000002"]
    assert (tmp_path / "checkpoints" / "step_000004.partial" / "shards" / "global" / ".metadata").exists() == (
        place == "commit"
    )
    assert lines(tmp_path) == lines(whole)[:5]
    check_resumed(worlds, tmp_path, whole)


def check_resumed(worlds: Worlds, folder: Path, whole: Path) -> None:
    """On as many ranks as before: the same run to the last bit, and nothing is left over."""
    assert worlds[2].run(run, [f"trainer.output_dir={folder}"]) == [(0, "")] * 2
    assert_equal(lines(folder), lines(whole), exactly=True)
    assert steps_of(folder) == steps_of(whole)
    assert not list((folder / "checkpoints").glob("*.partial"))
    assert scalars(folder) == scalars(whole)
    assert [step for step, _ in scalars(folder)] == [*range(1, STEPS + 1)]


def assert_equal(got: list[Line], expected: list[Line], exactly: bool) -> None:
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    for mine, true in zip(got, expected, strict=True):
        assert mine.keys() == true.keys()
        if exactly:
            assert mine == true
        else:
            assert mine == pytest.approx(true, rel=1e-3, abs=1e-5)


def test_the_launcher_dies(worlds: Worlds, whole: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", new_mark()
    settings = [f"trainer.output_dir={folder}", "reward.num_workers=1"]
    process = torchrun(2, launched.__file__, "nowhere", *settings, mark=mark)
    try:
        assert wait_until(lambda: steps_of(folder) != [], 120)
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not marked(mark), 60), marked(mark)
    assert process.stdout is not None
    process.stdout.close()
    before = lines(folder)
    assert steps_of(folder)[-1] == f"step_{before[-1]['step']:06d}"  # the ranks save before they go
    assert worlds[2].run(run, [f"trainer.output_dir={folder}"]) == [(0, "")] * 2
    assert_equal(lines(folder), lines(whole), exactly=True)


def test_saving_in_the_background(worlds: Worlds, whole: Path, tmp_path: Path) -> None:
    first, second = (f"trainer.output_dir={tmp_path / name}" for name in "ab")
    background = "trainer.checkpoint.async_save=true"
    assert worlds[2].run(run, [first, background]) == [(0, "")] * 2
    assert_equal(lines(tmp_path / "a"), lines(whole), exactly=True)
    assert steps_of(tmp_path / "a") == steps_of(whole)
    resume = f"trainer.resume={tmp_path / 'a' / 'checkpoints' / 'step_000002'}"
    assert worlds[2].run(run, [second, background, resume]) == [(0, "")] * 2
    assert_equal(lines(tmp_path / "b"), lines(whole)[3:], exactly=True)


def limited_files() -> Callable[[], None]:
    """From the save of step 4 on, no file may grow past 50 kB."""
    save, limits = Checkpointer.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def saving(self: Checkpointer, step: int, *args: Any) -> None:
        if step >= 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        save(self, step, *args)

    def undo() -> None:
        Checkpointer.save = save  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    Checkpointer.save = saving  # type: ignore[method-assign]
    return undo


@pytest.fixture
def small_disk(tmp_path: Path, whole: Path) -> Iterator[Path]:
    """A run's folder whose checkpoints lie on a disk with room for one and a half of them."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    room = sum(f.stat().st_size for f in (whole / "checkpoints" / "step_000002").rglob("*") if f.is_file()) * 3 // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path / "run"
    subprocess.run(["umount", str(place)], check=True)


def check_full(results: list[tuple[int, str]], folder: Path) -> str:
    """Both ranks gave up, one said why, and the last good checkpoint is the only one. What it said."""
    assert [status for status, _ in results] == [1, 1]
    first, other = (said for _, said in results)
    assert first.startswith("error: saving step_000004 failed (rank ")
    assert first.endswith(f"the last good checkpoint is {folder / 'checkpoints' / 'step_000002'}\n")
    assert other == ""
    assert steps_of(folder) == ["step_000002"]
    assert not list((folder / "checkpoints").glob("*.partial"))
    return first


@pytest.mark.parametrize("background", ["true", "false"])
def test_files_that_cannot_grow(worlds: Worlds, whole: Path, tmp_path: Path, background: str) -> None:
    settings = [f"trainer.output_dir={tmp_path}", f"trainer.checkpoint.async_save={background}"]
    check_full(worlds[2].run(run, settings, limited_files), tmp_path)
    assert worlds[2].run(run, settings) == [(0, "")] * 2
    assert_equal(lines(tmp_path), lines(whole), exactly=True)


def test_a_full_disk(worlds: Worlds, whole: Path, small_disk: Path) -> None:
    settings = [f"trainer.output_dir={small_disk}"]
    assert re.search(r"; 0(\.\d+)? GB are free there\);", check_full(worlds[2].run(run, settings), small_disk))
    last = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1"]
    assert worlds[2].run(run, [*settings, *last]) == [(0, "")] * 2
    assert_equal(lines(small_disk), lines(whole), exactly=True)


def test_a_checkpoint_of_another_model_is_refused_before_loading(worlds: Worlds, whole: Path, tmp_path: Path) -> None:
    resume = f"trainer.resume={whole / 'checkpoints' / 'step_000004'}"
    other = ["model.random_init=true", "model.shape=qwen3-0.6b", resume, f"trainer.output_dir={tmp_path}"]
    ((status, said),) = worlds[1].run(run, other)
    assert status == 2
    assert "was saved from another model (hidden_size: saved 64, now 1024" in said


def test_starting_anew_puts_the_old_checkpoints_aside(worlds: Worlds, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    anew = [f"trainer.output_dir={folder}", "trainer.resume=never", "trainer.checkpoint.keep=1"]
    assert worlds[2].run(run, [*anew, "trainer.total_training_steps=2", "trainer.seed=1"]) == [(0, "")] * 2
    assert steps_of(folder) == ["step_000002"]
    aside = sorted(p.name for p in (folder / "checkpoints" / "replaced").iterdir())
    assert aside == ["step_000002", "step_000004", "step_000005"]
    assert [step for step, _ in scalars(folder)] == [1, 2]
    assert len(lines(folder)) == 3


def contents(folder: Path) -> dict[Path, bytes]:
    """All that a user or a command looks at; the roster counts every start."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "roster.json"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "the last of 5 steps; raise trainer.total_training_steps"),
        (["trainer.total_training_steps=3"], "beyond the last of 3 steps; raise trainer.total_training_steps"),
        (
            ["trainer.total_training_steps=null", "trainer.total_epochs=1"],
            "beyond the last of 3 steps; raise trainer.total_epochs",
        ),
    ],
)
def test_a_finished_run_says_so_and_is_left_alone(
    worlds: Worlds, whole: Path, tmp_path: Path, settings: list[str], says: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    before = contents(folder)
    again = [f"trainer.output_dir={folder}", "actor.optim.lr=0.5", *settings]
    first, other = worlds[2].run(shown, again)
    ways_out = "set trainer.resume=never to begin anew, or another trainer.output_dir"
    assert first == (0, f"nothing to do: {folder}/checkpoints/step_000005 is {says}, {ways_out}\n", "")
    assert other == (0, "", "")
    assert contents(folder) == before


def test_a_resumed_run_says_what_was_changed(worlds: Worlds, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    resumed = [f"trainer.output_dir={folder}", "observe.trackers=[console,jsonl]", "trainer.save_freq=-1"]
    more = [*resumed, "trainer.total_training_steps=6", "+reward.kwargs.digits={}", "rollout.stop_token_ids=[10]"]
    first, other = worlds[2].run(shown, [*more, "actor.optim.lr=0.5"])
    assert (first[0], *other) == (0, 0, "", "")
    (line,) = [line for line in first[1].splitlines() if line.startswith("changed against ")]
    assert line.startswith(f"changed against {folder}/config.yaml: actor.optim.lr ")
    assert " -> 0.5, rollout.stop_token_ids [10, 20, 30, 40, 50, 60, 70, 80] -> [10], " in line
    assert line.endswith("trainer.total_training_steps 5 -> 6, trainer.save_freq 2 -> -1")
    assert "resumed" in first[1].split(line)[0]
    again = worlds[2].run(shown, [*more, "actor.optim.lr=0.5", "trainer.total_training_steps=7"])[0][1]
    assert f"changed against {folder}/config.yaml: trainer.total_training_steps 6 -> 7\n" in again
    same = worlds[2].run(shown, [*more, "actor.optim.lr=0.5", "trainer.total_training_steps=7"])[0][1]
    assert "step 6/7" in same
    assert "changed against" not in same
