"""A MoE layer's own experts in two tensors, and what is measured and replayed of their routing.

megatron-core's grouped experts need Transformer Engine or grouped_gemm; its sequential ones run a loop over modules.
These use torch's grouped product where it runs (bfloat16 on CUDA) and a loop of products elsewhere.

Shapes: N tokens sent to this rank's experts, sorted by expert, E local experts, H hidden size, I their width / etp.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_rl.models.routing import replayed
from spmd_rl.runtime.mcore import ProcessGroupCollection, TransformerConfig


class Experts(nn.Module):
    """Takes the place of megatron-core's expert modules behind its token dispatcher, which moves the tokens."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        where = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight1 = nn.Parameter(torch.empty(num_local_experts, 2 * width, config.hidden_size, **where))
        self.weight2 = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, width, **where))
        for weight in (self.weight1, self.weight2):
            weight.allreduce = False  # type: ignore[attr-defined] # megatron-core: sum its gradient over edp, not dp

    def forward(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> tuple[Tensor, None]:
        """[N, H] and the weight of each token's choice [N] -> ([N, H], no bias)."""
        counts = tokens_per_expert.tolist()
        gate, up = _product(tokens_NH, self.weight1, counts).chunk(2, -1)
        inner = F.silu(gate) * up * probs_N[:, None].to(gate.dtype)
        return _product(inner, self.weight2, counts), None


def _product(x_NK: Tensor, weight_EMK: Tensor, counts: list[int]) -> Tensor:
    """Each token times its expert's matrix: [N, M]."""
    if x_NK.is_cuda and x_NK.dtype == torch.bfloat16 and len(x_NK):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x_NK.device)
        return torch._grouped_mm(x_NK, weight_EMK.transpose(1, 2), offs=ends)
    parts = [part @ w.T for part, w in zip(x_NK.split(counts), weight_EMK, strict=True)]
    return torch.cat(parts)


class Routing:
    """Sits in a router as its `router_replay`: counts the tokens of each expert, and takes choices made elsewhere.

    Rollout routing replay (Ma et al. 2025, arXiv:2510.11370): the probabilities are the trained router's, the choice of
    experts is the rollout's.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.load = torch.zeros(experts, dtype=torch.float64, device=device)
        """Tokens sent to each expert since `take`, by this rank."""
        self.differs = torch.zeros(2, dtype=torch.float64, device=device)
        """What `replayed` counted since `take`, of this rank's tokens."""
        self.replay: Tensor | None = None
        """[tokens, k] experts to choose in the layer's next forward; None lets the router choose."""
        self.chosen: Tensor | None = None
        """[tokens, k] experts of the last forward."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """megatron-core's hook: scores [tokens, experts] -> (scores of the chosen, the chosen), [tokens, k] each."""
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.replay is not None:
            chosen, differs = replayed(chosen, self.replay)
            values = scores.gather(1, chosen)
            self.differs += differs
        self.chosen = chosen
        with torch.no_grad():
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.load)).to(self.load)
        return values, chosen

    def take(self) -> tuple[Tensor, Tensor]:
        """The load and the differences so far; counts from 0 again."""
        found = self.load, self.differs
        self.load, self.differs = torch.zeros_like(self.load), torch.zeros_like(self.differs)
        return found
