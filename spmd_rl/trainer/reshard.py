"""From the rollout's layout to the actor's: who works on which row, and the exchange that takes it there."""

from spmd_rl.config import Config
from spmd_rl.data.balance import Assignment, assign, consecutive
from spmd_rl.data.batch import Batch
from spmd_rl.data.order import epoch_order
from spmd_rl.data.shard import Shard
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import exchange, gather


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
    by_dp = [assignment.rows(dp) for dp in range(layout.dp_size)]
    wanted = [by_dp[layout.dp_rank(r)] for r in range(layout.size)]
    mine = exchange(Batch(batch.rows, batch.ragged), wanted, runtime.everyone)
    return Shard(mine, assignment, layout.dp_rank(runtime.pool_rank), lengths, whole["uid"])


def assign_rows(lengths: list[int], step: int, config: Config, dp_size: int) -> Assignment:
    """Mini-batches are whole prompts in `row_id` order (or in a seeded order, one an epoch), whatever the world size."""
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

