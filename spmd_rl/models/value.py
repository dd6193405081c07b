"""The value model: a causal model's decoder with a scalar head, one value for each response token.

Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347. Shapes: S tokens of this rank (packed rows,
see packing.py), H hidden size, R' asked-for positions.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.models.attention import NAME, check_attention
from spmd_rl.models.checkpoint import Checkpoint
from spmd_rl.models.packing import Packing

HEAD = "score"
"""The head's name, as in transformers' sequence and token classifiers, whose folders can be a critic's start."""
IGNORED = ("lm_head", f"{HEAD}.bias")
"""What a start may hold that a value model has no place for."""


class ValueModel(nn.Module):
    """Holds the decoder as `model` and the head as `score` [1, H]."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: a causal LM (its language-model head is left out)."""
        super().__init__()
        check_attention(model.config)
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"ValueModel: build the model with attention {NAME!r}, it has {model.config._attn_implementation!r}"
            )
        self.model = model.get_decoder()
        width = model.get_output_embeddings().weight.shape[1]
        self.score = nn.Linear(width, 1, bias=False, device=model.device, dtype=model.dtype)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, packing: Packing, positions: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        """`values` [R'] at the places `positions` of input_ids [S], float32 (float64 for a float64 model): what is
        expected of a reply before its next token is chosen.

        Takes the arguments of `Policy.forward` and leaves those of the log-probs aside. R' may be 0.
        """
        hidden_1SH = self.model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packing=packing
        ).last_hidden_state
        values = self.score(hidden_1SH[0].index_select(0, positions)).sum(-1)  # of one; a view would have no FSDP hook
        return {"values": values if values.dtype == torch.float64 else values.float()}

    @torch.no_grad()
    def zero_head(self) -> None:
        """A fresh head expects nothing: the first advantages are then those of the rewards alone."""
        nn.init.zeros_(self.score.weight)


def has_head(folder: Path | None) -> bool:
    """Whether a model folder holds a value head."""
    return folder is not None and f"{HEAD}.weight" in Checkpoint(folder).keys()  # noqa: SIM118 - not a dict  # noqa: SIM118 - not a dict
