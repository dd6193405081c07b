"""Memory of the megatron-core engine on one rank of pipeline stage k.

bfloat16 weights, float32 gradients, float32 master weights with AdamW's two moments (over dp with the distributed
optimizer). Activations: Korthikanti et al. 2022, arXiv:2205.05198, with a flash-like attention.
"""

from dataclasses import dataclass

from spmd_rl.config.roles import EngineConfig
from spmd_rl.topology import activations as act
from spmd_rl.topology.fsdp_memory import Items
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.shape import ModelShape


@dataclass(frozen=True)
class MegatronMemory:
    """One role's figures on stage `stage`. `tokens` is a micro-batch's whole token count, before cp cuts it."""

    shape: ModelShape
    layout: RoleLayout
    engine: EngineConfig
    tokens: int
    logit_tokens: int
    stage: int = 0
    micro_batches: int = 1
    scalar_head: bool = False

    def held(self, trained: bool) -> Items:
        """Between calls: compute weights, and for what is trained master weights and both moments."""
        dense, expert = self._parameters()
        if not trained:
            return {"parameters": 2 * (dense + expert), "optimizer": 0}
        shards = self._optimizer_shards()
        return {"parameters": 2 * (dense + expert), "optimizer": 12 * (dense // shards[0] + expert // shards[1])}

    def forward(self, entropy: bool = True) -> Items:
        """The peak of a pass without gradient, beyond what is held."""
        layer = self._tokens * act.layer_forward(self.shape, 2) // self.layout.mesh.axis_size("tp")
        return {"activations": layer + self._tokens * 2 * self.shape.hidden, "logits": self._logits(6)}

    def train(self) -> tuple[str, Items]:
        """The peak of forward, backward and optimizer step beyond what is held, and the moment it is at."""
        dense, expert = self._parameters()
        pp, tp = self.layout.mesh.axis_size("pp"), self.layout.mesh.axis_size("tp")
        split = tp if tp > 1 and self.engine.megatron.sequence_parallel else 1
        whole = self._tokens * act.layer_saved(self.shape, 2)
        # Without sequence parallelism norms and residuals are whole on every tp rank: 16 H bytes of a layer's figure.
        layer = (
            whole // tp
            if split > 1 or tp == 1
            else whole // tp + self._tokens * 16 * self.shape.hidden * (tp - 1) // tp
        )
        kept = self._tokens * 2 * self.shape.hidden // split
        in_flight: float = min(pp - self.stage, max(self.micro_batches, 1))
        if self.engine.megatron.vpp > 1:
            in_flight = in_flight * (1 + (pp - 1) / (pp * self.engine.megatron.vpp))
        layers = self._layers
        saved = (
            int(in_flight * layers * kept) + layer
            if self.engine.gradient_checkpointing
            else int(in_flight * layers * layer)
        )
        return "steady 1F1B", {
            "gradients": 4 * (dense + expert),
            "activations": saved + self._tokens * act.layer_working(self.shape, 2) // tp,
            "logits": self._logits(10),
        }

    @property
    def _layers(self) -> int:
        return -(-self.shape.layers // self.layout.mesh.axis_size("pp"))

    @property
    def _tokens(self) -> int:
        return self.tokens // self.layout.mesh.axis_size("cp")

    def _parameters(self) -> tuple[int, int]:
        """(dense, routed experts) parameters of this rank."""
        shape, mesh, expert = self.shape, self.layout.mesh, self.layout.expert
        pp, tp = mesh.axis_size("pp"), mesh.axis_size("tp")
        layers = (shape.params - shape.root_params - shape.routed_params) // pp
        ends = (self.stage == 0) + (self.stage == pp - 1) * (not self.scalar_head and (not shape.tied or pp > 1))
        cut = expert.axis_size("ep", "etp") if expert is not None else 1
        return (layers + ends * shape.head_params) // tp, shape.routed_params // pp // cut

    def _optimizer_shards(self) -> tuple[int, int]:
        if not self.engine.megatron.distributed_optimizer:
            return 1, 1
        edp = self.layout.expert.axis_size("edp") if self.layout.expert is not None else 1
        return self.layout.mesh.axis_size("dp", "cp"), edp

    def _logits(self, bytes_each: int) -> int:
        if self.scalar_head or self.stage < self.layout.mesh.axis_size("pp") - 1:
            return 0
        chunk = min(self.engine.logprob_chunk_tokens, max(self.logit_tokens, 1))
        return bytes_each * chunk * self.shape.vocab // self.layout.mesh.axis_size("tp")
