"""The loop. `Trainer.step` is the algorithm; every rank runs every line of it.

A step is two stages: `produce` (prompts, replies, rewards) and `consume` (log-probs, values, advantages, updates). Each
phase of `consume` writes its columns into the batch; a phase whose role does not play, or whose columns nobody reads,
does nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from spmd_rl.trainer.advantages import add_advantages, configured_estimator, token_level_rewards
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.collect import Collect, groups_with_signal, one_round
from spmd_rl.trainer.correction import add_correction, bypasses, corrects
from spmd_rl.trainer.critic import update_critic, value_metrics
from spmd_rl.trainer.finite import Guard
from spmd_rl.trainer.loop import Loop
from spmd_rl.trainer.measure import sample_rows, step_metrics
from spmd_rl.trainer.objective import update_actor
from spmd_rl.trainer.reshard import columns_of, to_actor
from spmd_rl.trainer.validation import validate


@dataclass
class Roles:
    """Who plays in this run."""

    actor: ModelRole
    rollout: Rollout
    reward: Reward
    ref: ModelRole | None = None
    critic: ModelRole | None = None
    residency: Residency = field(default_factory=Residency)


class Trainer(Loop):
    """RL training: GRPO, PPO and kin."""

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
        trained = {"actor": roles.actor, "critic": roles.critic}
        engines = {name: role.engine for name, role in trained.items() if role is not None}
        super().__init__(config, runtime, engines, prompts, trackers, checkpointer, total_steps, fingerprint)
        self.roles, self.prompts, self.validation = roles, prompts, validation
        self.estimator = configured_estimator(config)
        self.collect: Collect = groups_with_signal if config.algorithm.filter_groups.enable else one_round
        kl = config.algorithm.kl_ctrl
        self.kl_ctrl: KlController = kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)

    def step(self, step: int) -> dict[str, float] | None:
        """One step: sample, score, estimate advantages, update. Its metrics; None when the data has run out."""
        shard = self.produce(step)
        return self.consume(shard) if shard is not None else None

    def produce(self, step: int) -> Shard | None:
        """Prompts, replies, rewards; then every row goes to the rank of the actor that works on it."""
        found = self.collect(self.prompts, partial(self.sample, step=step), self.config, self.runtime)
        if found is None:
            return None
        self.show(found.batch, step)
        shard = to_actor(found.batch, step, self.config, self.runtime)
        shard.metrics = found.metrics
        return shard

    def consume(self, shard: Shard) -> dict[str, float]:
        """Log-probs, values, advantages; then one optimizer step a mini-batch."""
        self.old_log_probs(shard)
        self.ref_log_probs(shard)
        self.values(shard)
        measured = self.advantages(shard)
        results = {"critic": self.update_critic(shard), "actor": self.update_actor(shard)}
        return self.measure(shard, measured, results)

    def sample(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """This rank's part of the prompts' replies, scored; and greedy replies' scores where they are a baseline."""
        n, seed = self.config.rollout.n, self.config.trainer.seed
        rollout, reward = self.roles.rollout, self.roles.reward
        mine, greedy = prompts[rollout.share(len(prompts))], None
        with self.phase("generate") as guard:
            batch = rollout.generate(prompts, rollout.training_params(), n, step, seed)
            if "reward_baselines" in self.estimator.needs:
                greedy = rollout.generate(prompts, rollout.greedy_params(), 1, step, seed)
            guard.check(batch, ["rollout_log_probs"])
        with self.phase("reward") as guard:
            batch = reward.score(batch, mine, n)
            if greedy is not None:
                batch["reward_baselines"] = reward.score(greedy, mine, 1)["score"].repeat_interleave(n)
            guard.check(batch, ["score", "reward_baselines"])
        return batch

    def old_log_probs(self, shard: Shard) -> None:
        """What the ratio is taken against: the sampler's own log-probs in bypass mode, else the actor's so far."""
        batch = shard.batch
        want = ["sum_pi_squared"] if "sum_pi_squared" in self.estimator.needs else []
        if bypasses(self.config):
            batch["old_log_probs"] = batch["rollout_log_probs"]
        elif self.needs_old_log_probs(shard):
            want.append("log_probs")
        if not want:
            return
        with self.phase("old_log_prob") as guard:
            found = columns_of(self.roles.actor, shard, want, self.config, self.runtime)
            for name, column in found.items():
                batch["old_log_probs" if name == "log_probs" else name] = column
            guard.check(batch, ["old_log_probs", "sum_pi_squared"])

    def needs_old_log_probs(self, shard: Shard) -> bool:
        """One update a step makes them equal to the update's own; whoever reads them earlier needs them before that."""
        early = self.config.algorithm.use_kl_in_reward or corrects(self.config)
        return shard.mini_batches > 1 or early or "old_log_probs" in self.estimator.needs

    def ref_log_probs(self, shard: Shard) -> None:
        """The frozen reference's log-probs, for a KL term."""
        if self.roles.ref is None:
            return
        with self.phase("ref") as guard:
            found = columns_of(self.roles.ref, shard, ["log_probs"], self.config, self.runtime)
            shard.batch["ref_log_probs"] = found["log_probs"]
            guard.check(shard.batch, ["ref_log_probs"])

    def values(self, shard: Shard) -> None:
        """What the critic expects at each response token."""
        if self.roles.critic is None:
            return
        with self.phase("values") as guard:
            found = columns_of(self.roles.critic, shard, ["values"], self.config, self.runtime)
            shard.batch["values"] = found["values"]
            guard.check(shard.batch, ["values"])

    def advantages(self, shard: Shard) -> Partial:
        """Rollout correction, token rewards (score, less the KL penalty), advantages over the whole step's batch."""
        algorithm, actor, batch = self.config.algorithm, self.roles.actor, shard.batch
        with self.phase("adv") as guard:
            shard.metrics |= add_correction(shard, self.config, actor)
            batch["token_level_rewards"], measured = token_level_rewards(batch, algorithm, self.kl_ctrl.value)
            add_advantages(shard, self.estimator, algorithm, actor.dp_group, self.roles.reward.names)
            guard.check(batch, ["token_level_rewards", "advantages", "returns"])
        return measured

    def update_critic(self, shard: Shard) -> list[StepResult]:
        """The critic's optimizer steps."""
        if self.roles.critic is None:
            return []
        with self.phase("update_critic") as guard:
            return update_critic(self.config, self.roles.critic, shard, self.runtime, guard)

    def update_actor(self, shard: Shard) -> list[StepResult]:
        """The actor's optimizer steps; none while the critic warms up."""
        if self.roles.critic is not None and self.done < self.config.critic.warmup_steps:
            return []
        with self.phase("update_actor") as guard:
            minis = range(shard.mini_batches)
            return [update_actor(self.config, self.roles.actor, shard, mini, guard) for mini in minis]

    def measure(self, shard: Shard, measured: Partial, results: dict[str, list[StepResult]]) -> dict[str, float]:
        """The step's metrics, of all ranks, under verl's names; moves the KL controller."""
        group = self.roles.actor.dp_group
        metrics = shard.metrics | step_metrics(shard, measured, results, self.config, group)
        if self.roles.critic is not None:
            metrics |= value_metrics(shard.batch, group)
        if "actor/reward_kl_penalty" in metrics:
            metrics["actor/reward_kl_penalty_coeff"] = self.kl_ctrl.value
            self.kl_ctrl.update(metrics["actor/reward_kl_penalty"], len(shard.lengths))
        return metrics | self.roles.reward.counts(self.runtime.everyone)

    def validate(self, step: int) -> dict[str, float]:
        """Sample the validation prompts with the current weights and score them."""
        if self.validation is None:
            return {}
        with self.timer.phase("testing"), self.roles.residency.hold("generate"):
            metrics, samples = validate(
                self.validation, self.roles.rollout, self.roles.reward, self.config, self.runtime
            )
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
    def phase(self, name: str) -> Iterator[Guard]:
        """A phase of the step: its pieces on the device, its time and peak taken, and what looks for nan and inf."""
        with self.timer.phase(name), self.roles.residency.hold(name), self.peaks.phase(name):
            yield Guard(self.runtime, name)
