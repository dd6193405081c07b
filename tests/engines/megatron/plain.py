"""What transformers alone makes of the rows, one at a time: what every layout must agree with."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spmd_rl.data.batch import Batch
from spmd_rl.data.routes import COLUMN
from spmd_rl.models.checkpoint import Checkpoint
from spmd_rl.models.names import exports
from tests.engines.megatron.ranks import TEMPERATURE, batch


@dataclass
class Plain:
    """Columns a row; loss and gradient (by checkpoint name) of all rows."""

    columns: dict[str, list[Tensor]]
    loss: float
    gradient: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]
    """As the folder has them."""
    differs: float = 0.0
    """Of the experts that were forced, the share that the routers would not have chosen."""


class Forced:
    """Has the routers of a plain model choose what it is told, for one row at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.row = torch.empty(0)
        self.differs: list[bool] = []
        gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        for place, gate in enumerate(gates):
            gate.forward = partial(self._forward, gate, place)

    def _forward(self, gate: Any, place: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last = torch.tensor([[3, 0]])  # of the last token, which nobody attends to: any will do
        chosen = torch.cat([self.row[:, place].long(), last])
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        own = logits.topk(gate.top_k).indices
        self.differs += [c not in mine for mine, given in zip(own[:-1], chosen[:-1], strict=True) for c in given]
        weights = logits.exp().gather(1, chosen)
        whole = weights.sum(-1, keepdim=True) if gate.norm_topk_prob else logits.exp().sum(-1, keepdim=True)
        return logits, weights / whole, chosen


def plain_transformers(folder: Path, rows: Batch | None = None) -> Plain:
    """The objective of `ranks` in float64 (experts: float32, all that transformers' products of theirs can do)."""
    dtype = torch.float32 if "moe" in AutoConfig.from_pretrained(folder).model_type else torch.float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    rows = batch() if rows is None else rows
    forced = Forced(model) if COLUMN in rows else None
    routes = rows[COLUMN].rows() if forced is not None else [None] * len(rows)
    triples = zip(rows["prompts"].rows(), rows["responses"].rows(), rows["weights"].rows(), strict=True)
    columns: dict[str, list[Tensor]] = {"log_probs": [], "entropy": [], "sum_pi_squared": []}
    total = 0.0
    for (prompt, response, weights), route in zip(triples, routes, strict=True):
        if forced is not None:
            forced.row = route
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        every = logits.log_softmax(-1)
        chosen = every.gather(1, response[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        loss = (weights * chosen).sum() + 0.1 * entropy.square().sum()
        loss.backward()
        total += loss.item()
        columns["log_probs"].append(chosen.detach().double())
        columns["entropy"].append(entropy.detach().double())
        columns["sum_pi_squared"].append(every.exp().square().sum(-1).detach().double())
    parameters = dict(model.named_parameters())
    gradient = {e.name: e.make([parameters[s].grad for s in e.sources]) for e in exports(model)}  # type: ignore[misc]
    checkpoint = Checkpoint(folder)
    weights_of = {name: checkpoint._files[name].get_tensor(name) for name in checkpoint.keys()}  # noqa: SIM118
    norm = torch.cat([g.flatten() for g in gradient.values()]).norm().item()
    differs = torch.tensor(forced.differs).float().mean().item() if forced is not None else 0.0
    return Plain(columns, total, gradient, norm, weights_of, differs)
