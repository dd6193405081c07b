"""From one layout to another: the rollout's rows go to the actor's; the actor's to a role that is laid out otherwise,
and what that role made of them comes back.
"""

from collections.abc import Sequence
from dataclasses import replace

from spmd_rl.config import Config
from spmd_rl.data.balance import Assignment, assign, consecutive
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.order import epoch_order
from spmd_rl.data.shard import Shard
from spmd_rl.roles.model import ModelRole
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import exchange, gather
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.roles import role_specs

INPUTS = ("row_id", "uid", "prompts", "responses", "response_mask")
"""What a model needs to compute token columns."""


def to_actor(batch: Batch, step: int, config: Config, runtime: Runtime) -> Shard:
    """Hand every row of the step to the rank of the actor's layout that works on it.

    The header (row ids, uids, lengths of all rows) is gathered first; from it every rank computes the same assignment.
    Texts and other objects stay where they are: no later phase needs them.
    """
    header = Batch.empty_like(len(batch))
    for name in ("row_id", "uid"):
        header[name] = batch[name]
    header["length"] = batch["prompts"].lengths + batch["responses"].lengths
    whole = gather(header, ["row_id", "uid", "length"], runtime.everyone)
    lengths = whole["length"].tolist()
    layout = runtime.layout("actor")
    assignment = assign_rows(lengths, step, config, layout.dp_size)
    mine = exchange(Batch(batch.rows, batch.ragged), _wanted(assignment, layout), runtime.everyone)
    return Shard(mine, assignment, layout.dp_rank(runtime.pool_rank), lengths, whole["uid"])


def assign_rows(lengths: list[int], step: int, config: Config, dp_size: int) -> Assignment:
    """Mini-batches are whole prompts in `row_id` order (or in a seeded order an epoch), whatever the world size."""
    actor, n = config.actor, config.rollout.n
    mini_batches: list[list[int]] = []
    for epoch in range(actor.ppo_epochs):
        parts = consecutive(len(lengths), actor.ppo_mini_batch_size * n)
        if actor.shuffle:
            key = step * actor.ppo_epochs + epoch
            prompts = epoch_order(len(lengths) // n, config.trainer.seed, key).tolist()
            rows = [p * n + s for p in prompts for s in range(n)]
            parts = [[rows[i] for i in part] for part in parts]
        mini_batches += parts
    return assign(lengths, mini_batches, dp_size, actor.engine.max_tokens_per_micro_batch)


def columns_of(
    role: ModelRole, shard: Shard, want: Sequence[str], config: Config, runtime: Runtime
) -> dict[str, Ragged]:
    """Token columns of the shard's rows by `role`, whatever its layout."""
    if role.name == "actor":
        return role.columns(shard, want)
    everything = [list(range(len(shard.lengths)))]
    lent = lend(shard, role.name, INPUTS, everything, config, runtime)
    return _take_back(role.columns(lent, want), lent, shard, role.name, runtime)


def lend(
    shard: Shard,
    role: str,
    columns: Sequence[str],
    mini_batches: Sequence[Sequence[int]],
    config: Config,
    runtime: Runtime,
) -> Shard:
    """The step's rows as `role` works on them: in its layout, its mini-batches and its micro-batches.

    Rows move only when its batch is laid out otherwise than the actor's; then `columns` of them do.
    """
    home, layout = runtime.layout("actor"), runtime.layout(role)
    engine = role_specs(config)[role].engine
    assert engine is not None, f"role {role} has no engine"
    stays = layout.batch == home.batch
    owner = shard.assignment.dp_of_row if stays else None
    budget = engine.max_tokens_per_micro_batch
    assignment = assign(shard.lengths, mini_batches, layout.dp_size, budget, owner=owner)
    if stays:
        return replace(shard, assignment=assignment)
    mine = exchange(_once(shard.batch, columns, home, runtime), _wanted(assignment, layout), runtime.everyone)
    return Shard(mine, assignment, layout.dp_rank(runtime.pool_rank), shard.lengths, shard.uids)


def _take_back(columns: dict[str, Ragged], lent: Shard, shard: Shard, role: str, runtime: Runtime) -> dict[str, Ragged]:
    """The columns for the rows of the actor's shard."""
    if lent.batch is shard.batch:
        return columns
    made = Batch(lent.batch.rows, columns)
    part = _once(made, ["row_id", *columns], runtime.layout(role), runtime)
    return exchange(part, _wanted(shard.assignment, runtime.layout("actor")), runtime.everyone).ragged


def _once(batch: Batch, columns: Sequence[str], layout: RoleLayout, runtime: Runtime) -> Batch:
    """Some columns of the rows that this rank holds, none where another rank of the layout holds the same rows."""
    part = Batch.empty_like(len(batch))
    for name in columns:
        part[name] = batch[name]
    return part if layout.collects(runtime.pool_rank) else part.select([])


def _wanted(assignment: Assignment, layout: RoleLayout) -> list[list[int]]:
    """Row ids that each pool rank works on."""
    by_dp = [assignment.rows(dp) for dp in range(layout.dp_size)]
    return [by_dp[layout.dp_rank(r)] for r in range(layout.size)]
