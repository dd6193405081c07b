"""The scores of a step's replies: of the reward functions where the replies are, and of a reward model where there is
one, on whatever pool it lives."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.order import Rows
from spmd_rl.data.prompts import Prompt
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.reward import Reward
from spmd_rl.roles.reward_model import Questions, add_scores, questions
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.remote import Remote, here, local, on
from spmd_rl.trainer.finite import Guard
from spmd_rl.trainer.reshard import ask


class Scoring:
    """Scores batches in which the n replies to a prompt follow each other."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        reward: Reward,
        model: ModelRole | Remote | None,
        kind: Questions | None,
        phase: Callable[[str], AbstractContextManager[Guard]],
    ) -> None:
        """`kind`: how the reward model `model` is asked about a reply."""
        self.config, self.runtime, self.reward = config, runtime, reward
        self.model, self.kind, self.phase = model, kind, phase

    def __call__(self, batch: Batch | Remote, prompts: Rows[Prompt], n: int) -> Batch | Remote:
        """The batch with its scores; `prompts`: where its prompts are from."""
        return self.by_model(self.by_functions(batch, prompts, n), prompts, n)

    @on("rollout")
    def by_functions(self, batch: Batch | Remote, prompts: Rows[Prompt], n: int) -> Batch:
        """Where the replies are."""
        batch = here(batch)
        with self.phase("reward") as guard:
            batch = self.reward.score(batch, _prompts_of(batch, prompts, n), n)
            guard.check(batch, ["score"])
        return batch

    @on("rollout", "reward")
    def by_model(self, batch: Batch | Remote, prompts: Rows[Prompt], n: int) -> Batch | Remote:
        """Questions go to the reward model, if there is one, and its answers come back."""
        model, kind, reward = self.model, self.kind, self.config.reward.model
        if model is None:
            return batch
        assert kind is not None, "a reward model is asked questions"

        def asked(rows: Batch) -> Batch:
            return questions(rows, _prompts_of(rows, prompts, n), n, kind, reward.engine.max_tokens_per_micro_batch)

        with self.phase("reward") as guard:
            held = local(asked, batch)
            answers = ask(model, "reward", held, "rollout", {kind.column: kind.column}, self.config, self.runtime)
            local(partial(add_scores, kind=kind, weight=reward.weight), batch, answers)
            local(lambda rows: guard.check(rows, ["score"]), batch)
        return batch


def _prompts_of(batch: Batch, prompts: Rows[Prompt], n: int) -> list[Prompt]:
    """Of each group of n rows."""
    return [prompts.at(uid) for uid in batch["uid"][::n].tolist()]
