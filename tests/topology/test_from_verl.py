"""`spmd-rl from-verl`: the translation is planned, and what cannot run, or was left to our defaults, is said."""

import re
import shlex
from pathlib import Path

import pytest

from spmd_rl.cli import main as cli
from spmd_rl.config.from_verl import read, translate

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
GIVEN = "actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_files=t.parquet actor_rollout_ref.rollout.n=4"
GRPO = "algorithm.adv_estimator=grpo"


def said(capsys: pytest.CaptureFixture[str], text: str, code: int) -> str:
    """What the command prints to stderr."""
    assert cli(["from-verl", text]) == code
    shown = capsys.readouterr()
    assert "-m spmd_rl.train" in shown.out
    return shown.err


def test_the_readmes_example_plans_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^spmd-rl from-verl ('.*?')$", README, re.MULTILINE | re.DOTALL)
    assert said(capsys, *shlex.split(example), code=0) == ""
    made = translate(read(shlex.split(example)).words)
    assert made.absent == []
    assert cli(["plan", *made.overrides]) == 0
    assert capsys.readouterr().err == ""


def test_what_verls_defaults_make_impossible_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    err = said(capsys, f"{GIVEN} {GRPO} data.train_batch_size=64", 2)
    assert "cannot run:\n  - actor.ppo_mini_batch_size=256 is more than data.train_batch_size=64" in err
    assert "not given" not in err


def test_verls_rollout_is_vllm_and_hf_holds_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, f"{GIVEN} {GRPO} data.train_batch_size=256", 0) == ""
    err = said(capsys, f"{GIVEN} {GRPO} data.train_batch_size=256 actor_rollout_ref.rollout.name=hf", 2)
    assert "rollout.infer_tp=2 needs rollout.name=vllm" in err


def test_what_was_not_given_is_said_and_the_rest_is_checked_without_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    # The default model has nine heads, which no rollout.infer_tp=2 divides: that is not the user's mistake.
    err = said(capsys, "data.train_batch_size=256", 0)
    assert "model.path=smollm2-135m-instruct" in err
    assert "a run needs it: data.train.files" in err
    assert "planned without the model's shape" in err
    assert "actor.engine.fsdp.fsdp_size=3 does not divide the 8 ranks" in said(
        capsys, "actor_rollout_ref.actor.fsdp_config.fsdp_size=3", 2
    )


def test_the_models_shape_is_checked_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    err = said(
        capsys, f"{GIVEN} {GRPO} trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1", 2
    )
    assert "memory: " in err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["from-verl"]) == 2
    assert cli(["from-verl", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: spmd-rl from-verl") == 2


def test_a_script_from_a_file_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "N=${N:-2}\nDATA=(\n  data.train_files=$HOME/a.parquet\n  data.train_batch_size=256\n)\n"
        'python3 -m verl.trainer.main_ppo "${DATA[@]}" trainer.nnodes=$N actor_rollout_ref.hybrid_engine=True \\\n'
        " ray_kwargs.ray_init.num_cpus=4 $@\n"
    )
    assert cli(["from-verl", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "torchrun --nnodes 2" in shown
    assert '"data.train.files=[$HOME/a.parquet]"' in shown
    assert "ray_kwargs.ray_init.num_cpus=4: there is no Ray" in shown


def test_a_translation_that_does_not_compose_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["from-verl", "actor_rollout_ref.rollout.n=0"]) == 2
    assert "rollout.n=0 is out of range" in capsys.readouterr().err
