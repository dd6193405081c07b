"""Floating-point operations of a forward, for MFU. A multiply and an add are two; recomputation does not count.

Counted: every matrix product of the layers, causal attention (half of the square), the head where it ran.
"""

from collections.abc import Sequence

from transformers import PretrainedConfig

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s by a part of the device's name (vendor data sheets)."""


def forward_flops(hf_config: PretrainedConfig, lengths: Sequence[int], head_positions: int) -> float:
    """FLOPs of one forward over rows of these lengths (tokens) with log-probs at `head_positions` tokens."""
    tokens, pairs = sum(lengths), sum(n * (n + 1) / 2 for n in lengths)
    hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hidden // heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layers = hf_config.num_hidden_layers
    weights = layers * projections + sum(_mlp_weights(hf_config, i) for i in range(layers))
    attention = layers * 4 * heads * head_dim * pairs
    return 2 * weights * tokens + attention + 2 * hidden * hf_config.vocab_size * head_positions


def train_flops(hf_config: PretrainedConfig, lengths: Sequence[int], head_positions: int) -> float:
    """FLOPs of a forward and backward: the backward has two products for each of the forward's."""
    return 3 * forward_flops(hf_config, lengths, head_positions)


def _mlp_weights(hf_config: PretrainedConfig, layer: int) -> int:
    """Weights that one token meets in a layer's gated MLP: of experts, those it is sent to and the router."""
    hidden = hf_config.hidden_size
    experts = getattr(hf_config, "num_experts", None) or getattr(hf_config, "num_local_experts", None)
    step = getattr(hf_config, "decoder_sparse_step", 1)
    if not experts or layer in (getattr(hf_config, "mlp_only_layers", None) or ()) or (layer + 1) % step:
        return 3 * hidden * hf_config.intermediate_size
    width = getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size
    shared = getattr(hf_config, "shared_expert_intermediate_size", None) or 0
    return 3 * hidden * (width * hf_config.num_experts_per_tok + shared) + hidden * experts


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by `torch.cuda.get_device_name()`; None when it is not in the table."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)
