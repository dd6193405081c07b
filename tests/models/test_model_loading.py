"""Folders: reading by slices, random starts, writing, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from spmd_rl.config import ConfigError
from spmd_rl.config.run import ModelConfig
from spmd_rl.models.loading import build_meta, load_hf_config, load_tokenizer, materialise, resolve, save_folder
from spmd_rl.models.names import exports
from spmd_rl.models.policy import Policy, decoder_layers, huggingface_name
from tests.models.ranks import run_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 30,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}


def configs() -> dict[str, PretrainedConfig]:
    """Sizes that 4 ranks do not divide; tied and untied; biases; scaled rotary frequencies; experts."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return {
        "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=llama3),
        "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "moe": Qwen3MoeConfig(
            **SHAPE, head_dim=10, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
        ),
    }


def saved(name: str, folder: Path) -> PretrainedConfig:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs()[name])
    model.save_pretrained(folder, max_shard_size="20KB")
    return model.config


def assert_equal_models(expected: nn.Module, got: nn.Module) -> None:
    tensors = dict(got.named_parameters(remove_duplicate=False)) | dict(got.named_buffers())
    for name, value in [*expected.named_parameters(remove_duplicate=False), *expected.named_buffers()]:
        assert torch.equal(value, tensors[name]), name
        assert value.dtype == tensors[name].dtype, name


@pytest.mark.parametrize("name", configs())
def test_meta_load_equals_from_pretrained_bitwise(name: str, tmp_path: Path) -> None:
    config = saved(name, tmp_path)
    model = build_meta(config)
    materialise(model, tmp_path, "cpu")
    assert_equal_models(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), model)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == config.tie_word_embeddings


def _shard_worker(rank: int, tmp: Path) -> dict[tuple[str, str, bool], dict[str, torch.Tensor]]:
    meshes = {
        "fsdp": init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),
        "ddp-fsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")),
    }
    results = {}
    for name in configs():
        for layout, mesh in meshes.items():
            for folder in (tmp / name, None):
                policy = Policy(build_meta(load_hf_config(ModelConfig(path=f"{tmp}/{name}"))))
                for layer in decoder_layers(policy):
                    fully_shard(layer, mesh=mesh)
                fully_shard(policy, mesh=mesh)
                materialise(policy, folder, "cpu", seed=3)
                assert all(isinstance(p, DTensor) for p in policy.parameters())
                full = {huggingface_name(n): p.full_tensor().detach() for n, p in policy.named_parameters()}
                results[name, layout, folder is None] = full
    return results


def test_sharded_load_and_random_start_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    plain = {}
    for name in configs():
        config = saved(name, tmp_path / name)
        for folder in (tmp_path / name, None):
            model = build_meta(config)
            materialise(model, folder, "cpu", seed=3)
            plain[name, folder is None] = dict(model.named_parameters())
    for results in run_ranks(_shard_worker, 4, tmp_path):
        for (name, _, random), tensors in results.items():
            expected = plain[name, random]
            assert tensors.keys() == expected.keys()
            for key, value in tensors.items():
                assert torch.equal(value, expected[key]), (name, key, random)


@pytest.mark.parametrize("name", configs())
def test_what_we_save_transformers_loads(name: str, tmp_path: Path) -> None:
    model = build_meta(configs()[name])
    materialise(model, None, "cpu", seed=1)
    parameters = dict(model.named_parameters())
    tensors = [(e.name, e.make([parameters[s] for s in e.sources])) for e in exports(model)]
    save_folder(tmp_path / "out", model.config, tensors, dtype=torch.float32, max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_equal_models(again, model)
    with pytest.raises(ConfigError, match="not empty"):
        save_folder(tmp_path / "out", model.config, tensors)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", torch.zeros(3)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_folder(tmp_path / "out", configs()["qwen2"], broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "'model.norm.weight' of the model is missing"),
        ("extra", "no place in a Qwen2ForCausalLM: model.layers.9.x"),
        ("shape", r"model.norm.weight has shape \[7\], the config asks for \[30\]"),
    ],
)
def test_keys_that_do_not_fit_are_named(change: str, message: str, tmp_path: Path) -> None:
    config = saved("qwen2", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            break
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "shape":
        tensors["model.norm.weight"] = torch.zeros(7)
    else:
        tensors["model.layers.9.x"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=message):
        materialise(build_meta(config), tmp_path, "cpu")


def test_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="no weights"):
        resolve(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"it has pytorch_model\.bin"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        materialise(build_meta(configs()["qwen2"]), tmp_path, "cpu")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_hub_id_offline_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"the hub did not give it.*tiny-digits"):
        resolve("nobody/no-such-model")


@pytest.mark.parametrize("name", ["tiny-digits", "tiny-moe"])
def test_tiny_models_are_the_same_everywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for cache in ("a", "b"):
        monkeypatch.setenv("SPMD_RL_CACHE", str(tmp_path / cache))
        folders.append(resolve(name))
    first, second = (load_file(f / "model.safetensors") for f in folders)
    assert all(torch.equal(first[k], second[k]) for k in first | second)
    tokenizer = load_tokenizer(ModelConfig(path=name))
    text = "What is 12 + 3 * (4 - 5)?\nIt is <b>9</b>; 'user' & co.,\tno~"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(chat).input_ids) == 12
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert AutoTokenizer.from_pretrained(folders[0])(chat).input_ids == tokenizer(chat).input_ids
    assert AutoModelForCausalLM.from_pretrained(folders[0]).config.vocab_size == len(tokenizer) == 104


def _resolve_worker(rank: int, folder: Path) -> bool:
    os.environ["SPMD_RL_CACHE"] = str(folder / "cache")
    return (resolve("tiny-digits") / "model.safetensors").is_file()


def test_several_ranks_make_a_model_once(tmp_path: Path) -> None:
    assert run_ranks(_resolve_worker, 3, tmp_path) == [True, True, True]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [".tiny-digits.lock", "tiny-digits"]


def test_a_chat_template_may_be_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("from a file")
    assert load_tokenizer(ModelConfig(path="tiny-digits", chat_template=str(file))).chat_template == "from a file"
    assert load_tokenizer(ModelConfig(path="tiny-digits", chat_template="{{ x }}")).chat_template == "{{ x }}"
