"""Bytes that cross each set of process groups in a phase, and the least time that a phase can take.

Per rank and step, worst case (every row at full length). A group of g ranks on k hosts moves B bytes of a gathered
tensor: each rank takes in B·(g-1)/g, and a host's share from the others, B·(k-1)/k, spreads over its ranks.
The times are LOWER BOUNDS: peak rates, perfect overlap, nothing else on the links. A run is slower, never faster.
"""

from dataclasses import dataclass

from spmd_rl.config import Config
from spmd_rl.config.roles import EngineConfig
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.fsdp_memory import DTYPE_BYTES
from spmd_rl.topology.groups import ProcessGroups
from spmd_rl.topology.hardware import hardware
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.memory import role_shape, rollout_weights, wave_rows
from spmd_rl.topology.phases import Load, Phase, load, row_tokens, samples_a_prompt, step_phases
from spmd_rl.topology.roles import RoleSpec, role_specs
from spmd_rl.topology.shape import ModelShape


@dataclass(frozen=True)
class Traffic:
    """What one rank takes in over one set of process groups, in bytes a step."""

    phase: str
    what: str
    groups: str
    inside: float
    """From ranks of its own host."""
    between: float
    """From other hosts."""


@dataclass(frozen=True)
class Bound:
    """The least seconds of a phase by what limits it; the phase cannot be faster than the largest of them."""

    phase: str
    compute: float
    memory: float
    inside: float
    between: float

    @property
    def seconds(self) -> float:
        """The bound."""
        return max(self.compute, self.memory, self.inside, self.between)


