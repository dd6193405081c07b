"""What a rank says of itself, and how `spmd-rl status` and the console show it."""

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from spmd_rl.config import ConfigError
from spmd_rl.observe.console import ConsoleTracker, now_words
from spmd_rl.observe.live import Here, Report
from spmd_rl.observe.status import describe, main, table, write_failure, write_status


def test_phases_add_up_and_nest() -> None:
    here = Here()
    here.reset("imports")
    here.begin("models")
    time.sleep(0.02)
    with here.phase("step"):
        with here.phase("generate"):
            time.sleep(0.03)
            assert here.look()[0] == "generate"
        assert here.look()[0] == "step"
    assert here.look()[0] == "models"
    assert 0.02 <= here.spent["models"] < 0.03 + here.spent["generate"]
    assert here.spent["generate"] >= 0.03 > here.spent["step"]
    assert here.startup().startswith("start-up 0.")
    assert "models 0.0" in here.startup()
    assert "imports" not in here.startup()  # less than a hundredth of a second


def test_the_phase_that_failed() -> None:
    here = Here()
    with pytest.raises(ZeroDivisionError), here.phase("step"), here.phase("reward"):
        raise ZeroDivisionError
    assert here.failed_in == "reward"


def test_a_main_thread_that_moves_and_one_that_does_not() -> None:
    here, seen = Here(), []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            seen.append(here.look())

    watcher = threading.Thread(target=watch)
    watcher.start()
    threading.Event().wait(0.6)  # does not move
    still = max(seconds for _, _, seconds, _ in seen)
    with here.phase("other"):
        threading.Event().wait(0.2)
    stop.set()
    watcher.join()
    assert still > 0.3
    assert seen[-1][2] < still
    assert any("test_live.py" in frame and "test_a_main_thread" in frame for frame in seen[0][3])


def test_reports_travel_whole() -> None:
    report = Report(3, "rollout", "node2", 17, "boot pid", 5, 12, "generate", 1.5, 0.5, 0.0, ("a:1 f", "b:2 g"))
    assert Report.from_json(report.to_json()) == report
    assert report.place == "b:2 g"
    assert not report.waits
    assert Report(0, stack=("spmd_rl/x.py:1 f", "torch/distributed/distributed_c10d.py:9 all_reduce")).waits


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="there is no status"):
        describe(tmp_path, time.time())
    ranks = [Report(0, "train", "node1", step=3, phase="update_actor", seconds=4.0),
             Report(1, "rollout", "node2", step=4, phase="generate", seconds=70.0, unheard_s=9.0)]  # fmt: skip
    write_status(tmp_path, "001-abc", ranks)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["rank", "pool", "host", "step", "phase", "since", "at"]
    assert said[1].split()[:5] == ["0", "train", "node1", "3", "update_actor"]
    assert "1:10" in said[2]
    assert "no word for 9 s, but it runs" in said[2]
    text, code, works = describe(tmp_path, time.time() + 100)
    assert (code, works) == (1, False)
    assert "nothing was heard of this run for 100 s" in text
    assert write_failure(tmp_path, "001-abc", "rank 1 died")
    assert not write_failure(tmp_path, "001-abc", "rank 0 died")  # the first word counts
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("rank 1 died\n")
    write_status(tmp_path, "002-def", [Report(0, ended="done")])
    assert main([str(tmp_path)]) == 0
    assert json.loads((tmp_path / "status.json").read_text())["attempt"] == "002-def"
    assert main([]) == 2


def test_a_table_of_many_ranks() -> None:
    ranks = [Report(r) for r in range(99)] + [Report(99, ended="ValueError: x")]
    lines = table(ranks)
    assert len(lines) == 1 + 32 + 1
    assert lines[-1] == "… and 68 more ranks"
    assert "ValueError: x" in lines[-2]


def test_the_console_says_when_a_phase_is_slow() -> None:
    shown = io.StringIO()
    console = ConsoleTracker(Console(file=shown, width=200))
    reports = [Report(r, phase="generate", seconds=s, step=2) for r, s in enumerate((30.0, 31.0, 29.0))]
    assert now_words(reports) == "generate 31 s (ranks 0-2)"
    console.live(reports)
    assert shown.getvalue() == ""
    for seconds in (61.0, 63.0, 119.0, 121.0):
        console.live([*reports[:2], Report(2, phase="reward", seconds=seconds, step=1)])
    assert shown.getvalue().splitlines() == [
        "still reward 61 s (rank 2), generate 31 s (ranks 0-1)",
        "still reward 121 s (rank 2), generate 31 s (ranks 0-1)",
    ]
    console.live([Report(0, ended="done")])
    console.say("start-up 1.0 s: imports 1.00")
    assert shown.getvalue().endswith("start-up 1.0 s: imports 1.00\n")
