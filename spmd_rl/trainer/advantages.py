"""Phase 6: advantages over the whole step's batch, the same on every rank.

Every rank gathers the columns that the estimator names for all N rows, computes the advantages of all of them with the
same pure function, and keeps its own rows': so they do not depend on the layout.

Shapes: N rows of the step, L longest response.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algorithms.advantages import Estimator
from spmd_rl.algorithms.kl import kl_penalty
from spmd_rl.algorithms.masked import group_index
from spmd_rl.config.run import AlgorithmConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.observe.metrics import Partial, mean
from spmd_rl.runtime.exchange import gather


def token_level_rewards(batch: Batch, algorithm: AlgorithmConfig, kl_coef: float) -> tuple[Ragged, Partial]:
    """A row's score at its last token, less the KL penalty where asked for; and this rank's part of the KL metric."""
    responses: Ragged = batch["responses"]
    rewards = torch.zeros(len(responses.values))
    ends = responses.lengths.cumsum(0) - 1
    there = responses.lengths > 0
    rewards[ends[there]] = batch["score"][there]
    if not algorithm.use_kl_in_reward:
        return Ragged(rewards, responses.lengths), {}
    mask = batch["response_mask"].values
    kl = kl_penalty(batch["old_log_probs"].values, batch["ref_log_probs"].values, algorithm.kl_penalty) * mask
    per_row = Ragged(kl, responses.lengths).row_sums() / Ragged(mask, responses.lengths).row_sums().clamp(min=1)
    partial = {"actor/reward_kl_penalty": mean(float(per_row.sum()), len(per_row))}
    return Ragged(rewards - kl_coef * kl, responses.lengths), partial


def add_advantages(
    shard: Shard, estimator: Estimator, algorithm: AlgorithmConfig, dp_group: ProcessGroup
) -> None:
    """Write `advantages` and `returns` [tokens] into the shard's batch, from its `token_level_rewards`."""
    batch = shard.batch
    if estimator.scalar:
        batch["advantages"] = batch["returns"] = _scalar(batch, estimator, algorithm, dp_group)
    else:
        batch["advantages"], batch["returns"] = _per_token(batch, estimator, algorithm, dp_group)


def _settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
    }
    if algorithm.gdpo_weights:
        settings["weights"] = torch.tensor(algorithm.gdpo_weights)
    return settings


def _scalar(
    batch: Batch, estimator: Estimator, algorithm: AlgorithmConfig, dp_group: ProcessGroup
) -> Ragged:
    mask: Ragged = batch["response_mask"]
    table = Batch.empty_like(len(batch))
    for name in ("row_id", "uid"):
        table[name] = batch[name]
    table["scores"] = batch["token_level_rewards"].row_sums()
    table["lengths"] = mask.row_sums()
    for name in _row_columns(batch):
        table[name] = batch[name]
    whole = gather(table, list(table.rows.keys()), dp_group)
    columns = {name: whole[name] for name in whole.rows.keys()}
    columns["rewards"] = _stack_rewards(whole)
    advantages_N = estimator.per_row(group=group_index(whole["uid"]), **columns, **_settings(algorithm))
    place = {int(r): i for i, r in enumerate(whole["row_id"].tolist())}
    mine = advantages_N[[place[int(r)] for r in batch["row_id"].tolist()]].float()
    return Ragged(mine.repeat_interleave(mask.lengths) * mask.values, mask.lengths)


def _per_token(
    batch: Batch, estimator: Estimator, algorithm: AlgorithmConfig, dp_group: ProcessGroup
) -> tuple[Ragged, Ragged]:
    optional = [name for name in estimator.may_use if name in batch.ragged]
    required = [name for name in estimator.needs if name in batch.ragged]
    names = ["uid", "token_level_rewards", "response_mask", *required, *optional, *_row_columns(batch)]
    whole = gather(batch, names, dp_group)
    width = int(whole["response_mask"].lengths.max())
    padded: dict[str, Tensor] = {name: column.padded(0.0, width) for name, column in whole.ragged.items()}
    columns = {name: whole[name] for name in whole.rows.keys() if name not in ("row_id", "uid")}
    columns["rewards"] = _stack_rewards(whole)
    results = estimator(group=group_index(whole["uid"]), **padded, **columns, **_settings(algorithm))
    place = {int(r): i for i, r in enumerate(whole["row_id"].tolist())}
    mine = [place[int(r)] for r in batch["row_id"].tolist()]
    lengths = batch["response_mask"].lengths
    advantages, returns = (Ragged.from_padded(x[mine].float(), lengths) for x in results)
    return advantages, returns


def _row_columns(batch: Batch) -> list[str]:
    return [n for n in batch.rows.keys() if n.startswith("reward/") or n == "reward_baselines"]


def _stack_rewards(whole: Batch) -> Tensor:
    """Each reward function's own score: [N, K]."""
    names = [n for n in whole.rows.keys() if n.startswith("reward/")]
    return torch.stack([whole[n] for n in names], dim=1) if names else whole["scores"][:, None]
