"""What an engine is: a model held by all ranks of a pool, that computes token columns and takes optimizer steps.

Shapes: N rows of a rank's batch, R response tokens of a micro-batch (rows end to end).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.observe.metrics import Partial
from spmd_rl.weights.held import Held

Outputs = Mapping[str, Tensor]
"""Token columns of one micro-batch, [R] each: log_probs, entropy and sum_pi_squared, or values."""

Objective = Callable[[Batch, Outputs], tuple[Tensor, Partial]]
"""(rows of a micro-batch, its outputs with gradient) -> (its share of the mini-batch's loss, its metrics)."""


@dataclass
class StepResult:
    """One optimizer step: this rank's metrics, its share of the loss, the global gradient norm, whether it was made."""

    partial: Partial = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0
    skipped: bool = False
    lr: float = 0.0


class Engine(Protocol):
    """Every rank of the role's pool makes the same calls, with as many micro-batches each (empty ones pad)."""

    version: int
    """Optimizer steps taken: what a weight sync compares."""

    def forward(self, batch: Batch, micro: Sequence[Sequence[int]], want: Sequence[str]) -> dict[str, Ragged]:
        """Token columns of all rows, without gradient."""
        ...

    def train(self, batch: Batch, micro: Sequence[Sequence[int]], objective: Objective) -> StepResult:
        """Sum the objective's gradient over micro-batches and ranks, clip, and take one optimizer step."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, one at a time; all ranks must walk through it."""
        ...

    def held(self) -> list[Held] | None:
        """What this rank holds of the checkpoint's tensors, where they lie on its device; None where a tensor is
        computed (merged adapters) or lies elsewhere: then a weight sync walks through `weights`. The same list as long
        as nothing has moved. Local."""
        ...

    def state(self) -> dict[str, Any]:
        """Model, optimizer and schedule, as torch DCP saves and loads it in place."""
        ...

    def load_state(self, state: dict[str, Any], version: int) -> None:
        """Take what DCP loaded into `state()`, as it was after `version` optimizer steps."""
        ...

    def resident(self, piece: str) -> list[Tensor]:
        """What a hot swap takes off the device: this rank's local tensors of `params` or `optimizer` (state and
        gradients). Their storages are emptied and filled again, so the engine must reach them by these alone."""
        ...
