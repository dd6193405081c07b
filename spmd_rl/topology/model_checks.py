"""What the model's shape forbids: heads, layers, experts, vocabulary and lengths against the axes' sizes."""

from spmd_rl.config import Config
from spmd_rl.config.roles import MegatronConfig
from spmd_rl.topology.fold import divisors, not_dividing, one_of
from spmd_rl.topology.phases import row_tokens
from spmd_rl.topology.roles import RoleSpec, config_path
from spmd_rl.topology.shape import ModelShape
from spmd_rl.topology.vllm_memory import padded_vocab


def model_mistakes(config: Config, spec: RoleSpec, shape: ModelShape) -> list[str]:
    """Mistakes of one role against the shape of its model."""
    if spec.engine is None:
        return _rollout_mistakes(config, shape)
    prefix = f"{config_path(spec)}.engine"
    if spec.engine.name == "megatron":
        return _megatron_mistakes(f"{prefix}.megatron", spec.engine.megatron, shape)
    lora = config.model.lora
    if spec.role == "actor" and lora.rank > 0 and shape.experts and "all-linear" in lora.target_modules:
        return [lora.takes_experts()]
    return _ulysses_mistakes(f"{prefix}.fsdp.ulysses_size", spec.engine.fsdp.ulysses_size, shape)


def length_mistakes(config: Config, shape: ModelShape) -> list[str]:
    """Rows longer than the model's positions."""
    longest = row_tokens(config)
    if shape.max_positions is None or longest <= shape.max_positions:
        return []
    total = f"{config.data.max_prompt_length} + {config.data.max_response_length} = {longest}"
    limit = f"the {shape.max_positions} positions of {shape.name}"
    return [f"data.max_prompt_length + data.max_response_length = {total} exceeds {limit}; shorten one of them"]


def head_sizes(shape: ModelShape) -> list[int]:
    """Sizes over which attention heads can be cut when key-value heads may be repeated."""
    return [d for d in divisors(shape.heads) if _kv_fits(shape, d)]


def _kv_fits(shape: ModelShape, size: int) -> bool:
    kv = shape.heads if shape.kv_lora else shape.kv_heads
    return kv % size == 0 or size % kv == 0


def _heads_mistakes(name: str, size: int, shape: ModelShape) -> list[str]:
    """Query heads must be cut evenly; key-value heads evenly, or repeated a whole number of times."""
    if size < 2:
        return []
    fits = f"use {one_of(head_sizes(shape))}"
    if shape.heads % size:
        return [f"{name}={size} does not divide the {shape.heads} attention heads of {shape.name}; {fits}"]
    if not _kv_fits(shape, size):
        heads = f"the {shape.kv_heads} key-value heads of {shape.name}"
        return [f"{name}={size} neither divides {heads} nor is a multiple of them; {fits}"]
    return []


def _ulysses_mistakes(name: str, size: int, shape: ModelShape) -> list[str]:
    return _heads_mistakes(name, size, shape)


def _rollout_mistakes(config: Config, shape: ModelShape) -> list[str]:
    tp = config.rollout.infer_tp
    mistakes = _heads_mistakes("rollout.infer_tp", tp, shape)
    cuts = [("MLP columns", shape.intermediate), ("vocabulary entries, padded to 64,", padded_vocab(shape))]
    if shape.moe_layers:
        cuts.append(("columns of an expert", shape.moe_intermediate))
    mistakes = mistakes or [
        not_dividing("rollout.infer_tp", tp, f"the {number} {what} of {shape.name}", number)
        for what, number in cuts
        if number % tp and (what != "MLP columns" or shape.dense_layers)
    ]
    if config.rollout.infer_pp > shape.layers:
        mistakes.append(
            f"rollout.infer_pp={config.rollout.infer_pp} is more than the {shape.layers} layers of {shape.name}; "
            "every stage needs one"
        )
    return mistakes


def _megatron_mistakes(prefix: str, m: MegatronConfig, shape: ModelShape) -> list[str]:
    if min(m.tp, m.pp, m.vpp, m.cp, m.ep) < 1:
        return []  # said already, with the fold
    mistakes = []
    kv = shape.heads if shape.kv_lora else shape.kv_heads
    cuts = [
        ("attention heads", shape.heads),
        ("key-value heads (num_query_groups)", kv),
        ("MLP columns", shape.intermediate),
        ("vocabulary entries", shape.vocab),
    ]
    for what, number in cuts:
        if number % m.tp:
            mistakes.append(not_dividing(f"{prefix}.tp", m.tp, f"the {number} {what} of {shape.name}", number))
    if shape.layers % m.pp:
        mistakes.append(not_dividing(f"{prefix}.pp", m.pp, f"the {shape.layers} layers of {shape.name}", shape.layers))
    elif m.vpp > 1 and shape.layers % (m.pp * m.vpp):
        mistakes.append(
            f"{prefix}: pp·vpp = {m.pp}·{m.vpp} = {m.pp * m.vpp} does not divide the {shape.layers} layers of "
            f"{shape.name}; with pp={m.pp} use vpp {one_of(divisors(shape.layers // m.pp))}"
        )
    return mistakes + _expert_mistakes(prefix, m, shape)


def _expert_mistakes(prefix: str, m: MegatronConfig, shape: ModelShape) -> list[str]:
    if not shape.experts:
        mistakes = [f"{prefix}.ep={m.ep} needs experts, but {shape.name} is dense; use ep=1"] if m.ep > 1 else []
        if m.etp is not None and m.etp != m.tp:
            mistakes.append(f"{prefix}.etp={m.etp} needs experts, but {shape.name} is dense; leave etp unset")
        return mistakes
    mistakes = []
    if shape.experts % m.ep:
        mistakes.append(
            not_dividing(f"{prefix}.ep", m.ep, f"the {shape.experts} experts of {shape.name}", shape.experts)
        )
    etp = m.tp if m.etp is None else m.etp
    if etp > 0 and shape.moe_intermediate % etp:
        columns = shape.moe_intermediate
        mistakes.append(
            not_dividing(f"{prefix}.etp", etp, f"the {columns} columns of an expert of {shape.name}", columns)
        )
    if m.tp > 1 and not m.sequence_parallel:
        mistakes.append(
            f"{prefix}.tp={m.tp} with sequence_parallel=false cannot route the experts of {shape.name}; "
            "set sequence_parallel=true or tp=1"
        )
    return mistakes
