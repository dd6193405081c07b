"""Memory of a vLLM engine on one rank: weights, the peak of its profiling run, CUDA graphs, and the KV cache.

vLLM measures the first three when it starts and gives what is left of its share of the card to the KV cache, so the
share is what a phase sees; the estimate says how many tokens fit into it. As vLLM 0.25 to 0.32 lay a decoder out:
vocabulary padded to 64, query heads and MLP columns cut by infer_tp, key-value heads cut or repeated, layers cut by
infer_pp. `rollout.engine_kwargs` count where they change a figure.

Legend: e bytes of a number, H hidden size, V vocabulary, T tokens of the largest batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spmd_rl.config import Config
from spmd_rl.topology.hardware import GIB, hardware
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.phases import row_tokens, samples_a_prompt
from spmd_rl.topology.shape import ModelShape
from spmd_rl.topology.tails import in_flight

PADDING = 64
"""vLLM's vocabulary is a multiple of it."""
BLOCK = 16
"""Tokens of a KV block, vLLM's default."""
GRAPHS = GIB
"""CUDA graphs and their pool: an allowance, not a calculation; 0 with enforce_eager."""
CPU_KV_CACHE = 1 << 28
"""Bytes of the KV cache on a CPU, unless engine_kwargs.kv_cache_memory_bytes says otherwise."""
CPU_BLOCK = 128
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that the CPU build has a kernel for."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fastest": 2}


