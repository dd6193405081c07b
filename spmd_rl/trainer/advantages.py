"""Phase 6: advantages over the whole step's batch, the same on every rank.

Every rank gathers the columns that the estimator names for all N rows, computes the advantages of all of them with the
same pure function, and keeps its own rows': so they do not depend on the layout.

Shapes: N rows of the step, L longest response, K reward functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algorithms.advantages import COLUMNS, Estimator, advantage_estimator
from spmd_rl.algorithms.kl import kl_penalty
from spmd_rl.algorithms.masked import group_index, masked_mean
from spmd_rl.config import Config, ConfigError
from spmd_rl.config.run import AlgorithmConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.observe.metrics import Partial, mean
from spmd_rl.runtime.exchange import gather
from spmd_rl.topology.roles import role_specs


def configured_estimator(config: Config) -> Estimator:
    """`algorithm.adv_estimator`'s. ConfigError when there is none of that name, or nobody makes a column it needs."""
    name = config.algorithm.adv_estimator
    estimator = advantage_estimator(name)
    if "values" in estimator.needs and "critic" not in role_specs(config):
        raise ConfigError(f"algorithm.adv_estimator={name} needs values, and only `gae` brings a critic into the run")
    return estimator


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
    per_row = masked_mean(Ragged(kl, responses.lengths).padded(), batch["response_mask"].padded(), dim=-1)
    partial = {"actor/reward_kl_penalty": mean(float(per_row.sum()), len(per_row))}
    return Ragged(rewards - kl_coef * kl, responses.lengths), partial


def add_advantages(
    shard: Shard,
    estimator: Estimator,
    algorithm: AlgorithmConfig,
    dp_group: ProcessGroup,
    reward_names: Sequence[str] = (),
) -> None:
    """Write `advantages` and `returns` [tokens] into the shard's batch, from its `token_level_rewards`.

    `reward_names`: the reward functions in the config's order, which is that of their weights.
    """
    batch = shard.batch
    rewards = [f"reward/{name}" for name in reward_names]
    find = _scalar if estimator.scalar else _per_token
    batch["advantages"], batch["returns"] = find(batch, estimator, algorithm, dp_group, rewards)


def _scalar(
    batch: Batch, estimator: Estimator, algorithm: AlgorithmConfig, dp_group: ProcessGroup, rewards: list[str]
) -> tuple[Ragged, Ragged]:
    """One number a row is gathered, one comes back, at each of its counted tokens."""
    mask: Ragged = batch["response_mask"]
    table = Batch.empty_like(len(batch))
    for name in ("row_id", "uid", *_row_columns(batch, rewards)):
        table[name] = batch[name]
    table["scores"], table["lengths"] = batch["token_level_rewards"].row_sums(), mask.row_sums()
    whole = gather(table, [str(name) for name in table.rows.keys()], dp_group)  # noqa: SIM118 - a TensorDict
    columns = {name: whole[name] for name in ("scores", "lengths")} | _of_rows(whole, rewards)
    advantages_N = estimator.per_row(**columns, **_settings(algorithm))
    mine = advantages_N[batch["row_id"]].float()  # the whole batch is in row_id order, and row ids are 0..N-1
    advantages = Ragged(mine.repeat_interleave(mask.lengths) * mask.values, mask.lengths)
    return advantages, advantages


def _per_token(
    batch: Batch, estimator: Estimator, algorithm: AlgorithmConfig, dp_group: ProcessGroup, rewards: list[str]
) -> tuple[Ragged, Ragged]:
    """The token columns that the estimator names are gathered and padded, [N, L] each."""
    tokens = [c for c in (*estimator.needs, *estimator.may_use) if c in batch.ragged]
    names = ["uid", "token_level_rewards", "response_mask", *tokens, *_row_columns(batch, rewards)]
    whole = gather(batch, names, dp_group)
    mask: Ragged = whole["response_mask"]
    width = int(mask.lengths.max())
    padded = {name: column.padded(0.0, width) for name, column in whole.ragged.items()}
    results = estimator(**padded, **_of_rows(whole, rewards), **_settings(algorithm))
    mine, lengths = batch["row_id"], batch["response_mask"].lengths
    advantages, returns = (Ragged.from_padded(x[mine].float(), lengths) for x in results)
    return advantages, returns


def _row_columns(batch: Batch, rewards: list[str]) -> list[str]:
    """Columns with one value a row that an estimator may name."""
    return [name for name in (*COLUMNS, *rewards) if name in batch.rows.keys()]  # noqa: SIM118 - a TensorDict


def _of_rows(whole: Batch, rewards: list[str]) -> dict[str, Tensor]:
    """`group`, `rewards` [N, K] and the other columns of whole rows. Replies of one turn are their own trajectories."""
    columns = {"trajectory": whole["row_id"], "turn": torch.zeros_like(whole["row_id"])}
    columns |= {name: whole[name] for name in _row_columns(whole, [])}
    columns.pop("lengths", None)
    columns["group"] = group_index(whole["uid"])
    if rewards:
        columns["rewards"] = torch.stack([whole[name] for name in rewards], dim=1)
    return columns


def _settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
    }
    if algorithm.gdpo_weights:
        settings["weights"] = algorithm.gdpo_weights
    return settings
