"""What is summed over ranks after the last backward, through megatron-core's `finalize_model_grads`.

Divide factors, all of them 1: `calculate_per_token_loss` with a 3-tuple loss keeps the schedules from dividing by the
number of micro-batches and from multiplying by cp, and the gradient buffers from dividing by dp·cp; the count of tokens
that megatron-core would divide by afterwards is left out here. A loss is already a share of the whole mini-batch's.
"""

from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.engines.megatron.model import Model
from spmd_rl.runtime.mcore import DistributedDataParallel, ProcessGroupCollection, finalize_model_grads


class Finalize:
    """megatron-core's `finalize_model_grads_func` of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(
        self,
        wrapped: list[DistributedDataParallel],
        num_tokens: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Sum over dp·cp and edp, norms and router over tp; then the two copies of a tied embedding."""
        finalize_model_grads(wrapped, None, self.model.groups, force_all_reduce)
        add_tied(self.model)


def add_tied(model: Model) -> None:
    """First and last stage each hold the tied embedding and found a part of its gradient: both get the sum.

    Two messages over pp: no group of their own has to be made for these two stages.
    """
    if not model.names.tied or model.stages == 1 or not (model.is_first or model.is_last):
        return
    weight = model.chunks[0].embedding.word_embeddings.weight if model.is_first else model.head_weight()
    group = model.groups.pp
    other = dist.get_global_rank(group, model.stages - 1 if model.is_first else 0)
    theirs = torch.empty_like(weight.main_grad)
    messages = [
        dist.P2POp(dist.isend, weight.main_grad, other, group),
        dist.P2POp(dist.irecv, theirs, other, group),
    ]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    weight.main_grad += theirs
