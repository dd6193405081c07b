"""Hugging Face tensors and the parameters of a Megatron rank: which box of which tensor lies where. Pure, no weights.

A local parameter is cut into pieces; each piece is a box (starts and sizes) of one tensor of the checkpoint. The same
table serves reading, export, weight sync and checkpoints, whatever the layout.

Families: Llama, Qwen2/2.5, Qwen3, Mistral, Qwen3-MoE. Legend: H hidden size, D head size, G key-value heads (a group is
the query heads that share one), E experts, I width of an MLP or expert.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from transformers import PretrainedConfig

from spmd_rl.config import ConfigError
from spmd_rl.models.attention import check_attention

EMBEDDING, HEAD, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
VALUE_HEAD = "value_head.weight"
EXPERTS = ("mlp.experts.weight1", "mlp.experts.weight2")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_QKV = "self_attention.linear_qkv."
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Parameters of a layer that every rank of its stage holds whole."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def check_model(hf_config: PretrainedConfig) -> None:
    """Raise ConfigError when the Megatron engine cannot hold this model; names the field that forbids it."""
    kind = hf_config.model_type
    if kind not in FAMILIES:
        raise ConfigError(f"engine=megatron knows {', '.join(FAMILIES)}, not {kind!r}; use engine=fsdp")
    check_attention(hf_config)
    forbidden = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "shared_expert_intermediate_size": 0}
    for name, wanted in forbidden.items():
        found = getattr(hf_config, name, None)
        if found and found != wanted:
            raise ConfigError(f"engine=megatron: {name}={found} of a {kind} model is not supported; use engine=fsdp")


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint's tensor, and where it lies in a local parameter: `parameter[place]` has its sizes."""

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape."""
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int | slice, ...]

    @property
    def region(self) -> list[slice]:
        """The box as slices of the whole tensor."""
        return [slice(a, a + n) for a, n in zip(self.starts, self.sizes, strict=True)]


@dataclass(frozen=True)
class Cut:
    """A rank's place on the axes that cut parameters, and their sizes."""

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class Parameter:
    """One parameter of some pipeline stage, as every rank knows of it."""

    chunk: int
    """The virtual stage's model chunk on its rank."""
    name: str
    """Its name in that chunk."""
    layer: int | None
    """The layer of the whole model that it belongs to."""

    @property
    def is_expert(self) -> bool:
        """Whether it is cut over (ep, etp) instead of tp."""
        return self.name.endswith(EXPERTS)

    @property
    def is_whole(self) -> bool:
        """Whether every tp rank holds all of it."""
        match = _LAYER.match(self.name)
        return self.name in (NORM, VALUE_HEAD) or (match is not None and match[2] in _WHOLE)


