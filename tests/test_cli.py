"""`spmd-rl`: dispatch, messages, and how ranks are started."""

import os
import sys
import types

import pytest

from spmd_rl import cli
from spmd_rl.config import ConfigError


def test_help_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert "from-verl" in shown
    assert "report" in shown
    for name in cli.COMMANDS:
        assert (f"  {name} " in shown) == (name in cli.available())


def test_an_unknown_command_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err


def test_a_command_that_does_not_exist_yet_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "doctor", cli.Command("spmd_rl.no_such_room", ""))
    assert cli.main(["doctor"]) == 2
    assert "spmd-rl doctor is not part of this version yet" in capsys.readouterr().err
    assert "doctor" not in cli.available()


def test_config_mistakes_are_printed_once_and_no_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_torchrun", lambda: pytest.fail("torchrun was started"))
    assert cli.main(["train", "--nproc", "2", "rolout.n=3"]) == 2
    err = capsys.readouterr().err
    assert err.count("unknown key rolout.n") == 1
    assert "Traceback" not in err


def test_nproc_starts_torchrun_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(cli, "find_torchrun", lambda: lambda words: started.append(words) or 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cli.main(["train", "experiment=tiny", "--nproc=2", "rollout.n=4"]) == 0
    assert started == [
        ["--standalone", "--nproc-per-node", "2", "-m", "spmd_rl.train", "experiment=tiny", "rollout.n=4"]
    ]
    assert int(os.environ.pop("OMP_NUM_THREADS")) >= 1


def test_sizes_that_do_not_fit_are_found_before_a_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_torchrun", lambda: pytest.fail("torchrun was started"))
    assert cli.main(["train", "--nproc", "4", "experiment=tiny", "actor.engine.fsdp.fsdp_size=3"]) == 2
    assert "fsdp_size=3" in capsys.readouterr().err


@pytest.mark.parametrize("nproc", ["0", "two", "-1"])
def test_a_wrong_number_of_ranks(nproc: str) -> None:
    with pytest.raises(ConfigError, match="--nproc"):
        cli.torchrun_words("m", [], nproc)


def test_without_nproc_the_command_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    fake = types.ModuleType("spmd_rl.fake_train")
    fake.main = lambda argv: seen.append(argv) or 7  # type: ignore[attr-defined]
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "spmd_rl.fake_train", fake)
    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("spmd_rl.fake_train", ""))
    assert cli.main(["train", "experiment=tiny"]) == 7
    assert seen == [["experiment=tiny"]]


def test_cfg_prints_the_config_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "experiment=tiny", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "path: tiny-digits" in shown
    assert cli.main(["train", "--nproc", "2", "--cfg", "help"]) == 0
    assert "# Peak learning rate. (float)" in capsys.readouterr().out
    assert cli.main(["train", "--help"]) == 0
    assert "quickstart" in capsys.readouterr().out
