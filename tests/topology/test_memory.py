"""Parameter counts against transformers, activation bytes against autograd, and what moves the estimate."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from spmd_rl.config import ConfigError
from spmd_rl.topology import activations as act
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.memory import PhaseMemory
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.shape import ModelShape, load_shape, shipped
from tests.topology.configured import configured

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 517,
    "intermediate_size": 160,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, **MOE, head_dim=16),
    "qwen3-moe-some": Qwen3MoeConfig(**SMALL, **MOE, head_dim=16, mlp_only_layers=[1]),
    "deepseek-v3": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 6}, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=48, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_group=1, topk_group=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
    shape = ModelShape.from_hf(MODELS[name].to_dict(), name)
    bias = [b for name, b in model.named_buffers() if "correction_bias" in name]  # a buffer there, a weight on disk
    assert shape.params == sum(p.numel() for p in [*model.parameters(), *bias])


PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_shapes_have_their_published_parameters(name: str) -> None:
    shape = load_shape(name)
    assert shape is not None
    assert shape.params == PUBLISHED[name]


def test_shapes_are_found_by_hub_id_folder_and_name(tmp_path: Any) -> None:
    for name in shipped():
        assert load_shape(name) is not None
    assert load_shape("Qwen/Qwen2.5-7B-Instruct") == load_shape("qwen2.5-7b")
    MODELS["qwen3"].save_pretrained(tmp_path)
    found = load_shape(str(tmp_path))
    assert found is not None
    assert found.layers == 3
    assert load_shape("somewhere/unheard-of") is None
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match=r"config\.json has no num_hidden_layers, hidden_size"):
        load_shape(str(tmp_path))


def saved_bytes(layer: torch.nn.Module, *args: Any, position_embeddings: Any, **kwargs: Any) -> int:
    """Bytes that autograd keeps for the layer's backward, each storage once, but for parameters and rotary tables."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in [*layer.parameters(), *position_embeddings]}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own and x.numel() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = layer(*args, position_embeddings=position_embeddings, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        del out
    return sum(kept.values())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layers_saved_activations_are_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    tokens = 512
    big = {**SMALL, "hidden_size": 192, "intermediate_size": 480, "num_hidden_layers": 1}
    config = LlamaConfig(**big, head_dim=32) if name == "llama" else Qwen3Config(**big, head_dim=32)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).to(dtype).get_decoder()
    x = torch.randn(1, tokens, 192, dtype=dtype, requires_grad=True)
    cos, sin = model.rotary_emb(x, torch.arange(tokens)[None])
    found = saved_bytes(model.layers[0], x, position_embeddings=(cos, sin), attention_mask=None)
    shape = ModelShape.from_hf(config.to_dict(), name)
    assert tokens * act.layer_saved(shape, dtype.itemsize) == pytest.approx(found, rel=0.02)


def update(*overrides: str, ranks: int = 1) -> PhaseMemory:
    plan = Plan.from_config(
        configured("model.shape=qwen3-0.6b", "cluster.gpu=h200", *overrides), Cluster.from_counts([ranks])
    )
    return next(m for m in plan.memory if m.phase == "update")


def test_states_are_sixteen_bytes_a_parameter_over_the_shards() -> None:
    shape = load_shape("qwen3-0.6b")
    assert shape is not None
    for ranks in (1, 2, 8):
        items = update("data.train_batch_size=64", ranks=ranks).items
        assert items["actor: parameters"] == 4 * shape.params // ranks
        assert items["actor: optimizer"] == 8 * shape.params // ranks
    items = update("data.train_batch_size=64", "actor.engine.fsdp.fsdp_size=2", ranks=8).items
    assert items["actor: parameters"] == 4 * shape.params // 2


def test_checkpointing_offload_and_chunks_take_off_what_they_should() -> None:
    plain = update("actor.engine.gradient_checkpointing=false")
    recomputed = update()
    assert plain.items["actor: activations"] > 5 * recomputed.items["actor: activations"]
    host = update("actor.engine.fsdp.offload_policy=true")
    assert "actor: optimizer" not in host.items
    assert host.peak < recomputed.peak - 12 * 0.59e9
    assert update("actor.engine.logprob_chunk_tokens=8192").peak > recomputed.peak + 2e9
    sharded = update("actor.engine.fsdp.ulysses_size=2", ranks=2)
    assert sharded.items["actor: activations"] < 0.6 * recomputed.items["actor: activations"]


def test_roles_that_wait_are_held_unless_they_are_offloaded() -> None:
    config = ["model.shape=qwen3-0.6b", "actor.use_kl_loss=true"]
    held = Plan.from_config(configured(*config), Cluster.from_counts([2]))
    moved = Plan.from_config(
        configured(*config, "actor.engine.offload_params=true", "actor.engine.offload_optimizer=true"),
        Cluster.from_counts([2]),
    )
    peaks = [{m.phase: m.peak for m in plan.memory} for plan in (held, moved)]
    assert peaks[0]["generate"] - peaks[1]["generate"] == 12 * 596_049_920 // 2
    assert peaks[0]["update"] == peaks[1]["update"]


def test_megatron_cuts_by_tp_pp_and_ep_and_stages_differ() -> None:
    base = ["model.shape=qwen3-30b-a3b", "engine=megatron", "trainer.device=cpu"]

    def held(*overrides: str) -> list[PhaseMemory]:
        plan = Plan.from_config(configured(*base, *overrides), Cluster.from_counts([8, 8]))
        return [m for m in plan.memory if m.phase == "update"]

    one, eight = held()[0], held("actor.engine.megatron.ep=8")[0]
    shape = load_shape("qwen3-30b-a3b")
    assert shape is not None
    assert one.items["actor: parameters"] == 2 * (shape.params - shape.hidden)
    assert one.items["actor: parameters"] - eight.items["actor: parameters"] == 2 * shape.routed_params * 7 // 8
    stages = held("actor.engine.megatron.pp=4", "actor.engine.megatron.tp=2")
    assert [m.stage for m in stages] == [0, 1, 2, 3]
    assert stages[0].items["actor: activations"] > stages[3].items["actor: activations"]
    assert "actor: logits" not in stages[0].items
    assert stages[3].items["actor: logits"] > 0
