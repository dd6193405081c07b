"""What transformers alone makes of the rows, one at a time: what every layout must agree with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

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


def plain_transformers(folder: Path) -> Plain:
    """The objective of `ranks` in float64 (experts: float32, all that transformers' products of theirs can do)."""
    dtype = torch.float32 if "moe" in AutoConfig.from_pretrained(folder).model_type else torch.float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    rows = batch()
    triples = zip(rows["prompts"].rows(), rows["responses"].rows(), rows["weights"].rows(), strict=True)
    columns: dict[str, list[Tensor]] = {"log_probs": [], "entropy": [], "sum_pi_squared": []}
    total = 0.0
    for prompt, response, weights in triples:
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
    return Plain(columns, total, gradient, norm, weights_of)
