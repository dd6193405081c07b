"""The memory estimate: bytes on a rank's GPU in every phase, by what they are for.

All figures are for the worst case that the config allows (every row at full length), without the CUDA context, which
`RESERVE` stands for when the card's size is checked. Ranks of a pool are alike, except for Megatron's pipeline stages.
"""

from dataclasses import dataclass, replace

from spmd_rl.config import Config
from spmd_rl.topology import activations as act
from spmd_rl.topology.cluster import Pool
from spmd_rl.topology.fsdp_memory import DTYPE_BYTES, FsdpMemory, Items
from spmd_rl.topology.hardware import GIB, hardware
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.megatron_memory import MegatronMemory
from spmd_rl.topology.phases import TIMED, UPDATES, Phase, load, row_tokens, samples_a_prompt, step_phases
from spmd_rl.topology.roles import RoleSpec, role_specs
from spmd_rl.topology.shape import ModelShape, load_shape
from spmd_rl.topology.tails import continues, in_flight
from spmd_rl.topology.vllm_memory import VllmMemory, sleep_level

RESERVE = int(1.5 * GIB)
"""CUDA context, NCCL's buffers and what the allocator cannot use; per rank, outside torch's own peak."""


@dataclass(frozen=True)
class PhaseMemory:
    """One phase on one pool: `items` (what -> bytes) add up to `peak`."""

    phase: str
    pool: str
    stage: int
    """Pipeline stage of the working role that this is for; 0 without pipeline."""
    items: Items
    moment: str = ""
    """Where inside the phase the peak is."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.items.values())


def memory(
    config: Config, pools: dict[str, Pool], roles: dict[str, RoleLayout], shape: ModelShape | None
) -> list[PhaseMemory]:
    """The estimate of every phase that runs, on every pool that it touches, for every pipeline stage of its role.

    Empty when the model's shape is unknown.
    """
    if shape is None:
        return []
    found: list[PhaseMemory] = []
    for phase in step_phases(config, roles):
        if not phase.why_skipped:
            stages = _stages(roles[phase.role]) if phase.role else 1
            found += [_phase_memory(config, roles, phase, stage, shape) for stage in range(stages)]
    return _with_early(config, roles, found, shape)


def card_bytes(config: Config) -> int:
    """What one rank may use of its card: its share, less the reserve."""
    return hardware(config).memory // config.cluster.ranks_per_gpu - RESERVE


def role_shape(spec: RoleSpec, actor: ModelShape) -> ModelShape:
    """A role's own shape when its path has one at hand, else the actor's."""
    return (load_shape(spec.path) if spec.path else None) or actor


def engine_memory(
    config: Config, spec: RoleSpec, layout: RoleLayout, shape: ModelShape, stage: int = 0
) -> FsdpMemory | MegatronMemory:
    """The estimator of one role that an engine holds, loaded with the config's worst-case micro-batch."""
    assert spec.engine is not None, "the rollout has no engine"
    mini = config.actor.ppo_mini_batch_size
    if spec.role == "critic":
        mini = config.critic.ppo_mini_batch_size or mini
    work = load(config, layout, spec.engine, mini)
    scalar = spec.role in ("critic", "reward")
    if spec.engine.name == "megatron":
        return MegatronMemory(
            shape, layout, spec.engine, work.tokens, work.logit_tokens, stage, work.micro_batches, scalar_head=scalar
        )
    sp = layout.batch.axis_size("sp")
    lora = _lora_params(config, shape) if spec.role == "actor" and config.model.lora.rank else None
    return FsdpMemory(
        shape,
        layout,
        spec.engine,
        -(-work.tokens // sp),
        -(-work.logit_tokens // sp),
        work.micro_batches,
        lora,
        scalar,
        cuda=config.trainer.device != "cpu",
    )


def rollout_memory(config: Config, layout: RoleLayout, shape: ModelShape) -> Items:
    """What the rollout engine takes while it generates: weights, KV cache, and the buffers of a decode or prefill."""
    if config.rollout.name == "vllm":
        return VllmMemory.of(config, layout, shape).awake()
    e, n = DTYPE_BYTES[config.rollout.dtype], samples_a_prompt(config)
    rows = wave_rows(config, layout)
    once = config.data.max_prompt_length  # a prompt is read once for its group, but what is begun row by row
    prefill = rows // n * (n * row_tokens(config) if continues(config.rollout) else once) * act.layer_forward(shape, e)
    logits = rows * shape.vocab * (e + 12)
    step = rows * row_tokens(config) * e * shape.kv_cache_width * shape.layers
    return {
        "weights": rollout_weights(config, layout, shape),
        "KV cache": step,
        "sampling": max(prefill, logits),
    }


def rollout_weights(config: Config, layout: RoleLayout, shape: ModelShape) -> int:
    """Bytes of the rollout engine's own copy on one rank."""
    if config.rollout.name == "vllm":
        return VllmMemory.of(config, layout, shape).weights
    return DTYPE_BYTES[config.rollout.dtype] * shape.params


def wave_rows(config: Config, layout: RoleLayout) -> int:
    """Rows that the transformers engine decodes at one time on one rank: whole groups, one at least."""
    n = samples_a_prompt(config)
    prompts = -(-in_flight(config) // layout.dp_size)
    return min(max(config.rollout.max_batch_rows // n, 1), prompts) * n


def _phase_memory(
    config: Config, roles: dict[str, RoleLayout], phase: Phase, stage: int, actor: ModelShape
) -> PhaseMemory:
    specs = role_specs(config)
    items: Items = {}
    for role, layout in roles.items():
        if layout.pool == phase.pool:
            working = role == phase.role
            at = stage if working else 0
            if role == "rollout":
                held = _rollout_held(config, roles, actor)
            else:
                updating = "update" in phase.name
                held = _held(config, specs[role], layout, role_shape(specs[role], actor), at, working, updating)
            items |= {f"{role}: {what}": size for what, size in held.items()}
    moment = ""
    if phase.role == "rollout":
        extra = rollout_memory(config, roles["rollout"], actor)
        items |= {f"rollout: {what}": size for what, size in extra.items()}
    elif phase.role:
        spec = specs[phase.role]
        engine = engine_memory(config, spec, roles[spec.role], role_shape(spec, actor), stage)
        if phase.name in ("update", "critic update"):
            moment, extra = engine.train()
        else:
            extra = engine.forward()
        items |= {f"{spec.role}: {what}": size for what, size in extra.items()}
    return PhaseMemory(phase.name, phase.pool, stage, {k: v for k, v in items.items() if v}, moment)


def _held(
    config: Config, spec: RoleSpec, layout: RoleLayout, shape: ModelShape, stage: int, working: bool, updating: bool
) -> Items:
    """What a role keeps on the GPU in a phase: all that its work there needs, else what is not offloaded."""
    assert spec.engine is not None, "the rollout has no engine"
    held = engine_memory(config, spec, layout, shape, stage).held(spec.trained)
    if not working and spec.engine.offload_params:
        held["parameters"] = 0
    if not (working and updating) and spec.engine.offload_optimizer:
        held["optimizer"] = 0
    return held


def _rollout_held(config: Config, roles: dict[str, RoleLayout], actor: ModelShape) -> Items:
    """What the rollout engine keeps on the GPU between its calls."""
    if config.rollout.name == "vllm":
        return VllmMemory.of(config, roles["rollout"], actor).between(sleep_level(config, roles))
    return {"weights": rollout_weights(config, roles["rollout"], actor)}


def overlaps(config: Config, roles: dict[str, RoleLayout], actor: ModelShape) -> bool:
    """Whether a weight sync has room for all that leaves for the generation, so that it can leave meanwhile."""
    if "rollout" not in roles or config.trainer.device == "cpu":
        return True
    everything = rollout_weights(config, roles["rollout"], actor)
    for spec in role_specs(config).values():
        if spec.engine is not None and spec.pool == roles["rollout"].pool:
            held = engine_memory(config, spec, roles[spec.role], role_shape(spec, actor)).held(spec.trained)
            everything += sum(held.values())
    return everything <= card_bytes(config)


def _with_early(
    config: Config, roles: dict[str, RoleLayout], found: list[PhaseMemory], actor: ModelShape
) -> list[PhaseMemory]:
    """Offloaded optimizers come back while others work, if all phases from there to their update have room for them.

    They start to when generation is over; with `filter_groups`, whose rounds generate again, when the last round is.
    """
    phases = [phase.name for phase in step_phases(config, roles)]
    limit = card_bytes(config) if config.trainer.device != "cpu" else None
    for spec in role_specs(config).values():
        if spec.engine is None or spec.optim is None or not spec.engine.offload_optimizer or "generate" not in phases:
            continue
        first = phases.index("generate") + (2 if config.algorithm.filter_groups.enable else 1)
        between = phases[first : phases.index(UPDATES[spec.role])]
        layout, shape = roles[spec.role], role_shape(spec, actor)
        size = {
            stage: engine_memory(config, spec, layout, shape, stage).held(trained=True)["optimizer"]
            for stage in range(_stages(layout))
        }
        grown = {
            i: replace(m, items=m.items | {f"{spec.role}: optimizer": size.get(m.stage, size[0])})
            for i, m in enumerate(found)
            if m.phase in between and m.pool == layout.pool
        }
        if limit is None or all(m.peak <= limit for m in grown.values()):
            found = [grown.get(i, m) for i, m in enumerate(found)]
    return found


def early_pieces(config: Config, found: list[PhaseMemory]) -> dict[str, frozenset[str]]:
    """Phase, as the loop calls it -> the pieces that are there before they are needed, as residency calls them."""
    early: dict[str, frozenset[str]] = {}
    for spec in role_specs(config).values():
        if spec.optim is not None and spec.engine is not None and spec.engine.offload_optimizer:
            for m in found:
                if f"{spec.role}: optimizer" in m.items and m.phase != UPDATES[spec.role] and m.phase in TIMED:
                    timed = TIMED[m.phase]
                    early[timed] = early.get(timed, frozenset()) | {f"{spec.role}.optimizer"}
    return early


def offloaded_bytes(config: Config, roles: dict[str, RoleLayout], actor: ModelShape) -> dict[str, int]:
    """Bytes that one rank moves to its host, by pool: offloaded parameters and optimizer states, FSDP's own offload,
    the weights of a rollout engine that sleeps at level 1."""
    total: dict[str, int] = {}
    for spec in role_specs(config).values():
        if spec.engine is None:
            if config.rollout.name == "vllm":
                engine_host = VllmMemory.of(config, roles[spec.role], actor).on_host(sleep_level(config, roles))
                total[spec.pool] = total.get(spec.pool, 0) + engine_host
            continue
        engine, on_host = spec.engine, 0
        plain = replace(engine, fsdp=replace(engine.fsdp, offload_policy=False))
        spec = replace(spec, engine=plain)
        held = engine_memory(config, spec, roles[spec.role], role_shape(spec, actor)).held(spec.trained)
        streamed = engine.name == "fsdp" and engine.fsdp.offload_policy
        on_host += held["parameters"] if engine.offload_params or streamed else 0
        on_host += held["optimizer"] if engine.offload_optimizer or streamed else 0
        total[spec.pool] = total.get(spec.pool, 0) + on_host
    return total


def _stages(layout: RoleLayout) -> int:
    return layout.mesh.axis_size("pp") if "pp" in layout.mesh.names else 1


def _lora_params(config: Config, shape: ModelShape) -> int:
    """Adapter parameters for all linear maps of all layers: rank · (in + out) each."""
    widths = [(shape.hidden, shape.q_width), (shape.hidden, shape.kv_width), (shape.hidden, shape.value_width)]
    widths += [(shape.out_width, shape.hidden)] + 3 * [(shape.hidden, shape.intermediate)]
    return shape.layers * config.model.lora.rank * sum(a + b for a, b in widths)
