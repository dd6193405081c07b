"""A model's shape from the fields of a Hugging Face config.json: parameter counts and sizes, without weights or torch.

Covers Llama-like dense models (Llama, Mistral, Qwen2, Qwen2.5, Qwen3, SmolLM2), Qwen3-MoE and DeepSeek-V3 (latent
attention). Counts are in parameters, not bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from spmd_rl.config import Config, ConfigError

SHAPES = files("spmd_rl.topology") / "shapes"
QKV_BIAS = ("qwen2", "qwen2_moe")
QK_NORM = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int | None = None
    experts: int = 0
    """Routed experts of a MoE layer; 0 for a dense model."""
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the experts that every token passes."""
    moe_layers: int = 0
    router_bias: bool = False
    q_lora: int = 0
    """Latent attention (DeepSeek-V3): rank of the query's compression; 0 when queries are not compressed."""
    kv_lora: int = 0
    """Rank of the key-value compression; 0 for ordinary attention."""
    rope_dim: int = 0
    """Latent attention: the rotated part of a head, shared by all heads in the key."""
    value_dim: int = 0
    """Latent attention: size of a value head."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "model") -> "ModelShape":
        """Read config.json's fields. Raises ConfigError naming the missing ones."""
        keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        missing = [key for key in keys if not isinstance(config.get(key), int)]
        if missing:
            raise ConfigError(
                f"{name}: config.json has no {', '.join(missing)}; memory can be planned for decoder models only"
            )
        kind, heads, hidden = config.get("model_type", ""), config["num_attention_heads"], config["hidden_size"]
        latent = bool(config.get("kv_lora_rank"))
        head_dim = config.get("head_dim") or hidden // heads
        if latent:
            head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        return cls(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate=config.get("intermediate_size") or 4 * hidden,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", kind in QKV_BIAS)),
            qk_norm=kind in QK_NORM,
            max_positions=config.get("max_position_embeddings"),
            q_lora=config.get("q_lora_rank") or 0,
            kv_lora=config.get("kv_lora_rank") or 0,
            rope_dim=config.get("qk_rope_head_dim") or 0,
            value_dim=config["v_head_dim"] if latent else head_dim,
            **_experts(config),
        )

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads (with latent attention: of the uncompressed ones)."""
        return (self.heads if self.kv_lora else self.kv_heads) * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads."""
        return (self.heads if self.kv_lora else self.kv_heads) * self.value_dim

    @property
    def out_width(self) -> int:
        """Width of what attention puts out."""
        return self.heads * self.value_dim

    @property
    def kv_cache_width(self) -> int:
        """Numbers that one token keeps in one layer's KV cache."""
        return self.kv_lora + self.rope_dim if self.kv_lora else self.kv_width + self.value_width

    @cached_property
    def attention_params(self) -> int:
        """One layer's attention and its input norm."""
        if self.kv_lora:
            return self._latent_params + self.hidden
        projections = self.hidden * (self.q_width + self.kv_width + self.value_width) + self.out_width * self.hidden
        bias = self.q_width + self.kv_width + self.value_width if self.qkv_bias else 0
        return projections + bias + (2 * self.head_dim if self.qk_norm else 0) + self.hidden

    @property
    def _latent_params(self) -> int:
        h, down = self.hidden, self.kv_lora + self.rope_dim
        query = h * self.q_lora + self.q_lora + self.q_lora * self.q_width if self.q_lora else h * self.q_width
        up = self.kv_lora * self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        return query + h * down + self.kv_lora + up + self.out_width * h

    @property
    def dense_params(self) -> int:
        """A dense layer: attention, gated MLP, both norms."""
        return self.attention_params + 3 * self.hidden * self.intermediate + self.hidden

    @property
    def expert_params(self) -> int:
        """One routed expert."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def moe_shared_params(self) -> int:
        """A MoE layer without its routed experts: attention, norms, router, shared experts."""
        router = self.experts * self.hidden + (self.experts if self.router_bias else 0)
        return self.attention_params + self.hidden + router + 3 * self.hidden * self.shared_intermediate

    @property
    def moe_params(self) -> int:
        """A whole MoE layer."""
        return self.moe_shared_params + self.experts * self.expert_params

    @property
    def layer_params(self) -> int:
        """The largest layer."""
        return self.moe_params if self.moe_layers else self.dense_params

    @property
    def head_params(self) -> int:
        """The embedding matrix, which is also the size of the head."""
        return self.vocab * self.hidden

    @property
    def root_params(self) -> int:
        """What is in no layer: embedding, head if it is not tied, last norm."""
        return self.head_params * (1 if self.tied else 2) + self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self.root_params + self.dense_layers * self.dense_params + self.moe_layers * self.moe_params

    @property
    def active_params(self) -> int:
        """Parameters in matrix products for one token: chosen experts only, the head, not the embedding look-up."""
        moe = self.moe_shared_params + self.experts_per_token * self.expert_params
        return self.dense_layers * self.dense_params + self.moe_layers * moe + self.head_params

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers - self.moe_layers

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts: what expert parallelism cuts."""
        return self.moe_layers * self.experts * self.expert_params


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The MoE fields of a config; empty for a dense model."""
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0
    if not experts:
        return {}
    layers = config["num_hidden_layers"]
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    first = config.get("first_k_dense_replace", 0)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        "experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", 1),
        "moe_intermediate": width,
        "shared_intermediate": width * (config.get("n_shared_experts") or 0),
        "moe_layers": sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "router_bias": config.get("model_type") == "deepseek_v3",
    }


def shipped() -> list[str]:
    """Names of the shapes that come with the package."""
    return sorted(entry.name.removesuffix(".json") for entry in SHAPES.iterdir() if entry.name.endswith(".json"))


def load_shape(name_or_path: str) -> ModelShape | None:
    """A folder (or file) with a config.json, or a shipped shape by name: a hub id's last part, -instruct cut off.

    None when there is neither. Raises ConfigError for a config.json that is not a decoder's.
    """
    path = Path(name_or_path).expanduser()
    file = path if path.suffix == ".json" else path / "config.json"
    if file.is_file():
        try:
            return ModelShape.from_hf(json.loads(file.read_text()), path.stem if path.suffix else path.name)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}: not JSON: {error}") from None
    name = name_or_path.rstrip("/").rpartition("/")[2].lower()
    for candidate in (name, name.removesuffix("-instruct"), name.removesuffix("-base"), name.removesuffix("-chat")):
        if candidate in shipped():
            return ModelShape.from_hf(json.loads((SHAPES / f"{candidate}.json").read_text()), candidate)
    return None


def config_shape(config: Config) -> ModelShape | None:
    """The actor's shape: model.shape when set, else model.path. Raises ConfigError for an unknown model.shape."""
    if config.model.shape is None:
        return load_shape(config.model.path)
    shape = load_shape(config.model.shape)
    if shape is None:
        raise ConfigError(f"model.shape={config.model.shape!r} is unknown; shapes: {', '.join(shipped())}")
    return shape
