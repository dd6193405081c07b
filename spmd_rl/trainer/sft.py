"""Supervised fine-tuning: cross-entropy on the replies, on the same engine and in the same loop as RL.

Shapes: N conversations of a step; R tokens from each row's first counted one on, packed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algorithms.aggregation import BatchTotals, aggregate
from spmd_rl.algorithms.masked import row_of
from spmd_rl.config import Config
from spmd_rl.data.balance import assign, consecutive
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.chat import ChatRow, ChatRows
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import Outputs
from spmd_rl.observe.metrics import Partial, finish, mean, merge, spread, total
from spmd_rl.observe.tracking import Trackers
from spmd_rl.roles.model import ModelRole, sum_over
from spmd_rl.roles.residency import Residency
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.loop import Loop
from spmd_rl.trainer.measure import update_metrics
from spmd_rl.trainer.objective import mini_batch_totals


class SftTrainer(Loop):
    """A step: the next conversations, one optimizer step for every `actor.ppo_mini_batch_size` of them."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        actor: ModelRole,
        residency: Residency,
        rows: PromptOrder[ChatRow],
        validation: ChatRows | None,
        trackers: Trackers,
        checkpointer: Checkpointer,
        total_steps: int,
        fingerprint: dict[str, Any],
    ) -> None:
        engines = {"actor": actor.engine}
        super().__init__(config, runtime, engines, residency, rows, trackers, checkpointer, total_steps, fingerprint)
        self.actor, self.rows, self.validation = actor, rows, validation

    def step(self, step: int) -> dict[str, float]:
        """Train on the next conversations; the loss is the mean over the counted tokens of each mini-batch."""
        rows = self.rows.take()
        shard = self.shard(rows, self.config.actor.ppo_mini_batch_size)
        results = []
        with self.phase("update_actor"):
            for mini in range(shard.mini_batches):
                objective = CrossEntropy(totals_of(shard, mini, self.actor.dp_group))
                results.append(self.actor.update(shard, mini, objective))
        return finish(row_metrics(rows)) | update_metrics(results, "sft")

    def validate(self, step: int) -> dict[str, float]:
        """Mean loss of the counted tokens of the validation conversations."""
        if self.validation is None:
            return {}
        rows = [self.validation.at(i) for i in range(len(self.validation))]
        shard = self.shard(rows, len(rows))
        with self.timer.phase("testing"), self.residency.hold("old_log_prob"):
            log_probs = self.actor.columns(shard, ["log_probs"])["log_probs"].values
        mask = shard.batch["response_mask"].values
        mine = torch.stack([-(log_probs.double() * mask).sum(), mask.double().sum()])
        loss, tokens = sum_over(mine, self.actor.dp_group).tolist()
        return {"val-core/sft/loss": loss / tokens}

    def shard(self, rows: Sequence[ChatRow], mini_batch_rows: int) -> Shard:
        """This dp rank's part of some conversations. Every rank has read all of them, so none travels."""
        layout = self.runtime.layout("actor")
        lengths = [len(row.input_ids) for row in rows]
        minis = consecutive(len(rows), mini_batch_rows)
        assignment = assign(lengths, minis, layout.dp_size, self.config.actor.engine.max_tokens_per_micro_batch)
        dp_rank = layout.dp_rank(self.runtime.pool_rank)
        batch = chat_batch(rows, assignment.rows(dp_rank))
        return Shard(batch, assignment, dp_rank, lengths, torch.tensor([row.uid for row in rows]))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step: its pieces on the device, its time and peak taken."""
        with self.timer.phase(name), self.residency.hold(name), self.peaks.phase(name):
            yield


class CrossEntropy:
    """An engine's `Objective`: minus the mean log-prob of the mini-batch's counted tokens."""

    def __init__(self, totals: BatchTotals) -> None:
        self.totals = totals

    def __call__(self, rows: Batch, outputs: Outputs) -> tuple[Tensor, Partial]:
        log_probs, lengths = outputs["log_probs"], rows["response_mask"].lengths
        mask = rows["response_mask"].values.to(log_probs.device)
        row = row_of(lengths).to(log_probs.device)
        loss = aggregate(-log_probs, mask, row, len(rows), "token-mean", self.totals)
        entropy = (outputs["entropy"].detach() * mask).sum()
        return loss, {"sft/entropy": mean(float(entropy), float(mask.sum()))}


def totals_of(shard: Shard, mini: int, group: ProcessGroup) -> BatchTotals:
    """Counted tokens and rows of a mini-batch over all dp ranks."""
    return mini_batch_totals(shard.batch.select(shard.mini_rows(mini)), group)


def chat_batch(rows: Sequence[ChatRow], places: Sequence[int]) -> Batch:
    """The conversations at `places` as rows of a batch; `row_id` is the place.

    `prompts` are the tokens before the first counted one, `responses` the rest, `response_mask` the loss mask.
    """
    batch = Batch.empty_like(len(places))
    batch["row_id"] = torch.tensor(list(places), dtype=torch.int64)
    batch["uid"] = torch.tensor([rows[i].uid for i in places], dtype=torch.int64)
    starts = [rows[i].loss_mask.index(1) for i in places]
    cut = list(zip((rows[i] for i in places), starts, strict=True))
    as_int = torch.int64
    batch["prompts"] = Ragged.from_rows([torch.tensor(row.input_ids[:at]) for row, at in cut], as_int)
    batch["responses"] = Ragged.from_rows([torch.tensor(row.input_ids[at:]) for row, at in cut], as_int)
    masks = [torch.tensor(row.loss_mask[at:], dtype=torch.float32) for row, at in cut]
    batch["response_mask"] = Ragged.from_rows(masks, torch.float32)
    return batch


def row_metrics(rows: Sequence[ChatRow]) -> Partial:
    """Lengths of a step's conversations; the reply is what the loss counts."""
    replies = [sum(row.loss_mask) for row in rows]
    contexts = [len(row.input_ids) - reply for row, reply in zip(rows, replies, strict=True)]
    tokens = total(sum(len(row.input_ids) for row in rows))
    return merge(
        [spread("prompt_length", contexts), spread("response_length", replies), {"perf/total_num_tokens": tokens}]
    )
