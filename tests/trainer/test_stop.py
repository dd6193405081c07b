"""A run that is asked to end: by Ctrl-C or a signal, to the launcher or to all of its process group."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spmd_rl.observe import processes
from spmd_rl.runtime.liveness import LOST_RANK
from spmd_rl.trainer.checkpoint import committed
from tests.trainer.launched import lines, wait_until

LONG = 100_000
SLOW = """
import time
def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(1000)
"""


@contextmanager
def started(folder: Path, *words: str, steps: int = LONG) -> Iterator["subprocess.Popen[str]"]:
    """`spmd-rl train` in a process group of its own, as in a terminal."""
    command = [sys.executable, "-m", "spmd_rl.cli", "train", "experiment=tiny", "trainer.device=cpu"]
    settings = [f"trainer.output_dir={folder}", f"trainer.total_training_steps={steps}", "data.val.task=null"]
    log = [f"trainer.save_freq={LONG}", "observe.trackers=[console,jsonl]", "trainer.total_epochs=1000000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *settings, *log, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def trains(folder: Path) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and len(file.read_text().splitlines()) >= 2


@pytest.mark.parametrize(
    ("ranks", "number", "group", "name"),  # torchrun's agent passes its signals on as SIGUSR2
    [(2, signal.SIGINT, True, "SIGINT"), (2, signal.SIGTERM, False, "SIGUSR2"), (1, signal.SIGINT, False, "SIGINT")],
    ids=["a terminal's Ctrl-C", "SIGTERM to the launcher", "Ctrl-C of one rank"],
)
def test_it_ends_after_the_step_and_goes_on(tmp_path: Path, ranks: int, number: int, group: bool, name: str) -> None:
    nproc = ["--nproc", str(ranks)] if ranks > 1 else []
    with started(tmp_path / "run", *nproc) as process:
        assert wait_until(lambda: trains(tmp_path / "run"), 100)
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=100)
    assert process.returncode == (128 + number if ranks > 1 else 0), err
    (folder,) = committed(tmp_path / "run")
    saved = int(folder.name.removeprefix("step_"))
    assert f"{name}: the run ends after this step" in err
    assert "Traceback" not in err
    assert f"ended after step {saved} of {LONG} ({name}); its checkpoint is saved" in " ".join(out.split())
    assert [row["step"] for row in lines(tmp_path / "run")] == list(range(1, saved + 1))
    with started(tmp_path / "run", *nproc, steps=saved + 1) as again:
        out, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert [row["step"] for row in lines(tmp_path / "run")] == list(range(1, saved + 2))


def test_nothing_is_saved_where_nothing_is_to_be(tmp_path: Path) -> None:
    with started(tmp_path / "run", "trainer.save_freq=-1") as process:
        assert wait_until(lambda: trains(tmp_path / "run"), 100)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    assert "nothing is saved (trainer.save_freq=-1)" in " ".join(out.split())
    assert committed(tmp_path / "run") == []


def test_a_second_one_ends_a_step_that_does_not(tmp_path: Path) -> None:
    """Here a reward hangs; the watch would wait for `trainer.timeout_s`."""
    reward = tmp_path / "reward.py"
    reward.write_text(SLOW, encoding="utf-8")
    settings = [f"reward.functions=['{reward}:slow']", "reward.timeout_s=900"]
    with started(tmp_path / "run", "--nproc", "2", *settings) as process:
        status = tmp_path / "run" / "status.json"
        assert wait_until(lambda: status.exists() and '"reward"' in status.read_text(), 100)
        ranks = [(r["pid"], r["born"]) for r in json.loads(status.read_text())["ranks"]]
        os.killpg(process.pid, signal.SIGINT)
        assert not wait_until(lambda: process.poll() is not None, 3)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=100)
    assert process.returncode != 0
    assert wait_until(lambda: all(processes.state(*rank) == processes.GONE for rank in ranks), 20)


@pytest.fixture
def orphans() -> Iterator[None]:
    """Processes whose parent has died become children of this one."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)


def test_a_launcher_that_is_killed_leaves_no_run_that_looks_done(orphans: None, tmp_path: Path) -> None:
    """The ranks save; that they end with an error has the launchers of other hosts start again."""
    with started(tmp_path / "run", "--nproc", "2") as process:
        assert wait_until(lambda: trains(tmp_path / "run") and (tmp_path / "run" / "status.json").exists(), 100)
        ranks = json.loads((tmp_path / "run" / "status.json").read_text())["ranks"]
        process.kill()
        out, _ = process.communicate(timeout=100)  # which waits for the ranks: they have its pipes
        ends = [os.waitstatus_to_exitcode(os.waitpid(rank["pid"], 0)[1]) for rank in ranks]
    (folder,) = committed(tmp_path / "run")
    assert f"ended after step {int(folder.name.removeprefix('step_'))}" in " ".join(out.split())
    assert ends == [LOST_RANK] * 2
