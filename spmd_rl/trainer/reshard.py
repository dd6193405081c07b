"""From one layout to another: the rollout's rows go to the actor's; the actor's to a role that is laid out otherwise or
lives on another pool, and what that role made of them comes back.

The actor's pool is the batch's home. A rank of another pool holds a `Remote` in place of the step's shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmd_rl.config import Config
from spmd_rl.data.balance import Assignment, assign, consecutive
from spmd_rl.data.batch import Batch
from spmd_rl.data.order import epoch_order
from spmd_rl.data.shard import Shard
from spmd_rl.roles.model import ModelRole
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import exchange, gather, with_columns
from spmd_rl.runtime.remote import Remote, local
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.roles import role_specs

INPUTS = ("row_id", "uid", "prompts", "responses", "response_mask")
"""What a model needs to compute token columns."""

MiniBatches = Callable[[int], Sequence[Sequence[int]]]
"""Number of rows of the step -> the rows of each mini-batch."""


@dataclass(frozen=True)
class Header:
    """What everybody who has to do with some rows knows of all of them; the rows' ids are 0..N-1."""

    lengths: list[int]
    """[N] prompt + response tokens."""
    uids: Tensor
    """int64 [N]"""
    owners: list[int]
    """[N] which part of its holders' layout has the row."""

    @classmethod
    def of(cls, held: Batch | Remote, source: str, target: str, runtime: Runtime) -> "Header":
        """Told by the ranks of role `source` that hold rows; a row lives on one of them."""
        said = local(lambda rows: _row_facts(rows, runtime.layout(source).dp_rank(runtime.pool_rank)), held)
        whole = gather(said, ["row_id", "uid", "length", "owner"], runtime.bridge(source, target))
        return cls(whole["length"].tolist(), whole["uid"], whole["owner"].tolist())


def _row_facts(batch: Batch, part: int) -> Batch:
    out = with_columns(batch, ["row_id", "uid"])
    out["length"] = batch["prompts"].lengths + batch["responses"].lengths
    out["owner"] = torch.full((len(batch),), part)
    return out


def to_actor(batch: Batch | Remote, step: int, config: Config, runtime: Runtime) -> Shard | Remote:
    """Hand every row of the step to the rank of the actor's layout that works on it.

    The header (row ids, uids, lengths of all rows) is gathered first; from it every rank computes the same assignment.
    Texts and other objects stay where they are: no later phase needs them.
    """
    header = Header.of(batch, "rollout", "actor", runtime)
    layout = runtime.layout("actor")
    assignment = assign_rows(header.lengths, step, config, layout.dp_size)
    tensors = local(lambda rows: Batch(rows.rows, rows.ragged), batch)
    mine = exchange(tensors, _parts(assignment, layout), runtime.edge("rollout", "actor"), runtime.device)
    return local(lambda rows: _shard(rows, assignment, layout, header, runtime), mine)


def _shard(batch: Batch, assignment: Assignment, layout: RoleLayout, header: Header, runtime: Runtime) -> Shard:
    return Shard(batch, assignment, layout.dp_rank(runtime.pool_rank), header.lengths, header.uids)


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


def add_columns(
    model: ModelRole | Remote, role: str, shard: Shard | Remote, want: dict[str, str], config: Config, runtime: Runtime
) -> None:
    """Token columns of the shard's rows by a role, whatever its layout and pool; written into the shard.

    `want`: the column that the model makes -> its name in the batch. Called on the actor's pool and on the role's.
    """
    if isinstance(shard, Shard) and isinstance(model, ModelRole) and stays(role, runtime):
        found: Batch | Remote = _made(model, dealt_out(shard, role, all_at_once, config, runtime), want)
    else:
        held = local(lambda there: _once(there.batch, INPUTS, "actor", runtime), shard)
        found = ask(model, role, held, "actor", want, config, runtime)
    local(lambda there, columns: there.batch.ragged.update(columns.ragged), shard, found)