class MegatronNames:
    """The parameters of a model of `hf_config` in `pp` stages of `vpp` chunks; with `value_head`, of a critic."""

    def __init__(self, hf_config: PretrainedConfig, pp: int = 1, vpp: int = 1, value_head: bool = False) -> None:
        self.config, self.pp, self.vpp, self.value_head = hf_config, pp, vpp, value_head
        self.head_dim: int = (
            getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        )
        self.kv_heads: int = hf_config.num_key_value_heads
        self.experts: int = getattr(hf_config, "num_experts", None) or 0
        self.qkv_bias = hf_config.model_type == "qwen2"
        self.qk_norm = hf_config.model_type in ("qwen3", "qwen3_moe")
        self.tied = bool(hf_config.tie_word_embeddings) and not value_head

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's MLP is made of experts."""
        step = getattr(self.config, "decoder_sparse_step", 1)
        dense = getattr(self.config, "mlp_only_layers", None) or ()
        return bool(self.experts) and layer not in dense and (layer + 1) % step == 0

    def layers_of(self, stage: int, chunk: int) -> range:
        """Layers of one chunk: chunk v of stage p holds the part v·pp + p of all."""
        each = self.config.num_hidden_layers // (self.pp * self.vpp)
        first = (chunk * self.pp + stage) * each
        return range(first, first + each)

    def parameters(self, stage: int) -> Iterator[Parameter]:
        """All parameters of a stage, in the order in which every rank walks over them. The copy of a tied embedding
        on the last stage is one of them."""
        for chunk in range(self.vpp):
            if stage == 0 and chunk == 0:
                yield Parameter(chunk, EMBEDDING, None)
            for at, layer in enumerate(self.layers_of(stage, chunk)):
                for name in self._of_layer(layer):
                    yield Parameter(chunk, f"decoder.layers.{at}.{name}", layer)
            if stage == self.pp - 1 and chunk == self.vpp - 1:
                yield Parameter(chunk, NORM, None)
                if self.value_head:
                    yield Parameter(chunk, VALUE_HEAD, None)
                elif not self.tied or self.pp > 1:
                    yield Parameter(chunk, HEAD, None)

    def is_copy(self, parameter: Parameter) -> bool:
        """Whether the parameter repeats the embedding of the first stage."""
        return self.tied and parameter.name == HEAD

    @cached_property
    def checkpoint_names(self) -> set[str]:
        """Every tensor of the checkpoint."""
        one = MegatronNames(self.config, value_head=self.value_head)
        return {piece.name for p in one.parameters(0) for piece in one.pieces(p, Cut())}

    def pieces(self, parameter: Parameter, cut: Cut) -> list[Piece]:
        """What a rank at `cut` holds of the parameter. The pieces do not overlap and cover it."""
        c = self.config
        if parameter.name in (EMBEDDING, HEAD):
            tied = parameter.name == EMBEDDING or self.tied
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            return [_rows(name, (c.vocab_size, c.hidden_size), cut.tp, cut.tp_size)]
        if parameter.name == NORM:
            return [_rows("model.norm.weight", (c.hidden_size,))]
        if parameter.name == VALUE_HEAD:
            return [_rows("score.weight", (1, c.hidden_size))]
        match = _LAYER.match(parameter.name)
        assert match is not None, f"{parameter.name} is no parameter of a Megatron model"
        return self._pieces_of_layer(f"model.layers.{parameter.layer}.", match[2], cut)

    def _of_layer(self, layer: int) -> Iterator[str]:
        yield "input_layernorm.weight"
        yield "self_attention.linear_proj.weight"
        yield f"{_QKV}weight"
        if self.qkv_bias:
            yield f"{_QKV}bias"
        if self.qk_norm:
            yield from ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
        yield "pre_mlp_layernorm.weight"
        yield from (
            ("mlp.router.weight", *EXPERTS)
            if self.is_moe(layer)
            else ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
        )

    def _pieces_of_layer(self, prefix: str, name: str, cut: Cut) -> list[Piece]:
        c = self.config
        if name in _WHOLE:
            shape: tuple[int, ...] = (self.head_dim,) if "self_attention" in name else (c.hidden_size,)
            if name == "mlp.router.weight":
                shape = (self.experts, c.hidden_size)
            return [_rows(prefix + _WHOLE[name], shape)]
        if name.startswith(_QKV):
            return self._qkv(f"{prefix}self_attn.", name.removeprefix(_QKV), cut)
        if name == "self_attention.linear_proj.weight":
            width = c.num_attention_heads * self.head_dim
            return [_columns(f"{prefix}self_attn.o_proj.weight", (c.hidden_size, width), cut.tp, cut.tp_size)]
        if name == "mlp.linear_fc1.weight":
            return _gate_up(f"{prefix}mlp.", (c.intermediate_size, c.hidden_size), cut.tp, cut.tp_size)
        if name == "mlp.linear_fc2.weight":
            return [
                _columns(f"{prefix}mlp.down_proj.weight", (c.hidden_size, c.intermediate_size), cut.tp, cut.tp_size)
            ]
        assert name in EXPERTS, f"{name} is no parameter of a layer"
        return self._experts(f"{prefix}mlp.experts.", name, cut)

    def _qkv(self, prefix: str, kind: str, cut: Cut) -> list[Piece]:
        """Rows of linear_qkv: for each group its query heads, its key head, its value head."""
        queries = self.config.num_attention_heads // self.kv_heads
        heads = {"q": queries, "k": 1, "v": 1}
        tail = (self.config.hidden_size,) if kind == "weight" else ()
        groups = self.kv_heads // cut.tp_size
        pieces, row = [], 0
        for group in range(cut.tp * groups, (cut.tp + 1) * groups):
            for which, count in heads.items():
                size = count * self.head_dim
                pieces.append(
                    Piece(
                        f"{prefix}{which}_proj.{kind}",
                        (self.kv_heads * size, *tail),
                        (group * size, *(0 for _ in tail)),
                        (size, *tail),
                        (slice(row, row + size),),
                    )
                )
                row += size
        return pieces

    def _experts(self, prefix: str, name: str, cut: Cut) -> list[Piece]:
        """weight1 [E/ep, 2I/etp, H] is gate over up of each expert, weight2 [E/ep, H, I/etp] is down."""
        c, local = self.config, self.experts // cut.ep_size
        pieces = []
        for at in range(local):
            expert = f"{prefix}{cut.ep * local + at}."
            if name == EXPERTS[0]:
                found = _gate_up(expert, (c.moe_intermediate_size, c.hidden_size), cut.etp, cut.etp_size)
            else:
                shape = (c.hidden_size, c.moe_intermediate_size)
                found = [_columns(f"{expert}down_proj.weight", shape, cut.etp, cut.etp_size)]
            pieces += [Piece(p.name, p.shape, p.starts, p.sizes, (at, *p.place)) for p in found]
        return pieces


