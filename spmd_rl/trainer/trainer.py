"""The loop. `Trainer.step` is the algorithm; every rank runs every line of it.

A step is two stages: `produce` (prompts, replies, rewards) and `consume` (log-probs, advantages, update).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.algorithms.advantages import advantage_estimator
from spmd_rl.algorithms.kl import KlController, kl_controller
from spmd_rl.config import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.prompts import Prompt, PromptOrder, Prompts
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import StepResult
from spmd_rl.observe.metrics import Partial
from spmd_rl.observe.tracking import Trackers
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.residency import Residency
from spmd_rl.roles.reward import Reward
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.trainer.advantages import add_advantages, token_level_rewards
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.finite import check_columns
from spmd_rl.trainer.loop import Loop
from spmd_rl.trainer.measure import sample_rows, step_metrics
from spmd_rl.trainer.objective import policy_objective
from spmd_rl.trainer.reshard import to_actor
from spmd_rl.trainer.validation import validate


@dataclass
class Roles:
    """Who plays in this run."""

    actor: ModelRole
    rollout: Rollout
    reward: Reward
    ref: ModelRole | None = None
    residency: Residency = field(default_factory=Residency)


class Trainer(Loop):
    """RL training: GRPO and kin."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        roles: Roles,
        prompts: PromptOrder[Prompt],
        validation: Prompts | None,
        trackers: Trackers,
        checkpointer: Checkpointer,
        total_steps: int,
        fingerprint: dict[str, Any],
    ) -> None:
        engines = {"actor": roles.actor.engine}
        super().__init__(config, runtime, engines, prompts, trackers, checkpointer, total_steps, fingerprint)
        self.roles, self.prompts, self.validation = roles, prompts, validation
        self.estimator = advantage_estimator(config.algorithm.adv_estimator)
        kl = config.algorithm.kl_ctrl
        self.kl_ctrl: KlController = kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)

    def step(self, step: int) -> dict[str, float]:
        """One step: sample, score, estimate advantages, update. Returns its metrics."""
        return self.consume(self.produce(step))

    def produce(self, step: int) -> Shard:
        """Prompts, replies, rewards; then every row goes to the rank of the actor that works on it."""
        n = self.config.rollout.n
        rollout, reward = self.roles.rollout, self.roles.reward
        prompts = self.prompts.take()
        with self.phase("generate"):
            batch = rollout.generate(prompts, rollout.training_params(), n, step, self.config.trainer.seed)
        with self.phase("reward"):
            batch = reward.score(batch, prompts[rollout.share(len(prompts))], n)
        self.show(batch, step)
        return to_actor(batch, step, self.config, self.runtime)

    def consume(self, shard: Shard) -> dict[str, float]:
        """Log-probs, advantages, one optimizer step a mini-batch."""
        batch, actor, ref = shard.batch, self.roles.actor, self.roles.ref
        if self.needs_old_log_probs(shard):
            with self.phase("old_log_prob"):
                batch["old_log_probs"] = actor.columns(shard, ["log_probs"])["log_probs"]
        if ref is not None:
            with self.phase("ref"):
                batch["ref_log_probs"] = ref.columns(shard, ["log_probs"])["log_probs"]
        with self.phase("adv"):
            partial = self.add_advantages(shard)
        results = []
        with self.phase("update_actor"):
            for mini in range(shard.mini_batches):
                results.append(actor.update(shard, mini, policy_objective(self.config, actor, shard, mini)))
        return self.measure(shard, partial, results)

    def needs_old_log_probs(self, shard: Shard) -> bool:
        """One update a step makes them equal to the update's own; a KL in the reward needs them before that."""
        return shard.mini_batches > 1 or self.config.algorithm.use_kl_in_reward or "old_log_probs" in self.estimator.needs

    def add_advantages(self, shard: Shard) -> Partial:
        """Token rewards (score, less the KL penalty), then advantages over the whole step's batch."""
        algorithm = self.config.algorithm
        check_columns(shard.batch, ("score", "old_log_probs", "ref_log_probs"), self.runtime)
        rewards, partial = token_level_rewards(shard.batch, algorithm, self.kl_ctrl.value)
        shard.batch["token_level_rewards"] = rewards
        add_advantages(shard, self.estimator, algorithm, self.roles.actor.dp_group)
        check_columns(shard.batch, ("advantages",), self.runtime)
        return partial

    def measure(self, shard: Shard, partial: Partial, results: list[StepResult]) -> dict[str, float]:
        """The step's metrics, of all ranks, under verl's names; moves the KL controller."""
        metrics = step_metrics(shard, partial, results, self.config, self.roles.actor.dp_group)
        if "actor/reward_kl_penalty" in metrics:
            metrics["actor/reward_kl_penalty_coeff"] = self.kl_ctrl.value
            self.kl_ctrl.update(metrics["actor/reward_kl_penalty"], len(shard.lengths))
        return metrics | self.roles.reward.counts(self.runtime.everyone)

    def validate(self, step: int) -> dict[str, float]:
        """Sample the validation prompts with the current weights and score them."""
        if self.validation is None:
            return {}
        with self.timer.phase("testing"), self.roles.residency.hold("generate"):
            metrics, samples = validate(self.validation, self.roles.rollout, self.roles.reward, self.config, self.runtime)
        self.trackers.samples(samples, step, "val")
        return metrics

    def show(self, batch: Batch, step: int) -> None:
        """Keep (and show) some of the step's replies."""
        self.trackers.samples(sample_rows(batch, self.config.observe.samples_per_step, self.runtime.everyone), step)

    def state(self) -> dict[str, Any]:
        return super().state() | {"kl_coef": self.kl_ctrl.value}

    def load_json(self, state: dict[str, Any]) -> None:
        super().load_json(state)
        self.kl_ctrl.value = state["kl_coef"]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step: its pieces on the device, its time taken."""
        with self.timer.phase(name), self.roles.residency.hold(name):
            yield
