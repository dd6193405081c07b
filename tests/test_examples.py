"""The commands that stand in the examples run as they are, and do what they say."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from spmd_rl import train
from spmd_rl.algorithms import TokenBatch
from tests.world import Worlds

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = [
    (file.name, command)
    for file in sorted(EXAMPLES.glob("*.py"))
    for command in re.findall(r"^ +spmd-rl train (.*)$", file.read_text(), re.MULTILINE)
]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("file", "command"), COMMANDS)
def test_the_command_runs(
    file: str, command: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [word.replace("examples/", f"{EXAMPLES}/") for word in shlex.split(command)]
    argv = [re.sub(r"\[(.*)\]", r"['\1']", word) for word in argv]  # the checkout's path may hold any character
    quick = ["trainer.total_training_steps=1", "data.val.task=null", "observe.trackers=[jsonl]", "rollout.n=8"]
    assert worlds[2].run(train.main, [*argv, *quick, f"trainer.output_dir={tmp_path}"]) == [0, 0]
    metrics: dict[str, Any] = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/errors"] == 0
    if file == "own_reward.py":
        assert 0 < metrics["critic/score/mean"] < 1.1
        assert metrics["actor/grad_norm"] > 0
    if file == "own_loss.py":
        assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-4)


POOLS = {
    "separated_rollout": ("critic/score/mean", "rollout_corr/rollout_is_mean"),
    "reward_model": ("critic/score/mean",),
    "teacher": ("actor/teacher_kl_loss",),
}
"""Script -> metrics that it is there for."""


@pytest.mark.parametrize("name", POOLS)
def test_roles_on_pools_of_their_own(name: str, worlds: Worlds, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{name}.sh").read_text().replace("\\\n", " ")
    (command,) = re.findall(r'^exec \.venv/bin/spmd-rl train --nproc 2 (.*) "\$@"$', text, re.MULTILINE)
    quick = ["trainer.total_training_steps=2", "data.val.task=null", "observe.trackers=[jsonl]"]
    assert worlds[2].run(train.main, [*shlex.split(command), *quick, f"trainer.output_dir={tmp_path}"]) == [0, 0]
    last: dict[str, Any] = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert all(last[metric] != 0 for metric in POOLS[name])
    assert last["trainer/idle_s/global"] > 0


def test_every_example_has_a_command() -> None:
    assert {file for file, _ in COMMANDS} == {file.name for file in EXAMPLES.glob("*.py")}
    assert len(COMMANDS) >= 4


def test_rewards() -> None:
    reward = load("own_reward")
    assert reward.compute_score("", "it is 12", "12", {}) == 1.0
    assert reward.compute_score("", "it is 13", "12", {}) == 0.5
    assert reward.compute_score("", "no idea", "12", {}) == 0.0
    assert reward.digits_and_brevity(["?"] * 2, ["12", "a1b2"]) == pytest.approx([1.1, 0.5])


def test_the_best_of_a_group() -> None:
    advantage = load("own_advantage").best_of_group(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]))
    assert advantage.tolist() == [0.5, 0.0, 0.0, 0.0]


def test_the_loss_is_a_policy_gradient_at_ratio_one_and_flat_far_from_it() -> None:
    log_prob = torch.tensor([0.0, 3.0], requires_grad=True)
    batch = TokenBatch(
        log_prob=log_prob,
        old_log_prob=torch.zeros(2),
        advantages=torch.tensor([2.0, 2.0]),
        response_mask=torch.ones(2),
        row=torch.tensor([0, 1]),
        rows=2,
    )
    loss, _ = load("own_loss").soft_clip(batch)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert gradient[0].item() == pytest.approx(-2.0)
    assert abs(gradient[1].item()) < 1e-6
