"""A role of your own: it wraps the built-in one, and takes its place.

    spmd-rl train experiment=tiny trainer.roles.reward=examples/own_role.py:brief

This one pays less for longer replies. A reward model behind an HTTP server, or a rollout that calls tools, goes the
same way: keep the methods that the trainer calls, and the columns that they write (docs/architecture.md).
"""

from collections.abc import Sequence

from spmd_rl.api import Batch, Config, Prompt, Reward, Runtime


class Brief(Reward):
    """The built-in scores, less `price` a token."""

    price = 0.01

    def score(self, batch: Batch, prompts: Sequence[Prompt], n: int) -> Batch:
        batch = super().score(batch, prompts, n)
        batch["score"] = batch["score"] - self.price * batch["responses"].lengths
        return batch


def brief(built_in: Reward, config: Config, runtime: Runtime) -> Reward:
    """What `trainer.roles.reward` names: called once on every rank, after all roles are built."""
    return Brief(built_in.scorer, built_in.tokenizer)