class TrafficModel:
    """Reads the plan's groups once and prices every phase with them."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        roles: dict[str, RoleLayout],
        groups: dict[str, ProcessGroups],
        shape: ModelShape,
    ) -> None:
        self.config, self.cluster, self.roles, self.shape = config, cluster, roles, shape
        self.specs = role_specs(config)
        self.by_name = {name: found for found in groups.values() for name in (found.name, *found.aliases)}
        self._hosts: dict[str, int] = {}

    def traffic(self) -> list[Traffic]:
        """Every collective of a step that moves tensors of the model, then the weight sync."""
        found: list[Traffic] = []
        for phase in self._phases():
            if phase.role and self.specs[phase.role].engine is not None:
                found += self._engine_traffic(phase, self.specs[phase.role])
            elif phase.role == "rollout":
                found += self._rollout_traffic(phase)
        return found + self._sync_traffic()

    def bounds(self, traffic: list[Traffic]) -> list[Bound]:
        """One bound a phase that runs, and one for the weight sync."""
        card, found = hardware(self.config), []
        for name in [phase.name for phase in self._phases()] + ["weight sync"]:
            mine = [t for t in traffic if t.phase == name]
            phase = next((p for p in self._phases() if p.name == name), None)
            found.append(
                Bound(
                    name,
                    self._flops(phase) / card.flops if phase else 0.0,
                    self._decoded_bytes(phase) / card.hbm if phase else 0.0,
                    sum(t.inside for t in mine) / card.intra_node,
                    sum(t.between for t in mine) / card.inter_node,
                )
            )
        return found

    def _phases(self) -> list[Phase]:
        if self.config.trainer.mode == "sft" or "rollout" in self.roles:
            return [phase for phase in step_phases(self.config, self.roles) if not phase.why_skipped]
        return []

    def _load(self, spec: RoleSpec) -> Load:
        assert spec.engine is not None, "the rollout has no engine"
        mini = self.config.actor.ppo_mini_batch_size
        if spec.role == "critic":
            mini = self.config.critic.ppo_mini_batch_size or mini
        return load(self.config, self.roles[spec.role], spec.engine, mini)

    def _epochs(self, phase: Phase) -> int:
        """Passes over the step's rows."""
        if phase.name == "critic update":
            return self.config.critic.ppo_epochs or self.config.actor.ppo_epochs
        return self.config.actor.ppo_epochs if phase.name == "update" else 1

    def _engine_traffic(self, phase: Phase, spec: RoleSpec) -> list[Traffic]:
        assert spec.engine is not None
        if spec.engine.name == "megatron":
            return self._megatron_traffic(phase, spec, spec.engine)
        return self._fsdp_traffic(phase, spec, spec.engine)

    def _fsdp_traffic(self, phase: Phase, spec: RoleSpec, engine: EngineConfig) -> list[Traffic]:
        """ZeRO-3: weights gathered for each forward and for each backward, gradients scattered in reduce_dtype."""
        shape, work, role = role_shape(spec, self.shape), self._load(spec), spec.role
        e, trains, layout = DTYPE_BYTES[engine.fsdp.param_dtype], "update" in phase.name, self.roles[spec.role]
        passes = work.passes * self._epochs(phase)
        again = 2 if trains and engine.fsdp.reshard_after_forward else 1
        found = [self._gathered(phase, "parameters", f"{role}/fsdp", e * shape.params * again * passes)]
        if trains:
            reduce = 2 if engine.fsdp.reduce_dtype == "bfloat16" else 4
            found.append(self._gathered(phase, "gradients", f"{role}/fsdp", reduce * shape.params * passes))
            if "ddp" in layout.mesh.names:
                shards = reduce * shape.params / layout.mesh.axis_size("fsdp")
                found.append(self._gathered(phase, "gradients", f"{role}/ddp", 2 * shards * passes))
        sp = layout.batch.axis_size("sp")
        tokens = work.rows * row_tokens(self.config) / sp * self._epochs(phase)
        widths = shape.q_width + shape.kv_width + shape.value_width + shape.out_width
        calls = (3 if engine.gradient_checkpointing else 2) if trains else 1
        found.append(self._exchanged(phase, "heads", f"{role}/sp", e * tokens * widths * shape.layers * calls))
        return [t for t in found if t.inside + t.between > 0]

    def _megatron_traffic(self, phase: Phase, spec: RoleSpec, engine: EngineConfig) -> list[Traffic]:
        """Two all-reduces a layer and direction over tp, stage borders over pp, gradients and weights over dp."""
        shape, work, role, m = role_shape(spec, self.shape), self._load(spec), spec.role, engine.megatron
        trains = "update" in phase.name
        tokens = work.rows * row_tokens(self.config) / m.cp * self._epochs(phase)
        directions = (3 if engine.gradient_checkpointing else 2) if trains else 1
        stream = 2 * tokens * shape.hidden
        routed = 2 * stream / m.tp * shape.experts_per_token
        context = 2 * tokens * m.cp * (shape.kv_width + shape.value_width) / m.tp
        found = [
            self._gathered(phase, "activations", f"{role}/tp", 2 * 2 * stream * directions * shape.layers / m.pp),
            self._sent(phase, "stage borders", f"{role}/pp", stream / m.tp * (2 if trains else 1) if m.pp > 1 else 0),
            self._exchanged(phase, "tokens of experts", f"{role}/ep", routed * directions * shape.moe_layers / m.pp),
            self._gathered(phase, "keys and values", f"{role}/cp", context * directions * shape.layers / m.pp),
        ]
        if trains:
            steps = self._epochs(phase) * -(-self.config.data.train_batch_size // self.config.actor.ppo_mini_batch_size)
            mine = (shape.params - shape.routed_params) / (m.tp * m.pp)
            found.append(self._gathered(phase, "gradients and weights", f"{role}/dp", (4 + 2) * mine * steps))
        return [t for t in found if t.inside + t.between > 0]

    def _rollout_traffic(self, phase: Phase) -> list[Traffic]:
        layout, e = self.roles["rollout"], DTYPE_BYTES[self.config.rollout.dtype]
        rows = self._prompts() * samples_a_prompt(self.config) / layout.dp_size
        stream = e * rows * row_tokens(self.config) * self.shape.hidden
        layers = self.shape.layers / layout.mesh.axis_size("infer_pp")
        found = [self._gathered(phase, "activations", "rollout/infer_tp", 2 * 2 * stream * layers)]
        if layout.mesh.axis_size("infer_pp") > 1:
            found.append(self._sent(phase, "stage borders", "rollout/infer_pp", stream))
        return [t for t in found if t.inside + t.between > 0]

    def _sync_traffic(self) -> list[Traffic]:
        """The actor's weights in the rollout's type: each rank takes in its slice, less its own shard."""
        if "rollout" not in self.roles:
            return []
        actor, rollout, phase = self.roles["actor"], self.roles["rollout"], Phase("weight sync", None, "")
        slice_bytes = rollout_weights(self.config, rollout, self.shape)
        if actor.pool != rollout.pool:
            return [self._bridged(actor.pool, rollout.pool, slice_bytes)]
        experts = 0.0
        if actor.expert is not None and actor.expert.axis_size("ep") > 1:
            experts = slice_bytes * self.shape.routed_params / self.shape.params
        name = "actor/fsdp" if actor.engine == "fsdp" else "actor/tp-pp"
        found = [self._gathered(phase, "weights", name, slice_bytes - experts)]
        if experts:
            found.append(self._gathered(phase, "routed experts", "actor/etp-ep-pp", experts))
        return [t for t in found if t.inside + t.between > 0]

    def _bridged(self, source: str, target: str, mine: int) -> Traffic:
        """Weights over the bridge: a host takes each slice in once, over the links of all of its ranks."""
        bridge = self.by_name[f"bridge/{source}-{target}"]
        hosts = [set(self.cluster.node_of[pool.array].tolist()) for pool in bridge.pools]
        ranks = max(bridge.pools[1].counts)
        whole = DTYPE_BYTES[self.config.rollout.dtype] * self.shape.params
        between = 0.0 if hosts[0] & hosts[1] else min(whole, ranks * mine) / ranks
        return Traffic("weight sync", "weights", bridge.name, mine - between, between)

    def _hosts_of(self, name: str) -> int:
        if name not in self._hosts:
            self._hosts[name] = self.by_name[name].nodes_a_group(self.cluster)
        return self._hosts[name]

    def _gathered(self, phase: Phase, what: str, name: str, total: float) -> Traffic:
        """`total` bytes end up on every rank of the group (or, reduced, came from every rank)."""
        g, k = self.by_name[name].group_size, self._hosts_of(name)
        between = total * (k - 1) / k / (g / k)
        return Traffic(phase.name, what, name, max(total * (g - 1) / g - between, 0.0), between)

    def _exchanged(self, phase: Phase, what: str, name: str, mine: float) -> Traffic:
        """All-to-all of `mine` bytes a rank."""
        g, k = self.by_name[name].group_size, self._hosts_of(name)
        between = mine * (g - g / k) / g
        return Traffic(phase.name, what, name, mine * (g - 1) / g - between, between)

    def _sent(self, phase: Phase, what: str, name: str, mine: float) -> Traffic:
        """`mine` bytes from one neighbour."""
        crosses = self._hosts_of(name) > 1
        return Traffic(phase.name, what, name, 0.0 if crosses else mine, mine if crosses else 0.0)

    def _prompts(self) -> int:
        return self.config.data.train_batch_size

    def _flops(self, phase: Phase) -> float:
        """Multiply-adds (times two) of one rank: 2 a parameter and token forward, 4 backward, and the scores."""
        if phase.role is None:
            return 0.0
        spec = self.specs[phase.role]
        shape, longest, rows = role_shape(spec, self.shape), row_tokens(self.config), self._rows()
        head = 0 if phase.role in ("critic", "reward") else shape.head_params * self.config.data.max_response_length
        layers = (shape.active_params - shape.head_params) * longest
        scores = shape.layers * (shape.q_width + shape.out_width) * longest * longest / 2
        forward = 2 * rows * (layers + head + scores) / self.roles[phase.role].size
        if "update" not in phase.name:
            return forward
        recompute = spec.engine is not None and spec.engine.gradient_checkpointing
        return forward * (3 + recompute * layers / (layers + head + scores)) * self._epochs(phase)

    def _decoded_bytes(self, phase: Phase) -> float:
        """Generating reads the rank's weights once for every token of a wave."""
        if phase.role != "rollout":
            return 0.0
        layout = self.roles["rollout"]
        waves = 1
        if self.config.rollout.name == "transformers":
            rows = -(-self._prompts() // layout.dp_size) * samples_a_prompt(self.config)
            waves = -(-rows // wave_rows(self.config, layout))
        weights = rollout_weights(self.config, layout, self.shape)
        return float(weights * waves * self.config.data.max_response_length)

    def _rows(self) -> int:
        return self._prompts() * samples_a_prompt(self.config)
