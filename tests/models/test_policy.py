"""The policy beyond plain dense models: experts, recomputation, adapters, sharding; and its FLOPs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from spmd_rl.config import ConfigError
from spmd_rl.config.run import LoraConfig
from spmd_rl.models.flops import forward_flops, peak_flops, train_flops
from spmd_rl.models.loading import allocate, build_meta, materialise, save_folder
from spmd_rl.models.lora import add_adapters
from spmd_rl.models.names import destinations, export_tensors
from spmd_rl.models.packing import Packing, response_positions
from spmd_rl.models.policy import Policy, decoder_layers, huggingface_name
from tests.models.ranks import run_ranks

PROMPTS, RESPONSES = [3, 1], [5, 4]
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def llama() -> LlamaConfig:
    return LlamaConfig(**SIZES, tie_word_embeddings=True)


def moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def run(policy: nn.Module) -> Tensor:
    """Log-probs [R] of the responses; their squares are summed and back-propagated."""
    ids_T = torch.cat(rows())
    packing = Packing.pack([len(r) for r in rows()])
    positions_R = response_positions(PROMPTS, RESPONSES)
    out = policy(ids_T, packing.position_ids(), packing, positions_R, ids_T[positions_R + 1], 0.8)["log_probs"]
    out.square().sum().backward()
    return out.detach()


def plain(model: nn.Module) -> Tensor:
    picked = []
    for ids, p in zip(rows(), PROMPTS, strict=True):
        logp = (model(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
        picked.append(logp[p - 1 : -1].gather(-1, ids[p:, None])[:, 0])
    return torch.cat(picked).detach()


def filled(config: PretrainedConfig, dtype: torch.dtype = torch.float64, lora: LoraConfig | None = None) -> Policy:
    model = build_meta(config, dtype)
    policy = Policy(add_adapters(model, lora) if lora else model)
    materialise(policy, None, "cpu", seed=1)
    return policy


def exported(policy: nn.Module, folder: Path, config: PretrainedConfig) -> nn.Module:
    whole = export_tensors(policy, lambda x: x.full_tensor() if isinstance(x, DTensor) else x)
    save_folder(folder, config, whole, dtype=None)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def test_experts_equal_plain_transformers(tmp_path: Path) -> None:
    policy = filled(moe(), torch.float32)  # the grouped product has no float64
    again = exported(policy, tmp_path / "x", moe()).float()
    assert torch.allclose(run(policy), plain(again), atol=1e-5)


def test_recomputation_changes_nothing() -> None:
    outs = []
    for recompute in (False, True):
        policy = filled(llama()).train()
        if recompute:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        outs.append([run(policy), *(p.grad for p in policy.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_no_positions_still_reach_every_parameter() -> None:
    policy = filled(llama())
    none = torch.empty(0, dtype=torch.int64)
    packing = Packing.pack([1])
    out = policy(torch.zeros(1, dtype=torch.int64), packing.position_ids(), packing, none, none)["log_probs"]
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_adapters_alone_train_and_leave_merged(tmp_path: Path) -> None:
    config = llama()
    policy = filled(config, lora=LoraConfig(rank=4, alpha=8))
    base = filled(config)
    assert torch.equal(run(policy), run(base))  # B starts at zero
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in policy.named_parameters() if p.grad is not None}
    assert len(trained) == 2 * 7 * 2
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_B." in name:
                p.normal_(0, 0.1)
    after = run(policy)
    assert not torch.allclose(after, run(base), atol=1e-2)
    assert torch.allclose(after, plain(exported(policy, tmp_path / "x", config)), atol=1e-5)
    with pytest.raises(ConfigError, match="target_modules"):
        add_adapters(build_meta(config), LoraConfig(rank=4, target_modules=["nowhere"]))


def test_adapters_beside_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['all-linear'\] takes in the experts"):
        add_adapters(build_meta(moe()), LoraConfig(rank=4))
    attention = LoraConfig(rank=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    policy = filled(moe(), torch.float32, lora=attention)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_B." in name:
                p.normal_(0, 0.1)
    out = run(policy)
    assert not torch.allclose(out, run(filled(moe(), torch.float32)), atol=1e-2)
    assert torch.allclose(out, plain(exported(policy, tmp_path / "x", moe()).float()), atol=1e-5)


@pytest.mark.parametrize("config", [llama(), moe()])
def test_a_synced_copy_is_equal(config: PretrainedConfig) -> None:
    policy = filled(config, torch.float32)
    copy = build_meta(config, attention="sdpa")
    allocate(copy, "cpu")
    places = destinations(copy)
    for name, tensor in export_tensors(policy, lambda x: x):
        places.pop(name).copy_(tensor)
    assert not places
    expected = dict(policy.model.named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in copy.named_parameters())


def _fsdp_worker(rank: int, folder: Path) -> dict[str, tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    results = {}
    for name, lora in (("full", None), ("lora", LoraConfig(rank=3))):
        model = build_meta(llama(), torch.float64)
        policy = Policy(add_adapters(model, lora) if lora else model)
        for layer in decoder_layers(policy):
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh, reshard_after_forward=False)
        materialise(policy, None, "cpu", seed=1)
        out = run(policy)
        grads = {huggingface_name(n): p.grad.full_tensor() for n, p in policy.named_parameters() if p.grad is not None}
        results[name] = (out, grads, dict(export_tensors(policy, lambda x: x.full_tensor())))
    return results


def test_sharded_equals_plain_with_and_without_adapters(tmp_path: Path) -> None:
    ranks = run_ranks(_fsdp_worker, 2, tmp_path)
    for name, lora in (("full", None), ("lora", LoraConfig(rank=3))):
        policy = filled(llama(), lora=lora)
        out = run(policy)
        grads = {huggingface_name(n): p.grad for n, p in policy.named_parameters() if p.grad is not None}
        for got, got_grads, got_exports in (results[name] for results in ranks):
            assert torch.allclose(out, got, atol=1e-9)
            assert grads.keys() == got_grads.keys()
            assert all(torch.allclose(g, got_grads[n], atol=1e-9) for n, g in grads.items())
            for key, tensor in export_tensors(policy, lambda x: x):
                assert torch.allclose(tensor, got_exports[key], atol=1e-9)


def test_models_computed_otherwise_are_refused() -> None:
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        Policy(build_meta(Gemma2Config(**SIZES, head_dim=8)))
    with pytest.raises(ValueError, match="build the model with attention"):
        Policy(build_meta(llama(), attention="sdpa"))


def test_flops_of_one_matrix_product_each() -> None:
    config = llama()
    assert forward_flops(config, [], 3) == 2 * 3 * 32 * 61
    weights = 2 * (32 * 8 * (4 + 4 + 2 + 2) + 3 * 32 * 48)
    assert forward_flops(config, [2, 1], 0) == 2 * weights * 3 + 2 * 4 * 32 * (3 + 1)
    assert train_flops(config, [5], 5) == 3 * forward_flops(config, [5], 5)
    assert forward_flops(moe(), [1], 0) < forward_flops(config, [1], 0) + 2 * 2 * 4 * 32
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("abacus") is None
