"""Which rank failed first, from what the ranks have left behind."""

import json
import os
from pathlib import Path

import pytest

from spmd_rl import cli, ranked
from spmd_rl._launch import failure
from spmd_rl.config import Config
from spmd_rl.runtime.environment import LaunchEnvironment
from tests.world import Worlds


def leave(attempt: Path, rank: int, at: float, message: object) -> None:
    """A rank's record, written at a time."""
    file = attempt / "errors" / f"rank_{rank}@node{rank}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"message": message}))
    os.utime(file, (at, at))


def told(traceback: str, message: str = "ValueError: x") -> dict[str, object]:
    return {"message": message, "extraInfo": {"py_callstack": traceback, "timestamp": "7"}}


def test_the_first_one_by_time_and_the_others_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = tmp_path / "12.attempts" / "0"
    assert failure.describe(attempt) is None
    leave(attempt, 0, 100.5, told("gloo: peer gone\n", "RuntimeError: peer"))
    leave(attempt, 7, 100.25, told("Traceback …\nValueError: x\n"))
    leave(attempt, 3, 200, "torchrun's own words")
    wanted = [
        "rank 7 on node7 failed first; 2 more failed after it: ValueError: x",
        "Traceback …",
        "ValueError: x",
        f"its whole log: {tmp_path}/12_7_log.out",
    ]
    assert str(failure.describe(attempt)).splitlines() == wanted
    assert cli.main(["launch", "--failure", str(attempt)]) == 0
    assert capsys.readouterr().out.splitlines() == wanted


def test_a_rank_that_lingers_after_its_error(tmp_path: Path) -> None:
    attempt = tmp_path / "5.attempts" / "0"
    attempt.mkdir(parents=True)
    lingering = attempt / "rank_3@node3.json"
    lingering.write_text(json.dumps({"message": told("Traceback …\n")}))
    os.utime(lingering, (1, 1))
    assert failure.describe(attempt) is None  # it was asked to stop
    leave(attempt, 2, 2, told("", "ended with status 75"))
    assert str(failure.describe(attempt)).startswith(
        "rank 3 on node3 failed first; 1 more failed after it: ValueError: x"
    )


def test_without_a_traceback_the_end_of_the_log(tmp_path: Path) -> None:
    attempt = tmp_path / "5_1.attempts" / "2"
    leave(attempt, 1, 1, told("", "ended with SIGKILL"))
    (tmp_path / "5_1_1_log.out").write_text("".join(f"line {n}\n" for n in range(40)))
    shown = str(failure.describe(attempt)).splitlines()
    assert shown[0] == "rank 1 on node1 failed first: ended with SIGKILL"
    assert shown[1:-1] == [f"line {n}" for n in range(40 - failure.TAIL, 40)]


def planted(config: Config, env: LaunchEnvironment) -> None:
    raise KeyError("planted")


def failing(file: str) -> str:
    """On a rank: what is raised, when the launcher wants tracebacks in `file`."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = file
    try:
        ranked.on_every_rank("generate", ["experiment=tiny"], planted)
    except KeyError as error:
        return str(error)
    finally:
        del os.environ["TORCHELASTIC_ERROR_FILE"]
    return "nothing"


def test_a_rank_leaves_its_traceback(worlds: Worlds, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    assert worlds[1].run(failing, str(file)) == ["'planted'"]
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "KeyError: 'planted'"
    assert "in planted" in message["extraInfo"]["py_callstack"]