@dataclass(frozen=True)
class VllmMemory:
    """The fullest rank of a replica; all sizes in bytes."""

    shape: ModelShape
    tp: int
    pp: int
    e: int
    share: int
    """What the engine may take while it is awake: gpu_memory_utilization of the card."""
    row: int
    """Tokens of the longest row."""
    rows: int
    """Rows that a replica samples in a step."""
    batched_tokens: int
    max_seqs: int
    block: int = BLOCK
    kv_e: int = 2
    eager: bool = False
    fixed_kv: int | None = None
    """engine_kwargs.kv_cache_memory_bytes; on a CPU always."""

    @classmethod
    def of(cls, config: Config, layout: RoleLayout, shape: ModelShape) -> "VllmMemory":
        """As config.rollout starts it."""
        rollout, kwargs = config.rollout, config.rollout.engine_kwargs
        card = hardware(config).memory
        large = card >= 70 * GIB and "a100" not in config.cluster.gpu  # vLLM's own defaults
        cpu = config.trainer.device == "cpu"
        e = DTYPE_BYTES["float32" if cpu and rollout.dtype == "auto" else rollout.dtype]
        seqs = _number(kwargs, "max_num_seqs", 1024 if large else 256)
        return cls(
            shape,
            tp=layout.mesh.axis_size("infer_tp"),
            pp=layout.mesh.axis_size("infer_pp"),
            e=e,
            share=int(rollout.gpu_memory_utilization * card / config.cluster.ranks_per_gpu),
            row=row_tokens(config),
            rows=-(-in_flight(config) // layout.dp_size) * samples_a_prompt(config),
            batched_tokens=min(
                _number(kwargs, "max_num_batched_tokens", 16384 if large else 8192), seqs * row_tokens(config)
            ),
            max_seqs=seqs,
            block=_number(kwargs, "block_size", CPU_BLOCK if cpu else BLOCK),
            kv_e=1 if str(kwargs.get("kv_cache_dtype", "auto")).startswith("fp8") else e,
            eager=rollout.enforce_eager,
            fixed_kv=kwargs.get("kv_cache_memory_bytes") or (CPU_KV_CACHE if cpu else None),
        )

    @cached_property
    def weights(self) -> int:
        """The largest stage's."""
        return self.e * max(self._stage_params(stage) for stage in range(self.pp))

    def _stage_params(self, stage: int) -> int:
        """Parameters of one rank of a pipeline stage."""
        s, layers = self.shape, stage_layers(self.shape.layers, self.pp)
        first = sum(layers[:stage])
        dense = max(0, min(s.dense_layers, first + layers[stage]) - first)  # those with experts come after the others
        inside = dense * self._layer(experts=False) + (layers[stage] - dense) * self._layer(experts=True)
        embedding = padded_vocab(s) // self.tp * s.hidden
        last = stage == self.pp - 1
        ends = embedding * ((stage == 0) + (last and not (s.tied and stage == 0))) + (s.hidden if last else 0)
        return inside + ends

    def _layer(self, experts: bool) -> int:
        """Parameters of one rank of a layer: cut matrices, norms whole."""
        s, tp = self.shape, self.tp
        norms = 2 * s.hidden + (2 * s.head_dim if s.qk_norm else 0)
        mlp = 3 * s.hidden * s.intermediate // tp
        if experts:
            shared = 3 * s.hidden * s.shared_intermediate // tp
            router = s.experts * s.hidden + (s.experts if s.router_bias else 0)
            mlp = s.experts * s.expert_params // tp + shared + router
        return self._attention + norms + mlp

    @property
    def _attention(self) -> int:
        s, tp = self.shape, self.tp
        out = s.out_width * s.hidden // tp
        if s.kv_lora:
            query = s.q_lora * (s.hidden + 1 + s.q_width // tp) if s.q_lora else s.hidden * s.q_width // tp
            down = s.hidden * (s.kv_lora + s.rope_dim) + s.kv_lora
            up = s.kv_lora * s.heads // tp * (s.head_dim - s.rope_dim + s.value_dim)
            return query + down + 2 * up + out  # `up` once more, as the absorbed form keeps it
        qkv = s.q_width // tp + self.kv_heads * (s.head_dim + s.value_dim)
        return qkv * (s.hidden + (1 if s.qkv_bias else 0)) + out

    @property
    def kv_heads(self) -> int:
        """On one rank; more ranks than heads hold copies."""
        return max(1, self.shape.kv_heads // self.tp)

    @property
    def token(self) -> int:
        """KV cache bytes of one token on the stage with most layers; latent attention's is not cut."""
        s = self.shape
        width = s.kv_lora + s.rope_dim if s.kv_lora else self.kv_heads * (s.head_dim + s.value_dim)
        return self.kv_e * width * max(stage_layers(s.layers, self.pp))

    @property
    def activations(self) -> int:
        """The profiling run's peak: T tokens in a layer, or the sampler's float32 logits, sorted, normalised."""
        s, tp = self.shape, self.tp
        columns = s.experts_per_token * s.moe_intermediate + s.shared_intermediate if s.moe_layers else s.intermediate
        qkv = s.q_width // tp + (0 if s.kv_lora else 2 * self.kv_heads * s.head_dim)
        inside = self.batched_tokens * self.e * (3 * s.hidden + max(3 * columns // tp, qkv + s.out_width // tp))
        logits = min(self.max_seqs, self.batched_tokens) * s.vocab * (self.e + 3 * 4)
        return max(inside, logits)

    @property
    def graphs(self) -> int:
        """They stay when the engine sleeps."""
        return 0 if self.eager else GRAPHS

    @property
    def kv_cache(self) -> int:
        """What is left of the share; below 0 when nothing is."""
        if self.fixed_kv is not None:
            return self.fixed_kv
        return self.share - self.weights - self.activations - self.graphs

    @property
    def tokens(self) -> int:
        """That the KV cache holds, in whole blocks."""
        return max(0, self.kv_cache) // (self.token * self.block) * self.block

    @property
    def row_blocks(self) -> int:
        """Tokens that the longest row takes up."""
        return -(-self.row // self.block) * self.block

    @property
    def at_once(self) -> int:
        """Full-length rows that are sampled at one time."""
        return min(self.tokens // self.row_blocks, self.max_seqs)

    def awake(self) -> dict[str, int]:
        """What a generating engine takes."""
        return self.always() | {"KV cache": max(0, self.kv_cache), "activations": self.activations}

    def always(self) -> dict[str, int]:
        """What one that never sleeps holds between its calls, but for the KV cache."""
        return {"weights": self.weights, "CUDA graphs": self.graphs}

    def between(self, sleep_level: int) -> dict[str, int]:
        """What stays on the GPU while other roles work."""
        if sleep_level:
            return {"CUDA graphs": self.graphs}
        return self.always() | {"KV cache": max(0, self.kv_cache)}

    def on_host(self, sleep_level: int) -> int:
        """What a sleeping engine keeps in pinned host memory."""
        return self.weights if sleep_level == 1 else 0


def stage_layers(layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage: what does not divide goes to the stages before the last."""
    found = [layers // pp] * pp
    for i in range(layers % pp):
        found[-(i + 2)] += 1
    return found


def padded_vocab(shape: ModelShape) -> int:
    """The vocabulary as vLLM holds it."""
    return -(-shape.vocab // PADDING) * PADDING


def sleep_level(config: Config, roles: Mapping[str, RoleLayout]) -> int:
    """rollout.sleep_level; 0 where nobody else works on the rollout's pool, who would need the memory."""
    pool = roles["rollout"].pool
    alone = all(layout.pool != pool for role, layout in roles.items() if role != "rollout")
    return 0 if alone else config.rollout.sleep_level


def cpu_mistakes(config: Config, shape: ModelShape) -> list[str]:
    """What vLLM's CPU build cannot do."""
    rollout, mistakes = config.rollout, []
    if shape.head_dim not in CPU_HEADS:
        sizes = ", ".join(map(str, CPU_HEADS))
        mistakes.append(
            f"rollout.name=vllm on a CPU has attention heads of {sizes}, but {shape.name}'s are of {shape.head_dim}; "
            "set rollout=transformers"
        )
    if rollout.infer_pp > 1:
        mistakes.append(f"rollout.infer_pp={rollout.infer_pp}: vLLM on a CPU has no pipeline stages; use infer_pp=1")
    if config.actor.router_replay != "none":
        mistakes.append(
            f"actor.router_replay={config.actor.router_replay}: vLLM on a CPU does not tell which experts it chose "
            "(that takes its model runner V2, and so Triton); set rollout=transformers or actor.router_replay=none"
        )
    return mistakes


def vllm_mistakes(m: VllmMemory, room: int) -> list[str]:
    """A KV cache that cannot hold one row at full length. `room`: bytes that the card can give the engine at most."""
    need = m.row_blocks * m.token
    if m.kv_cache >= need:
        return []
    parts = f"weights {gib(m.weights)} − activations {gib(m.activations)} − CUDA graphs {gib(m.graphs)}"
    cache = f"rollout.gpu_memory_utilization gives {gib(m.share)} − {parts} = {gib(m.kv_cache)}"
    more = "rollout.gpu_memory_utilization or " if m.weights + m.activations + m.graphs + need <= room else ""
    if m.fixed_kv is not None:
        cache, more = f"rollout.engine_kwargs.kv_cache_memory_bytes gives {gib(m.fixed_kv)}", "it or "
    row = f"one row of {m.row} tokens (data.max_prompt_length + max_response_length) takes {gib(need)}"
    mend = f"raise {more}rollout.infer_tp, or shorten the rows"
    return [f"memory: the KV cache cannot hold a single reply: {cache} GiB of KV cache, but {row} GiB; {mend}"]


def vllm_warnings(m: VllmMemory) -> list[str]:
    """Fewer rows at one time than a replica samples in a step."""
    if m.at_once >= m.rows:
        return []
    if m.at_once == m.max_seqs:
        limit, mend = "rollout.engine_kwargs.max_num_seqs", f"raise it to {m.rows}, or start more replicas"
    else:
        limit = f"a KV cache of {m.tokens} tokens"
        mend = "raise rollout.gpu_memory_utilization or infer_tp, or start more replicas"
    rows = f"{m.at_once} rows of {m.row} tokens at one time, but a replica has {m.rows} a step; the others wait"
    return [f"rollout: {limit} has room for {rows}: {mend}"]


def facts(m: VllmMemory, sleep_level: int) -> dict[str, str]:
    """The engine in words, for the plan's text and page."""
    kept = {0: "weights and KV cache stay", 1: "weights go to the host", 2: "weights are dropped"}[sleep_level]
    between = gib(sum(m.between(sleep_level).values()))
    host = m.on_host(sleep_level)
    return {
        "share of the card": f"{gib(m.share)} GiB",
        "weights": f"{gib(m.weights)} GiB (infer_tp {m.tp}, infer_pp {m.pp}, vocabulary {padded_vocab(m.shape)})",
        "activations": f"{gib(m.activations)} GiB (batches of {m.batched_tokens} tokens, {m.max_seqs} rows at most)",
        "CUDA graphs": f"{gib(m.graphs)} GiB",
        "KV cache": f"{gib(max(0, m.kv_cache))} GiB, {m.token / 1024:.0f} KiB a token: {m.tokens} tokens",
        "rows at one time": f"{m.at_once} of {m.row} tokens; a replica has {m.rows} a step",
        f"asleep (level {sleep_level})": f"{kept}; {between} GiB on the GPU, {gib(host)} GiB on the host",
    }


def gib(size: int) -> str:
    """Two decimals, without the unit."""
    return f"{size / GIB:.2f}"


def _number(kwargs: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number: the plan has looked at it before (`engine_kwargs_mistakes`)."""
    value: int | None = kwargs.get(name)
    return default if value is None else value
