"""Memory of the FSDP2 engine on one rank: what it holds between calls, and its peak moments inside forward and train.

Master weights, gradients and AdamW's two moments are float32 shards over S = fsdp ranks. A layer's compute copy is
gathered for its own turn, the next one's buffer is already there (where S > 1: else it is only cast); the root group
(embedding, head, last norm) stays gathered from the forward to the end of the backward. As torch 2.11 and later do it.
Compared with torch.cuda.max_memory_allocated; the CUDA context and the allocator's reserve are not in it.

Legend: N parameters, R root parameters, p parameters of the largest layer, S shards, e bytes of the compute type,
T tokens of a micro-batch on this rank, L layers, V vocabulary, H hidden size.
"""

from dataclasses import dataclass

from spmd_rl.config.roles import EngineConfig
from spmd_rl.topology import activations as act
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.shape import ModelShape

Items = dict[str, int]
"""What it is for -> bytes."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "auto": 2, "fastest": 2}
WORKSPACE = 32 * 2**20
"""cuBLAS's scratch on Hopper, one for each thread that multiplies matrices (the backward has its own)."""


@dataclass(frozen=True)
class FsdpMemory:
    """One role's figures: `tokens` is T, `logit_tokens` those that need the head, `micro_batches` an optimizer step."""

    shape: ModelShape
    layout: RoleLayout
    engine: EngineConfig
    tokens: int
    logit_tokens: int
    micro_batches: int = 1
    trainable: int | None = None
    """Parameters with gradients; None means all (LoRA trains fewer)."""
    scalar_head: bool = False
    """A critic or reward model: one number a token instead of logits."""
    cuda: bool = True
    """The head and AdamW run in fused kernels, and cuBLAS has its workspaces."""

    def held(self, trained: bool) -> Items:
        """Between calls: master shards, and AdamW's moments of what is trained."""
        if self.engine.fsdp.offload_policy:
            return {"parameters": 0, "optimizer": 0}
        return {"parameters": 4 * self._n // self._s, "optimizer": 8 * self._trained // self._s if trained else 0}

    def forward(self, entropy: bool = True) -> Items:
        """The peak of a pass without gradient, beyond what is held: at its start, inside a layer, or in the head."""
        layer, root, hidden = self._e * self._p, self._gathered_root, self._hidden
        logits = self._head_forward(entropy) + self.logit_tokens * self._e * self.shape.hidden
        working = self.tokens * act.layer_forward(self.shape, self._e)
        moments: list[Items] = [
            {"gathered parameters": root + self._gather_buffer(self._root, self.shape.head_params)},
            {"gathered parameters": root + layer + self._gather_buffer(self._p), "activations": hidden + working},
            {"gathered parameters": root + self._gather_buffer(self._p), "activations": hidden, "logits": logits},
        ]
        return max(moments, key=lambda items: sum(items.values())) | self._workspaces(1)

    def train(self) -> tuple[str, Items]:
        """The peak of forward, backward and optimizer step beyond what is held, and the moment it is at."""
        moments = self.moments()
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        return moment, moments[moment] | self._workspaces(2)

    def moments(self) -> dict[str, Items]:
        """Where the peak of a training step may be."""
        return {
            "head backward": self._at_head(),
            "last layer's backward": self._at_layer(first=False),
            "first layer's backward": self._at_layer(first=True),
            "embedding's backward": self._at_embedding(),
            "root gradient's reduction": self._at_root(),
            "optimizer step": self._at_step(),
        }

    def _at_head(self) -> Items:
        """Everything is saved, no gradient of this micro-batch yet; a gather buffer of the last layer is held."""
        e = self._e
        forward = self._head_forward(entropy=True)
        backward = 0 if self.scalar_head else act.head_backward(self.shape, self._chunk, e, self.cuda)
        return {
            "gradients": self._earlier_gradients,
            "activations": self.shape.layers * self._saved + self._last_norm + 2 * self._hidden,
            "logits": max(forward, backward),
            "gathered parameters": self._gathered_root + self._gather_buffer(self._p),
        }

    def _at_layer(self, first: bool) -> Items:
        """A layer's backward: the one after it is being reduced, the one before it is being gathered."""
        e, p, layers = self._e, self._p, 1 if first else self.shape.layers
        saved = layers * self._saved
        if self.engine.gradient_checkpointing:
            saved += self.tokens * act.layer_saved(self.shape, e)
        done = self._grad_shards(self._n - self._root - p) if first else 0
        return {
            "gradients": max(self._earlier_gradients, done),
            "activations": saved + self.tokens * act.layer_working(self.shape, e) + self._hidden,
            "gathered parameters": self._gathered_root + e * p + (0 if first else self._gather_buffer(p)),
            "gradient buffers": int(self._share * (self._head_gradient + (e + self._reduce) * p)),
        }

    def _at_embedding(self) -> Items:
        """The last gradient to come: the head's and the embedding's, whole, beside the first layer's reduction."""
        buffers = self._head_gradient + self._e * self.shape.head_params + self._reduce * self._p
        return {
            "gradients": max(self._earlier_gradients, self._grad_shards(self._n - self._root)),
            "activations": self._hidden,
            "gathered parameters": self._gathered_root,
            "gradient buffers": int(self._share * buffers),
        }

    def _at_root(self) -> Items:
        """Embedding and head are reduced last: the whole gradient beside the reduction's input, or that beside its sum.

        A group of one rank copies its input divided by 1: one more temporary.
        """
        e, r = self._e, self._reduce
        copied = e + r if self._s > 1 else 0
        summed = r + r / self._s if self._s > 1 else 3 * r
        return {
            "gradients": max(self._earlier_gradients, self._grad_shards(self._n - self._root)),
            "gradient buffers": int(self._share * max(copied, summed) * self._root),
        }

    def _at_step(self) -> Items:
        """Fused, AdamW needs nothing more; else it goes parameter by parameter: a square root and its quotient."""
        largest = max(self.shape.head_params, self.shape.hidden * self.shape.intermediate)
        return {
            "gradients": self._grad_shards(self._n),
            "optimizer work": 0 if self._offloads or self.cuda else 8 * largest // self._s,
        }

    def _gather_buffer(self, group: int, largest: int = 0) -> int:
        """What a group's gathering takes beside its parameters; of one rank, the cast of the largest parameter."""
        return self._e * (group if self._s > 1 else largest)

    def _workspaces(self, threads: int) -> Items:
        return {"workspaces": threads * WORKSPACE if self.cuda else 0}

    @property
    def _share(self) -> float:
        """Of the parameters, those with gradients."""
        return self._trained / self._n

    @property
    def _head_gradient(self) -> int:
        return 0 if self.scalar_head else self._e * self.shape.head_params

    @property
    def _n(self) -> int:
        return self.shape.params - self.shape.head_params * (self.scalar_head and not self.shape.tied)

    @property
    def _root(self) -> int:
        return self.shape.head_params + self.shape.hidden if self.scalar_head else self.shape.root_params

    @property
    def _trained(self) -> int:
        return self._n if self.trainable is None else self.trainable

    @property
    def _p(self) -> int:
        return self.shape.layer_params

    @property
    def _s(self) -> int:
        return self.layout.mesh.axis_size("fsdp")

    @property
    def _e(self) -> int:
        return DTYPE_BYTES[self.engine.fsdp.param_dtype]

    @property
    def _reduce(self) -> int:
        return 2 if self.engine.fsdp.reduce_dtype == "bfloat16" else 4

    @property
    def _offloads(self) -> bool:
        return self.engine.fsdp.offload_policy

    @property
    def _chunk(self) -> int:
        return min(self.engine.logprob_chunk_tokens, max(self.logit_tokens, 1))

    @property
    def _gathered_root(self) -> int:
        return self._e * self._root

    @property
    def _hidden(self) -> int:
        return self.tokens * self._e * self.shape.hidden

    @property
    def _last_norm(self) -> int:
        return self.tokens * act.last_norm(self.shape, self._e)

    @property
    def _saved(self) -> int:
        """What one layer keeps from its forward to its backward."""
        kept = act.layer_input if self.engine.gradient_checkpointing else act.layer_saved
        return self.tokens * kept(self.shape, self._e)

    @property
    def _earlier_gradients(self) -> int:
        return self._grad_shards(self._n) if self.micro_batches > 1 else 0

    def _grad_shards(self, parameters: int) -> int:
        if self._offloads:
            return 0
        return int(4 * parameters * self._share) // self._s

    def _head_forward(self, entropy: bool) -> int:
        return 0 if self.scalar_head else act.head_forward(self.shape, self._chunk, self._e, entropy, self.cuda)
