"""From a Hugging Face config and a role's layout to megatron-core's configs."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from spmd_rl.config.roles import EngineConfig
from spmd_rl.models.megatron_names import MegatronNames
from spmd_rl.runtime.mcore import DistributedDataParallelConfig, TransformerConfig
from spmd_rl.topology.layout import RoleLayout


def windows_of(hf_config: PretrainedConfig) -> list[int | None]:
    """Each layer's sliding window in tokens, None where there is none."""
    layers, window = hf_config.num_hidden_layers, getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def transformer_config(
    hf_config: PretrainedConfig, layout: RoleLayout, engine: EngineConfig, dtype: torch.dtype, **more: Any
) -> TransformerConfig:
    """megatron-core's config of the model on the layout; `more` overrides its fields."""
    assert layout.expert is not None, f"role {layout.role} has a Megatron layout"
    names, m = MegatronNames(hf_config), engine.megatron
    tp, pp, cp = (layout.mesh.axis_size(axis) for axis in ("tp", "pp", "cp"))
    vpp = m.vpp if m.vpp > 1 else None
    fields: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": names.kv_heads,
        "kv_channels": names.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": names.qkv_bias,
        "qk_layernorm": names.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": layout.expert.axis_size("ep"),
        "expert_tensor_parallel_size": layout.expert.axis_size("etp"),
        "sequence_parallel": m.sequence_parallel and tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "transformer_impl": "local",
        "calculate_per_token_loss": True,  # the one mode in which nothing divides a loss: see `schedule`
        # Fused kernels of Apex and Transformer Engine are for others to switch on.
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",  # the one for micro-batches of any length, which dense models ask for
        **_pipeline_fields(pp, vpp),
    }
    if names.experts:
        fields |= _expert_fields(hf_config)
    return TransformerConfig(**{**fields, **more})


def _pipeline_fields(pp: int, vpp: int | None) -> dict[str, Any]:
    """Micro-batches differ in length. The interleaved schedule is silently wrong with its messages in batches, and on
    gloo with outputs that are let go while they are still being sent."""
    if pp == 1:
        return {}
    fields: dict[str, Any] = {"variable_seq_lengths": True}
    if vpp is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields | {"deallocate_pipeline_outputs": vpp is None and torch.cuda.is_available()}


def _expert_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": False,
        "moe_grouped_gemm": False,
    }


def ddp_config(engine: EngineConfig) -> DistributedDataParallelConfig:
    """Gradients are summed in float32; over dp·cp each rank keeps its share (ZeRO-1), or all of them."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=engine.megatron.distributed_optimizer,
        overlap_grad_reduce=False,
    )
