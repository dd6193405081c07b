"""The step's metrics from what the ranks hold, under verl's names."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import StepResult
from spmd_rl.observe.metrics import Partial, batch_metrics, finish, merge
from spmd_rl.roles.model import merge_over
from spmd_rl.runtime.bridge import Bridge
from spmd_rl.runtime.exchange import gather, with_columns
from spmd_rl.runtime.remote import Remote, local

SHOWN = ("row_id", "uid", "sample", "begun_at", "score", "finished", "prompt", "text", "error", "ground_truth")
"""Columns of a shown reply."""


def step_metrics(
    shard: Shard,
    measured: Partial,
    config: Config,
    dp_group: ProcessGroup,
) -> dict[str, float]:
    """Batch metrics merged over the dp ranks."""
    batch = shard.batch
    mine = batch_metrics(
        batch["score"],
        batch["responses"].lengths,
        batch["prompts"].lengths,
        config.data.max_response_length,
        config.data.max_prompt_length,
        rewards_N=batch["token_level_rewards"].row_sums(),
        advantages_T=_counted(batch, "advantages"),
        returns_T=_counted(batch, "returns"),
        values_T=_counted(batch, "values"),
    )
    return finish(merge_over(mine | measured, dp_group))


def update_metrics(results: Sequence[StepResult], role: str) -> dict[str, float]:
    """Means over a step's optimizer steps; `skipped_updates` counts those with a gradient that was not finite."""
    merged = merge([r.partial for r in results])
    count = max(1, len(results))
    # a mini-batch's loss is a sum of shares; a step's is the mean of its mini-batches
    metrics = {name: value / (count if merged[name].kind == "sum" else 1) for name, value in finish(merged).items()}
    metrics[f"{role}/loss"] = sum(r.loss for r in results) / count
    metrics[f"{role}/grad_norm"] = sum(r.grad_norm for r in results) / count
    metrics[f"{role}/lr"] = results[-1].lr if results else 0.0
    metrics[f"{role}/skipped_updates"] = float(sum(r.skipped for r in results))
    return metrics


def _counted(batch: Batch, name: str) -> Any:
    if name not in batch:
        return None
    column: Ragged = batch[name]
    return column.values[batch["response_mask"].values > 0]


def sample_rows(batch: Batch | Remote, limit: int, bridge: Bridge) -> list[dict[str, Any]]:
    """Up to `limit` (-1: all) rows of the step as dicts for the samples file, in `row_id` order, on every rank."""
    whole = gather(local(partial(_first_rows, limit=limit), batch), SHOWN, bridge)
    count = len(whole) if limit < 0 else min(limit, len(whole))
    return [
        {
            "uid": int(whole["uid"][i]),
            "sample": int(whole["sample"][i]),
            "prompt": whole["prompt"][i],
            "response": whole["text"][i],
            "ground_truth": whole["ground_truth"][i],
            "score": float(whole["score"][i]),
            "finished": bool(whole["finished"][i]),
            "begun_at": int(whole["begun_at"][i]),
            **({"error": whole["error"][i]} if whole["error"][i] else {}),
        }
        for i in range(count)
    ]


def _first_rows(batch: Batch, limit: int) -> Batch:
    return with_columns(batch, SHOWN).select(range(len(batch) if limit < 0 else min(len(batch), limit)))
