"""Our layer spec: megatron-core's layer with a core attention, norms and experts that need nothing compiled.

Its local spec holds a matrix of scores, has norms that know nothing of sequence parallelism, and cannot do packed rows
or context parallelism, on a GPU neither.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd_rl.engines.megatron.attention import CoreAttention
from spmd_rl.engines.megatron.experts import Experts
from spmd_rl.engines.megatron.stream import Stream
from spmd_rl.runtime.mcore import (
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
)


class RMSNorm(nn.Module):
    """Root mean square norm in float32. Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        where = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size, **where)), eps
        # each tp rank sees a part of the tokens, so megatron-core must sum the weight's gradient over them
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(TransformerLayer):
    """megatron-core's layer, computed again in the backward when `recompute` is set."""

    recompute = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """(hidden states, context) as megatron-core's; attention needs `packed_seq_params`, a `Stream`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self._compute(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_moe_layer:
            stream: Stream = kwargs["packed_seq_params"]
            self.mlp.router.router_replay.replay = stream.routes.get(self.layer_number - 1)
        return super().forward(*args, **kwargs)


def block_spec(config: TransformerConfig, moe: list[bool], windows: list[int | None]) -> TransformerBlockSubmodules:
    """The spec of a chunk's layers; `moe`: which of them have experts, `windows`: of all layers of the model."""
    return TransformerBlockSubmodules([_layer(config, is_moe, windows) for is_moe in moe], layer_norm=RMSNorm)


def _layer(config: TransformerConfig, is_moe: bool, windows: list[int | None]) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=partial(CoreAttention, windows=windows),
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    dense = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    experts = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=ModuleSpec(Experts)))
    return ModuleSpec(
        Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=experts if is_moe else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )
