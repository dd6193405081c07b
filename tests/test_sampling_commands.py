"""`spmd-rl eval` and `generate`: from a checkpoint or an exported folder, on any ranks, and nothing is trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl import evaluate, export, generate, train
from spmd_rl.config.load import compose
from spmd_rl.topology.roles import only_sampling, role_specs
from tests.world import Worlds

TINY = ["experiment=tiny", "data.val.size=9", "observe.trackers=[]"]


@pytest.fixture(scope="module")
def run(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint, and the exported model in `model` beside it."""
    folder = tmp_path_factory.mktemp("run")
    argv = ["experiment=sft_tiny", "trainer.total_training_steps=3", "observe.trackers=[]", "trainer.save_freq=0"]
    assert worlds[2].run(train.main, [*argv, f"trainer.output_dir={folder}"]) == [0, 0]
    assert export.main([str(folder), str(folder / "model"), "--dtype", "float32"]) == 0
    return folder


def replies(worlds: Worlds, size: int, file: Path, *argv: str) -> list[dict[str, Any]]:
    assert worlds[size].run(generate.main, [*TINY, f"--output={file}", *argv]) == [0] * size
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_same_replies_from_checkpoint_and_folder_on_any_ranks(worlds: Worlds, run: Path, tmp_path: Path) -> None:
    one = replies(worlds, 1, tmp_path / "one.jsonl", f"model.path={run / 'model'}", "rollout.n=2")
    two = replies(worlds, 2, tmp_path / "two.jsonl", f"trainer.resume={run}", "rollout.n=2", "data.val_batch_size=4")
    base = replies(worlds, 1, tmp_path / "base.jsonl", "rollout.n=2")
    assert one == two
    assert len(one) == 18
    assert [(row["uid"], row["sample"]) for row in one[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["response"] for row in one] != [row["response"] for row in base]
    assert one[0]["data_source"] == "reasoning_gym/chain_sum"


def test_greedy_text_is_that_of_transformers(worlds: Worlds, run: Path, tmp_path: Path) -> None:
    greedy = ["rollout.n=1", "rollout.temperature=0", "--data=train", "data.train.size=5"]
    rows = replies(worlds, 2, tmp_path / "greedy.jsonl", f"trainer.resume={run}", *greedy)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    for row in rows:
        ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == row["response"]
    assert len(rows) == 5


def test_eval_writes_metrics_and_samples(worlds: Worlds, run: Path, tmp_path: Path) -> None:
    argv = [*TINY, "rollout.val_n=2", "rollout.val_temperature=1.0"]
    found = []
    for size, source in ((1, f"model.path={run / 'model'}"), (2, f"trainer.resume={run}")):
        out = tmp_path / str(size)
        assert worlds[size].run(evaluate.main, [*argv, source, f"trainer.output_dir={out}"]) == [0] * size
        found.append(json.loads((out / "eval" / "metrics.json").read_text()))
        assert len((out / "eval" / "samples.jsonl").read_text().splitlines()) == 18
        assert not (out / "checkpoints").exists()
    assert found[0] == found[1]
    assert 0 <= found[0]["val-core/reasoning_gym/chain_sum/acc/mean@2"] <= 1


def test_mistakes_end_with_status_two(worlds: Worlds, run: Path, tmp_path: Path) -> None:
    assert worlds[2].run(generate.main, [*TINY, "--data=test"]) == [2, 2]
    assert worlds[2].run(evaluate.main, [*TINY, f"trainer.resume={tmp_path}"]) == [2, 2]
    (tmp_path / "file").write_text("")
    assert worlds[2].run(generate.main, [*TINY, f"--output={tmp_path / 'file' / 'replies.jsonl'}"]) == [2, 2]
    assert worlds[2].run(evaluate.main, [*TINY, f"trainer.output_dir={tmp_path / 'file'}"]) == [2, 2]
    other = [*TINY, "model.path=tiny-moe", f"trainer.resume={run}"]
    assert worlds[1].run(evaluate.main, other) == [2]


def test_only_the_roles_that_sample_are_there() -> None:
    config = only_sampling(compose(["experiment=tiny", "actor.use_kl_loss=true", "algorithm.adv_estimator=gae"]))
    assert set(role_specs(config)) == {"actor", "rollout"}
    assert set(role_specs(only_sampling(compose(["experiment=sft_tiny"])))) == {"actor", "rollout"}
