"""`spmd-rl export` of checkpoints as the trainer writes them."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import save_config
from spmd_rl.config.run import LoraConfig, ModelConfig
from spmd_rl.export import main
from spmd_rl.models.loading import build_meta, load_hf_config, materialise
from spmd_rl.models.lora import add_adapters
from spmd_rl.models.names import export_tensors
from spmd_rl.models.policy import Policy
from spmd_rl.trainer.checkpoint import find_checkpoint


def saved_run(folder: Path, model: ModelConfig, steps: tuple[int, ...] = (2, 10)) -> Policy:
    """A run's output_dir with checkpoints of random weights; the last one's policy."""
    save_config(Config(model=model), folder / "config.yaml")
    for step in steps:
        lm = build_meta(load_hf_config(model))
        policy = Policy(add_adapters(lm, model.lora) if model.lora.rank else lm)
        materialise(
            policy,
            None,
            "cpu",
            seed=step,
        )
        with torch.no_grad():
            for name, p in policy.named_parameters():
                if ".lora_B." in name:
                    p.fill_(0.01)
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        shards = str(checkpoint / "shards" / "train")
        dcp.save({"actor": {"model": policy.state_dict()}}, checkpoint_id=shards, no_dist=True)
        (checkpoint / "trainer.json").write_text(json.dumps({"step": step, "shards": {"actor": "train"}}))
    return policy


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)], ids=["full", "adapters"])
def test_the_newest_checkpoint_becomes_a_folder(lora: LoraConfig, tmp_path: Path) -> None:
    policy = saved_run(tmp_path, ModelConfig(path="tiny-digits", lora=lora))
    assert main([str(tmp_path), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = dict(export_tensors(policy, lambda x: x))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_bfloat16_shards_of_a_named_checkpoint(tmp_path: Path) -> None:
    policy = saved_run(tmp_path, ModelConfig(path="tiny-digits"), steps=(10, 2))
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    main([str(checkpoint), str(tmp_path / "out"), "--shard-gb", "0.0001"])
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    expected = dict(policy.model.named_parameters())
    assert all(torch.equal(p, expected[name].bfloat16()) for name, p in model.named_parameters())


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a committed checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere$"):
        find_checkpoint(tmp_path / "nowhere")
    save_config(Config(), tmp_path / "config.yaml")
    with pytest.raises(
        ConfigError, match=r"has saved no checkpoint \(trainer.save_freq=-1: never; 0 saves at the end\)"
    ):
        find_checkpoint(tmp_path)
    saved_run(tmp_path, ModelConfig(path="tiny-digits"), steps=(1,))
    with pytest.raises(ConfigError, match=r"folder=.*config\.yaml cannot be written to \("):
        main([str(tmp_path), str(tmp_path / "config.yaml" / "out")])
    save_config(Config(model=ModelConfig(path="tiny-moe")), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="saved from another model"):
        main([str(tmp_path), str(tmp_path / "out")])
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config is not at .*config\.yaml"):
        main([str(tmp_path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
