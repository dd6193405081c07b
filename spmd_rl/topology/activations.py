"""Bytes that activations and logits take, as transformers' modules compute them with a flash-like attention.

Legend: e = bytes of a number in the compute type. Figures are per token unless said otherwise; what a norm widens to
float32 counts 4 bytes whatever e is.
"""

from spmd_rl.topology.shape import ModelShape


def layer_saved(shape: ModelShape, e: int) -> int:
    """What one layer keeps for its backward, without checkpointing (the largest layer)."""
    h, kv = shape.hidden, shape.kv_width + shape.value_width
    norms = 2 * _norm(h, e)
    qk_norm = _norm(shape.q_width + shape.kv_width, e) - e * (shape.q_width + shape.kv_width) if shape.qk_norm else 0
    latent = _norm(shape.q_lora + shape.kv_lora, e) if shape.kv_lora else 0
    attention = e * (shape.q_width + kv + shape.out_width) + 4 * shape.heads
    return norms + qk_norm + latent + attention + _mlp_saved(shape, e)


def _norm(width: int, e: int) -> int:
    """RMSNorm: its float32 input, the normalised value, and the product with the weight that the next matrix keeps."""
    return 4 * width + 2 * e * width + 4


def _mlp_saved(shape: ModelShape, e: int) -> int:
    """Gate, up, silu(gate), their product; of experts: for each chosen one, with its gathered input and output."""
    if not shape.moe_layers:
        return 4 * e * shape.intermediate
    routed = shape.experts_per_token * (4 * shape.moe_intermediate + 2 * shape.hidden)
    return e * (routed + 4 * shape.shared_intermediate) + 12 * shape.experts


def layer_working(shape: ModelShape, e: int) -> int:
    """Short-lived buffers of one layer's backward beyond what it kept: gradients of the MLP's and the norm's inputs."""
    return e * (2 * shape.hidden + 2 * _mlp_width(shape))


def layer_forward(shape: ModelShape, e: int) -> int:
    """The most that lives at one time in one layer without gradient."""
    h = shape.hidden
    mlp = e * (2 * h + 3 * _mlp_width(shape))
    norm = e * h + 12 * h
    attention = e * (2 * h + 2 * shape.q_width + 2 * shape.kv_width + shape.value_width + shape.out_width)
    return max(mlp, norm, attention)


def _mlp_width(shape: ModelShape) -> int:
    if not shape.moe_layers:
        return shape.intermediate
    return shape.experts_per_token * shape.moe_intermediate + shape.shared_intermediate


def layer_input(shape: ModelShape, e: int) -> int:
    """What a checkpointed layer keeps: the residual stream at its start."""
    return e * shape.hidden


def last_norm(shape: ModelShape, e: int) -> int:
    """The final norm's saved tensors and the hidden states that the head reads."""
    return _norm(shape.hidden, e) + e * shape.hidden


def head_forward(shape: ModelShape, chunk: int, e: int, entropy: bool, fused: bool) -> int:
    """Bytes (not per token) of the logits of a chunk of tokens, while the chunk before is let go.

    `fused`: the CUDA kernels read logits in the compute type. Else they are widened to float32, beside the temporaries
    of the logsumexp or of the entropy.
    """
    return chunk * shape.vocab * (2 * e if fused else 12 if entropy else 8)


def head_backward(shape: ModelShape, chunk: int, e: int, fused: bool) -> int:
    """Bytes of a chunk's logits and their gradient beside the head's gradient, summed in float32, then cast."""
    working = chunk * shape.vocab * (2 * e if fused else 8 + (e if e < 4 else 0))
    casting = chunk * shape.vocab * e + (e * shape.head_params if e < 4 else 0)
    return 4 * shape.head_params + max(working, casting)
