"""One rank's part of a model: the chunks of its pipeline stage, each a GPTModel under our layer spec.

megatron-core builds the decoder and the embedding; the last stage's norm and head are hung on here, because its head
makes logits of every token and always is a vocabulary's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spmd_rl.config.roles import EngineConfig
from spmd_rl.engines.megatron.experts import Routing
from spmd_rl.engines.megatron.settings import transformer_config, windows_of
from spmd_rl.engines.megatron.spec import Layer, RMSNorm, block_spec
from spmd_rl.engines.megatron.stream import Stream
from spmd_rl.models.megatron_names import MegatronNames
from spmd_rl.runtime.mcore import GPTModel, ProcessGroupCollection
from spmd_rl.topology.layout import RoleLayout


class _Weight(nn.Module):
    """A parameter by the name `weight`."""

    def __init__(self, *shape: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, **where))


class Model:
    """The rank's chunks, bare (without gradient buffers), and what goes around them."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        layout: RoleLayout,
        engine: EngineConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        dtype: torch.dtype,
        value_head: bool,
        recompute: bool,
        replays: bool = False,
    ) -> None:
        """Allocates the parameters, uninitialised. `replays`: the batches say which experts to choose."""
        self.stage, self.stages = groups.pp.rank(), groups.pp.size()
        vpp = engine.megatron.vpp
        self.names = MegatronNames(hf_config, self.stages, vpp, value_head)
        self.config = transformer_config(hf_config, layout, engine, dtype)
        self.groups, self.device, self.replays = groups, device, replays
        self.moe_layers = [layer for layer in range(hf_config.num_hidden_layers) if self.names.is_moe(layer)]
        windows = windows_of(hf_config)
        self.chunks = [self._chunk(hf_config, v, windows).to(device) for v in range(vpp)]
        for layer in self.layers:
            layer.recompute = recompute
            if layer.is_moe_layer:
                layer.mlp.router.router_replay = Routing(self.names.experts, device)
        self.rotary: Any = LlamaRotaryEmbedding(hf_config).to(device)  # type: ignore[arg-type]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def layers(self) -> list[Layer]:
        """The layers of this rank, chunk by chunk."""
        return [layer for chunk in self.chunks for layer in chunk.decoder.layers]

    def routings(self) -> dict[int, Routing]:
        """The routing of each MoE layer of this rank."""
        return {x.layer_number - 1: x.mlp.router.router_replay for x in self.layers if x.is_moe_layer}

    def _chunk(self, hf_config: PretrainedConfig, chunk: int, windows: list[int | None]) -> GPTModel:
        first = self.is_first and chunk == 0
        last = self.is_last and chunk == self.names.vpp - 1
        moe = [self.names.is_moe(layer) for layer in self.names.layers_of(self.stage, chunk)]
        model = GPTModel(
            self.config,
            block_spec(self.config, moe, windows),
            vocab_size=hf_config.vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=first,
            post_process=False,
            position_embedding_type="none",
            pg_collection=self.groups,
            vp_stage=chunk if self.names.vpp > 1 else None,
        )
        if last:
            self._hang_on_end(model, hf_config)
        if first and hf_config.pad_token_id is not None:
            model.embedding.word_embeddings.register_forward_hook(partial(_keep_padding, hf_config.pad_token_id))
        if first and self.names.tied and self.stages > 1:
            model.embedding.word_embeddings.weight.shared_embedding = True
        return model

    def _hang_on_end(self, model: GPTModel, hf_config: PretrainedConfig) -> None:
        """The last norm, and a head: value_head [1, H], or output_layer [V/tp, H] unless the embedding serves."""
        where = {"device": self.device, "dtype": self.config.params_dtype}
        model.decoder.final_layernorm = RMSNorm(self.config, hf_config.hidden_size, hf_config.rms_norm_eps)
        if self.names.value_head:
            model.value_head = _Weight(1, hf_config.hidden_size, **where)
        elif not self.names.tied or self.stages > 1:
            width = hf_config.vocab_size // self.groups.tp.size()
            model.output_layer = _Weight(width, hf_config.hidden_size, **where)
            # megatron-core gives both copies of a tied embedding a bucket of their own, so that dp cuts them alike
            model.output_layer.weight.shared_embedding = self.names.tied

    def head_weight(self) -> Any:
        """The last stage's head."""
        last = self.chunks[-1]
        if self.names.value_head:
            return last.value_head.weight
        return last.embedding.word_embeddings.weight if not hasattr(last, "output_layer") else last.output_layer.weight

    def rotate(self, stream: Stream) -> None:
        """Put the rotary cosines and sines of the stream's local tokens into it."""
        positions = stream.position_ids()[None].to(self.device)
        like = torch.empty(0, dtype=self.config.params_dtype, device=self.device)
        stream.cos, stream.sin = self.rotary(like, positions)


def _keep_padding(pad: int, embedding: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """As in transformers, whose embeddings have a `padding_idx`: the padding token as an input is not learned from.

    A policy may sample it, so this is not about padding alone.
    """
    is_pad = inputs[0] == pad  # [1, S]; the output is [1, S, H], with sequence parallelism [S/tp, 1, H]
    if embedding.reduce_scatter_embeddings:
        group = embedding.tp_group
        is_pad = is_pad.T.chunk(group.size())[group.rank()]
    return torch.where(is_pad[..., None], output.detach(), output)
