"""Roles that hold a trained or frozen model on an engine: actor, ref (and critic, teacher)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.data.batch import Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import Engine, Objective, StepResult
from spmd_rl.observe.metrics import Partial, merge_packed, pack


class ModelRole:
    """A model on its layout: token columns of a shard, and optimizer steps over its mini-batches."""

    def __init__(self, name: str, engine: Engine, dp_group: ProcessGroup) -> None:
        """`dp_group`: the ranks that hold the other parts of the batch (this rank's own place on the other axes)."""
        self.name, self.engine, self.dp_group = name, engine, dp_group

    def columns(self, shard: Shard, want: Sequence[str]) -> dict[str, Ragged]:
        """Token columns (`log_probs`, `entropy`, `values` …) of all rows of the shard, without gradient."""
        return self.engine.forward(shard.batch, shard.all_micro_batches(), want)

    def update(self, shard: Shard, mini: int, objective: Objective) -> StepResult:
        """One optimizer step over mini-batch `mini`; the loss and the metrics of the result are of all dp ranks."""
        result = self.engine.train(shard.batch, shard.micro_batches(mini), objective)
        result.partial = merge_over(result.partial, self.dp_group)
        result.loss = sum_over(torch.tensor([result.loss], dtype=torch.float64), self.dp_group).item()
        return result


def merge_over(partial: Partial, group: ProcessGroup) -> Partial:
    """Merge metrics over the ranks of `group`, which all hold the same names."""
    mine = torch.from_numpy(pack(partial))
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return merge_packed(partial, torch.stack(everyone).numpy())


def sum_over(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of `group`, added up in rank order so that every rank has the same bits."""
    everyone = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(everyone, x, group=group)
    return torch.stack(everyone).sum(0)
