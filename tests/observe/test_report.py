"""The curve and the report of a run."""

from pathlib import Path

import pytest

from spmd_rl.cli import main as cli
from spmd_rl.config import Config, ConfigError
from spmd_rl.observe.curve import draw
from spmd_rl.observe.tracking import open_trackers

pytest.importorskip("matplotlib")


def test_report_draws_the_curve_and_says_start_and_end(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config.observe.trackers = ["jsonl"]
    trackers = open_trackers(config, writes=True)
    for step, accuracy in ((0, 0.2), (10, 0.5), (20, 0.4)):
        trackers.log({"val-core/sums/reward/mean@1": accuracy}, step)
        trackers.log({"critic/score/mean": accuracy, "response_length/mean": 3.0}, step)
    trackers.close()
    run = config.trainer.output_dir
    assert cli(["report", run]) == 0
    assert (Path(run) / "curve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "sums/reward/mean@1: start 0.200 (step 0), best 0.500 (step 10), end 0.400 (step 20)" in shown


def test_a_run_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        draw([tmp_path], tmp_path / "a.png")
