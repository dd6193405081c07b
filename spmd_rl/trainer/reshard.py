"""From one layout to another: the rollout's rows go to the actor's; the actor's to a role that is laid out otherwise or
lives on another pool, and what that role made of them comes back.

The actor's pool is the batch's home. A rank of another pool holds a `Remote` in place of the step's shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from spmd_rl.config import Config
from spmd_rl.data.balance import Assignment, assign, consecutive
from spmd_rl.data.batch import Batch
from spmd_rl.data.order import epoch_order
from spmd_rl.data.shard import Shard
from spmd_rl.roles.model import ModelRole
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.bridge import Bridge
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
    """What everybody who has to do with a step's batch knows of it."""

    lengths: list[int]
    """[N] prompt + response tokens."""
    uids: Tensor
    """int64 [N]"""

    @classmethod
    def of(cls, batch: Batch | Remote, bridge: Bridge) -> "Header":
        """Told to every member by those who hold rows; a row lives on one of them."""
        whole = gather(local(_row_lengths, batch), ["row_id", "uid", "length"], bridge)
        return cls(whole["length"].tolist(), whole["uid"])


def _row_lengths(batch: Batch) -> Batch:
    out = with_columns(batch, ["row_id", "uid"])
    out["length"] = batch["prompts"].lengths + batch["responses"].lengths
    return out


def to_actor(batch: Batch | Remote, step: int, config: Config, runtime: Runtime) -> Shard | Remote:
    """Hand every row of the step to the rank of the actor's layout that works on it.

    The header (row ids, uids, lengths of all rows) is gathered first; from it every rank computes the same assignment.
    Texts and other objects stay where they are: no later phase needs them.
    """
    header = Header.of(batch, runtime.bridge("rollout", "actor"))
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
    role: ModelRole | Remote,
    name: str,
    shard: Shard | Remote,
    want: dict[str, str],
    config: Config,
    runtime: Runtime,
) -> None:
    """Token columns of the shard's rows by the role `name`, whatever its layout and pool; written into the shard.

    `want`: the column that the model makes -> its name in the batch. Called on the actor's pool and on the role's.
    """
    if name == "actor":
        lent = shard
    else:
        lent = lend(shard, name, INPUTS, all_at_once, config, runtime)
    made = local(lambda part, model: _made(model, part, want), lent, role)
    if isinstance(shard, Shard) and isinstance(lent, Shard) and lent.batch is shard.batch:
        found = made
    else:
        found = take_back(made, lent, shard, name, runtime)
    local(lambda here, columns: here.batch.ragged.update(columns.ragged), shard, found)


def all_at_once(rows: int) -> list[list[int]]:
    """One mini-batch of all rows."""
    return [list(range(rows))]


def _made(model: ModelRole, part: Shard, want: dict[str, str]) -> Batch:
    columns = model.columns(part, list(want))
    return Batch(part.batch.rows, {want[column]: made for column, made in columns.items()})


def lend(
    shard: Shard | Remote,
    role: str,
    columns: Sequence[str],
    mini_batches: MiniBatches,
    config: Config,
    runtime: Runtime,
) -> Shard | Remote:
    """The step's rows as `role` works on them: in its layout, its mini-batches and its micro-batches; `Remote`
    outside of its pool.

    Rows move only when its batch is laid out otherwise than the actor's, or lies elsewhere; then `columns` of them do.
    """
    edge, home = runtime.edge("actor", role), runtime.layout("actor")
    layout, engine = runtime.layout(role), role_specs(config)[role].engine
    assert engine is not None, f"role {role} has no engine"
    stays = not edge.plan.crosses and layout.batch == home.batch
    held = local(lambda here: _once(here.batch, columns, home, runtime), shard)
    header = Header(shard.lengths, shard.uids) if isinstance(shard, Shard) else None
    if edge.plan.crosses:
        header = Header.of(held, edge.bridge)
    assert header is not None, "inside a pool the shard is here"
    owner = shard.assignment.dp_of_row if stays and isinstance(shard, Shard) else None
    budget = engine.max_tokens_per_micro_batch
    assignment = assign(header.lengths, mini_batches(len(header.lengths)), layout.dp_size, budget, owner=owner)
    if stays and isinstance(shard, Shard):
        return replace(shard, assignment=assignment)
    mine = exchange(held, _parts(assignment, layout), edge, runtime.device)
    return local(lambda rows: _shard(rows, assignment, layout, header, runtime), mine)


def take_back(
    made: Batch | Remote, lent: Shard | Remote, shard: Shard | Remote, role: str, runtime: Runtime
) -> Batch | Remote:
    """Columns that `role` has made of the rows lent to it, for the rows of the actor's shard."""
    edge = runtime.edge(role, "actor")
    part = local(lambda rows: _once(rows, ["row_id", *rows.ragged], runtime.layout(role), runtime), made)
    owners = shard.assignment.dp_of_row if isinstance(shard, Shard) else []
    owners = edge.bridge.say(owners, edge.plan.pools[1].ranks[0]) if edge.plan.crosses else owners
    home = runtime.layout("actor")
    parts = [[row for row, owner in enumerate(owners) if owner == dp] for dp in range(home.dp_size)]
    return exchange(part, parts, edge, runtime.device)


def _once(batch: Batch, columns: Sequence[str], layout: RoleLayout, runtime: Runtime) -> Batch:
    """Some columns of the rows that this rank holds, none where another rank of the layout holds the same rows."""
    part = with_columns(batch, columns)
    return part if layout.collects(runtime.pool_rank) else part.select([])


def _parts(assignment: Assignment, layout: RoleLayout) -> list[list[int]]:
    """Row ids that each part of the layout works on."""
    return [assignment.rows(dp) for dp in range(layout.dp_size)]