def rectangles(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements [low, high) of a row-major vector or matrix into boxes: (low, high, starts, sizes) of each.

    Of a matrix: the end of a row, whole rows, the start of a row, as far as they are there.
    """
    if high <= low:
        return
    if len(shape) == 1:
        yield low, high, (low,), (high - low,)
        return
    columns = shape[1]
    row, column = divmod(low, columns)
    if column or high - low < columns:
        end = min(high, (row + 1) * columns)
        yield low, end, (row, column), (1, end - low)
        yield from rectangles(shape, end, high)
        return
    rows = (high - low) // columns
    end = low + rows * columns
    yield low, end, (row, 0), (rows, columns)
    yield from rectangles(shape, end, high)


def fused_source(piece: Piece, experts: int) -> tuple[str, tuple[int, ...], list[slice]]:
    """(name, shape, region) of the piece in transformers' own modules, which hold a layer's experts in one tensor."""
    match = re.match(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", piece.name)
    if match is None:
        return piece.name, piece.shape, piece.region
    expert, (rows, columns) = int(match[2]), piece.region
    if match[3] == "down":
        return f"{match[1]}.down_proj", (experts, *piece.shape), [slice(expert, expert + 1), rows, columns]
    width = piece.shape[0]
    offset = width if match[3] == "up" else 0
    rows = slice(rows.start + offset, rows.stop + offset)
    shape = (experts, 2 * width, piece.shape[1])
    return f"{match[1]}.gate_up_proj", shape, [slice(expert, expert + 1), rows, columns]


def _rows(name: str, shape: tuple[int, ...], rank: int = 0, parts: int = 1) -> Piece:
    """Part `rank` of `parts` along the rows (or the whole)."""
    size = shape[0] // parts
    return Piece(name, shape, (rank * size, *(0 for _ in shape[1:])), (size, *shape[1:]), (slice(0, size),))


def _columns(name: str, shape: tuple[int, int], rank: int, parts: int) -> Piece:
    size = shape[1] // parts
    return Piece(name, shape, (0, rank * size), (shape[0], size), (slice(0, shape[0]),))


def _gate_up(prefix: str, shape: tuple[int, int], rank: int, parts: int) -> list[Piece]:
    """This rank's rows of the gate over this rank's rows of the up projection."""
    size = shape[0] // parts
    return [
        Piece(
            f"{prefix}{which}_proj.weight",
            shape,
            (rank * size, 0),
            (size, shape[1]),
            (slice(at * size, (at + 1) * size),),
        )
        for at, which in enumerate(("gate", "up"))
    ]
