"""Core attention under megatron-core's SelfAttention: rotary positions, packed rows, context parallelism.

megatron-core's own (without Transformer Engine) holds the whole matrix of scores and can do none of these. Keys and
values are gathered over the cp ranks (as in Llama 3's training, arXiv:2407.21783, section 3.3.2), queries stay; the
backward adds up what each rank found for every key.

Shapes: S tokens of this rank, T of the stream, A query heads and G key-value heads of this tp rank, D head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spmd_rl.engines.megatron.stream import Stream
from spmd_rl.models.attention import attend


class CoreAttention(nn.Module):
    """What the layer spec puts between linear_qkv and linear_proj. Has no parameters."""

    def __init__(self, layer_number: int, softmax_scale: float | None = None, windows: Any = (), **_: Any) -> None:
        """`layer_number` counts from 1 over the whole model; `windows` has each layer's sliding window, or None."""
        super().__init__()
        self.scale = softmax_scale
        self.window: int | None = windows[layer_number - 1] if windows else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, packed_seq_params: Stream, **_: Any
    ) -> Tensor:
        """query [S, 1, A, D], key and value [S, 1, G, D] -> [S, 1, A·D]."""
        stream = packed_seq_params
        assert stream.cos is not None, "the first layer's caller computes rotary cosines"
        query, key = apply_rotary_pos_emb(*(x.permute(1, 2, 0, 3) for x in (query, key)), stream.cos, stream.sin)
        q_SAD, k_SGD = (x[0].transpose(0, 1) for x in (query, key))
        v_SGD = value[:, 0]
        if stream.cp_size > 1:
            k_SGD, v_SGD = _GatherStream.apply(torch.stack([k_SGD, v_SGD], 1), stream).unbind(1)
        scale = self.scale if self.scale is not None else q_SAD.shape[-1] ** -0.5
        outs, at = [], 0
        for chunk in stream.chunks:
            queries, keys = slice(at, at + chunk.stop - chunk.start), slice(chunk.keys_start, chunk.stop)
            outs.append(attend(q_SAD[queries], k_SGD[keys], v_SGD[keys], chunk.spans, scale, self.window))
            at = queries.stop
        return torch.cat(outs).flatten(1)[:, None]


class _GatherStream(torch.autograd.Function):
    """[S, ...] of every cp rank -> [T, ...] in the order of the stream; the backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, stream: Stream) -> Tensor:
        ctx.stream = stream
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(stream.cp_size)]
        dist.all_gather(parts, local.contiguous(), group=stream.cp_group)
        return stream.whole(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        stream, whole = ctx.stream, grads[0].contiguous()
        shares = [torch.cat([whole[a:b] for a, b in stream.held(rank)]) for rank in range(stream.cp_size)]
        mine = torch.empty_like(shares[0])
        dist.reduce_scatter_tensor(mine, torch.cat(shares), group=stream.cp_group)
        return mine, None


def gather_columns(local: Tensor, positions_R: Tensor, stream: Stream) -> Tensor:
    """Every cp rank's values at its places of `positions_R` -> [R] on every rank; differentiable.

    The backward hands each rank its own part: all ranks compute the same loss from the joined column.
    """
    return local if stream.cp_size == 1 else _GatherColumns.apply(local, positions_R, stream)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, positions_R: Tensor, stream: Stream) -> Tensor:
        which = [stream.find(positions_R, rank)[0].to(local.device) for rank in range(stream.cp_size)]
        ctx.mine = which[stream.cp_rank]
        widest = local.new_zeros(max(len(w) for w in which))
        widest[: len(local)] = local
        parts = [torch.empty_like(widest) for _ in which]
        if len(widest):
            dist.all_gather(parts, widest, group=stream.cp_group)
        column = local.new_empty(len(positions_R))
        for part, w in zip(parts, which, strict=True):
            column[w] = part[: len(w)]
        return column

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.mine], None, None