def ask(
    model: ModelRole | Remote,
    role: str,
    held: Batch | Remote,
    source: str,
    want: dict[str, str],
    config: Config,
    runtime: Runtime,
) -> Batch | Remote:
    """Token columns by a role for rows that the ranks of role `source` hold, one rank each; back on all of its ranks.

    Called on both pools. Rows come back in `row_id` order, to every rank of the part that had them.
    """
    lent, header = lend(held, role, source, all_at_once, config, runtime)
    made = local(lambda part, there: _made(there, part, want), lent, model)
    made = local(lambda rows: _once(rows, ["row_id", *rows.ragged], role, runtime), made)
    parts = range(runtime.layout(source).dp_size)
    owned = [[row for row, owner in enumerate(header.owners) if owner == part] for part in parts]
    return exchange(made, owned, runtime.edge(role, source), runtime.device)


def _made(model: ModelRole, part: Shard, want: dict[str, str]) -> Batch:
    columns = model.columns(part, list(want))
    return Batch(part.batch.rows, {want[column]: made for column, made in columns.items()})


def stays(role: str, runtime: Runtime) -> bool:
    """Whether a role works on the very rows that the actor has on each rank."""
    home, layout = runtime.layout("actor"), runtime.layout(role)
    return home.pool == layout.pool and home.batch == layout.batch


def dealt_out(shard: Shard, role: str, mini_batches: MiniBatches, config: Config, runtime: Runtime) -> Shard:
    """The shard in the mini-batches and micro-batches of a role that works on the same rows."""
    if role == "actor":
        return shard
    layout, rows = runtime.layout(role), mini_batches(len(shard.lengths))
    owner = shard.assignment.dp_of_row
    return replace(shard, assignment=assign(shard.lengths, rows, layout.dp_size, _budget(role, config), owner=owner))


def lend(
    held: Batch | Remote, role: str, source: str, mini_batches: MiniBatches, config: Config, runtime: Runtime
) -> tuple[Shard | Remote, Header]:
    """Rows that the ranks of `source` hold, as `role` works on them: in its layout, mini-batches and micro-batches.

    `Remote` outside of its pool. Called on both pools.
    """
    header, layout = Header.of(held, source, role, runtime), runtime.layout(role)
    rows = mini_batches(len(header.lengths))
    assignment = assign(header.lengths, rows, layout.dp_size, _budget(role, config))
    mine = exchange(held, _parts(assignment, layout), runtime.edge(source, role), runtime.device)
    return local(lambda batch: _shard(batch, assignment, layout, header, runtime), mine), header


def lend_shard(
    shard: Shard | Remote,
    role: str,
    columns: Sequence[str],
    mini_batches: MiniBatches,
    config: Config,
    runtime: Runtime,
) -> Shard | Remote:
    """The step's rows as `role` works on them; where they do not stay, these columns of them move."""
    if isinstance(shard, Shard) and stays(role, runtime):
        return dealt_out(shard, role, mini_batches, config, runtime)
    held = local(lambda there: _once(there.batch, columns, "actor", runtime), shard)
    return lend(held, role, "actor", mini_batches, config, runtime)[0]


def _budget(role: str, config: Config) -> int:
    engine = role_specs(config)[role].engine
    assert engine is not None, f"role {role} has no engine"
    return engine.max_tokens_per_micro_batch


def all_at_once(rows: int) -> list[list[int]]:
    """One mini-batch of all rows."""
    return [list(range(rows))]


def _once(batch: Batch, columns: Sequence[str], role: str, runtime: Runtime) -> Batch:
    """Some columns of the rows that this rank holds, none where another rank of the layout holds the same rows."""
    part = with_columns(batch, columns)
    return part if runtime.layout(role).collects(runtime.pool_rank) else part.select([])


def _parts(assignment: Assignment, layout: RoleLayout) -> list[list[int]]:
    """Row ids that each part of the layout works on."""
    return [assignment.rows(dp) for dp in range(layout.dp_size)]
