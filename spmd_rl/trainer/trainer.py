"""The loop. `Trainer.step` is the algorithm; every rank runs every line of it.

A step is two stages: `produce` (prompts, replies, rewards) and `consume` (log-probs, values, advantages, updates). Each
phase of `consume` writes its columns into the batch; a phase whose role does not play, or whose columns nobody reads,
does nothing. Where roles live on pools of their own, a call runs on the pools that it names with `on`; other ranks get
a `Remote` and go on. Between the stages stands `deliver`, where both meet; schedules differ in how far `produce` is
ahead of `consume` (`lag`), and in nothing else.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

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
from spmd_rl.roles.reward_model import Questions
from spmd_rl.roles.rollout import Rollout
from spmd_rl.roles.weight_sync import WeightSync
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import gather
from spmd_rl.runtime.remote import Remote, here, local, on
from spmd_rl.topology.tails import in_rounds
from spmd_rl.trainer.advantages import add_advantages, configured_estimator, token_level_rewards
from spmd_rl.trainer.ahead import Ahead, check_in_flight, load_ahead, saved_ahead
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.collect import (
    Collect,
    Collected,
    groups_with_signal,
    mask_truncated,
    note_failures,
    nothing_to_train_on,
    one_round,
)
from spmd_rl.trainer.correction import add_correction, bypasses, corrects
from spmd_rl.trainer.critic import update_critic, value_metrics
from spmd_rl.trainer.distill import distil, distils_tokens, teacher_columns
from spmd_rl.trainer.finite import Guard
from spmd_rl.trainer.lengths import Lengths
from spmd_rl.trainer.loop import Loop
from spmd_rl.trainer.measure import sample_rows, step_metrics, update_metrics
from spmd_rl.trainer.objective import update_actor
from spmd_rl.trainer.reshard import add_columns, to_actor
from spmd_rl.trainer.scoring import Scoring
from spmd_rl.trainer.tails import Tails
from spmd_rl.trainer.validation import scored, validate


@dataclass
class Roles:
    """Who plays in this run; `Remote` stands for a role on another pool."""

    actor: ModelRole | Remote
    rollout: Rollout | Remote
    reward: Reward
    """The reward functions; they run where replies are sampled."""
    ref: ModelRole | Remote | None = None
    critic: ModelRole | Remote | None = None
    teacher: ModelRole | Remote | None = None
    reward_model: ModelRole | Remote | None = None
    questions: Questions | None = None
    """How the reward model is asked about a reply."""
    residency: Residency = field(default_factory=Residency)
    weight_sync: WeightSync | None = None
    """From the actor's pool to the rollout's; None where they share one, and the rollout helps itself."""


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
        engines = {name: role.engine for name, role in trained.items() if isinstance(role, ModelRole)}
        super().__init__(
            config, runtime, engines, roles.residency, prompts, trackers, checkpointer, total_steps, fingerprint
        )
        self.roles, self.prompts, self.validation = roles, prompts, validation
        self.estimator = configured_estimator(config)
        self.score = Scoring(config, runtime, roles.reward, roles.reward_model, roles.questions, self.phase)
        self.lengths = Lengths(config, runtime, prompts.rows)
        self.tails = Tails(config, runtime, roles.rollout, self.lengths)
        kl = config.algorithm.kl_ctrl
        self.kl_ctrl: KlController = kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)
        self.lag = config.trainer.staleness if config.trainer.schedule == "one_step_off" else 0
        self.produced = self.done
        """The last step that was produced."""
        self.ahead: Ahead = deque()
        """Those of them that are not consumed yet, oldest first."""

    def step(self, step: int) -> dict[str, float] | None:
        """One step: sample, score, estimate advantages, update. Its metrics; None when the data has run out."""
        self.produce_until(step)
        if nothing_to_train_on(self.ahead[0], self.runtime):
            return None
        shard = self.deliver(self.ahead.popleft(), step)
        self.produce_until(min(step + self.lag, self.total_steps))  # on other pools than the rest of the step
        return self.consume(shard)

    def produce_until(self, step: int) -> None:
        """Sample what comes next with the weights of now, until the step `step` is there."""
        while self.produced < step:
            self.sync()
            self.ahead.append(self.produce(self.produced + 1))
            self.produced += 1

    @on("actor", "rollout")
    def sync(self) -> None:
        """The actor's weights of now reach a rollout on another pool."""
        if self.roles.weight_sync is not None:
            with self.phase("weight_sync"):
                self.roles.weight_sync()

    @on("rollout", "reward")
    def produce(self, step: int) -> Collected | None:
        """Prompts, replies, rewards; None when the data has run out."""
        found = self.collect(self, step)
        if found is not None:
            note_failures(found, self.roles.reward, step, self.config, self.runtime)
            self.lengths.note(found.batch)
            if self.config.rollout.truncated == "mask":
                local(mask_truncated, found.batch)
        return found

    @property
    def collect(self) -> Collect:
        """Where the step's rows come from."""
        if self.tails.carried or in_rounds(self.config.rollout):
            return self.tails
        return groups_with_signal if self.config.algorithm.filter_groups.enable else one_round

    @on("rollout", "actor")
    def deliver(self, found: Collected | Remote | None, step: int) -> Shard | Remote:
        """Every row goes to the rank of the actor that works on it."""
        assert found is not None, "there is a step to deliver"
        batch = local(lambda collected: collected.batch, found)
        self.show(batch, step)
        shard = to_actor(batch, step, self.config, self.runtime)
        shard.metrics = found.metrics
        return shard

    def consume(self, shard: Shard | Remote) -> dict[str, float]:
        """Log-probs, values, advantages; then one optimizer step a mini-batch. The metrics that this rank knows."""
        self.old_log_probs(shard)
        self.ref_log_probs(shard)
        self.teacher_log_probs(shard)
        self.values(shard)
        measured = self.advantages(shard)
        results = {"critic": self.update_critic(shard), "actor": self.update_actor(shard)}
        self.measure(shard, measured)
        for role, steps in results.items():
            shard.metrics |= update_metrics(steps, role) if isinstance(steps, list) and steps else {}
        return shard.metrics

    def sample(self, prompts: Sequence[Prompt], step: int) -> Batch | Remote:
        """This rank's part of the prompts' replies, scored; and greedy replies' scores where they are a baseline."""
        n, baseline = self.config.rollout.n, "reward_baselines" in self.estimator.needs
        batch = self.generate(prompts, n, step)
        greedy = self.generate(prompts, 1, step, greedy=True) if baseline else None
        batch = self.score(batch, self.prompts.rows, n)
        if greedy is not None:
            local(partial(_add_baselines, n=n), batch, self.score(greedy, self.prompts.rows, 1))
        return batch

    @on("rollout")
    def generate(self, prompts: Sequence[Prompt], n: int, step: int, greedy: bool = False) -> Batch:
        """n replies to each prompt of this rank's share."""
        rollout = here(self.roles.rollout)
        params = rollout.greedy_params() if greedy else rollout.training_params()
        with self.phase("generate") as guard:
            costs = self.lengths.expected([prompt.uid for prompt in prompts])
            batch = rollout.generate(prompts, params, n, step, self.config.trainer.seed, costs)
            guard.check(batch, ["rollout_log_probs"])
        return batch

    @on("actor")
    def old_log_probs(self, shard: Shard | Remote) -> None:
        """What the ratio is taken against: the sampler's own log-probs in bypass mode, else the actor's so far."""
        batch = here(shard).batch
        want = {"sum_pi_squared": "sum_pi_squared"} if "sum_pi_squared" in self.estimator.needs else {}
        if bypasses(self.config):
            batch["old_log_probs"] = batch["rollout_log_probs"]
        elif self.needs_old_log_probs(here(shard)):
            want["log_probs"] = "old_log_probs"
        if want:
            self.columns("old_log_prob", "actor", shard, want)

    def needs_old_log_probs(self, shard: Shard) -> bool:
        """One update a step makes them equal to the update's own; whoever reads them earlier needs them before that."""
        early = self.config.algorithm.use_kl_in_reward or corrects(self.config) or distils_tokens(self.config)
        return shard.mini_batches > 1 or early or "old_log_probs" in self.estimator.needs

    @on("actor", "ref")
    def ref_log_probs(self, shard: Shard | Remote) -> None:
        """The frozen reference's log-probs, for a KL term."""
        self.columns("ref", "ref", shard, {"log_probs": "ref_log_probs"})

    @on("actor", "teacher")
    def teacher_log_probs(self, shard: Shard | Remote) -> None:
        """What the teacher would have said, for distillation."""
        self.columns("teacher", "teacher", shard, teacher_columns(self.config))

    @on("actor", "critic")
    def values(self, shard: Shard | Remote) -> None:
        """What the critic expects at each response token."""
        self.columns("values", "critic", shard, {"values": "values"})

    def columns(self, phase: str, role: str, shard: Shard | Remote, want: dict[str, str]) -> None:
        """Token columns by a role, if it plays: what its model makes -> how the batch calls it."""
        model: ModelRole | Remote | None = getattr(self.roles, role)
        if model is not None:
            with self.phase(phase) as guard:
                add_columns(model, role, shard, want, self.config, self.runtime)
                local(lambda there: guard.check(there.batch, list(want.values())), shard)

    @on("actor")
    def advantages(self, shard: Shard | Remote) -> Partial:
        """Rollout correction, token rewards (score, less the KL penalty), advantages over the whole step's batch."""
        algorithm, actor, shard = self.config.algorithm, here(self.roles.actor), here(shard)
        batch = shard.batch
        with self.phase("adv") as guard:
            shard.metrics |= add_correction(shard, self.config, actor)
            batch["token_level_rewards"], measured = token_level_rewards(batch, algorithm, self.kl_ctrl.value)
            add_advantages(shard, self.estimator, algorithm, actor.dp_group, self.roles.reward.names)
            measured |= distil(batch, self.config)
            guard.check(batch, ["token_level_rewards", "advantages", "returns"])
        return measured

    @on("actor", "critic")
    def update_critic(self, shard: Shard | Remote) -> list[StepResult]:
        """The critic's optimizer steps."""
        if self.roles.critic is None:
            return []
        with self.phase("update_critic") as guard:
            return update_critic(self.config, self.roles.critic, shard, self.runtime, guard)

    @on("actor")
    def update_actor(self, shard: Shard | Remote) -> list[StepResult]:
        """The actor's optimizer steps; none while the critic warms up."""
        if self.roles.critic is not None and self.done < self.config.critic.warmup_steps:
            return []
        actor, shard = here(self.roles.actor), here(shard)
        with self.phase("update_actor") as guard:
            return [update_actor(self.config, actor, shard, mini, guard) for mini in range(shard.mini_batches)]

    @on("actor")
    def measure(self, shard: Shard | Remote, measured: Partial | Remote) -> None:
        """The step's metrics, of all ranks, under verl's names; moves the KL controller."""
        shard, group = here(shard), here(self.roles.actor).dp_group
        metrics = step_metrics(shard, here(measured), self.config, group)
        if self.roles.critic is not None:
            metrics |= value_metrics(shard.batch, group)
        if "actor/reward_kl_penalty" in metrics:
            metrics["actor/reward_kl_penalty_coeff"] = self.kl_ctrl.value
            self.kl_ctrl.update(metrics["actor/reward_kl_penalty"], len(shard.lengths))
        shard.metrics |= metrics

    def validate(self, step: int) -> dict[str, float]:
        """Sample the validation prompts with the current weights and score them."""
        if self.validation is None:
            return {}
        self.sync()
        with self.timer.phase("testing"):
            metrics, samples = validate(self.validation, self.validation_round, self.config)
        self.trackers.samples(samples, step, "val")
        return metrics

    def validation_round(self, prompts: Sequence[Prompt], names: Sequence[str]) -> Batch | Remote:
        """`rollout.val_n` replies to each prompt, scored; those columns of all of them, where they are looked at."""
        batch = self.validation_replies(prompts)
        assert self.validation is not None, "its prompts are asked for"
        batch = self.score.by_model(batch, self.validation, self.config.rollout.val_n)
        return self.gathered(batch, names)

    @on("rollout")
    def validation_replies(self, prompts: Sequence[Prompt]) -> Batch:
        """This rank's part of them."""
        batch = scored(prompts, here(self.roles.rollout), self.roles.reward, self.config)
        self.roles.reward.counts(self.runtime.everyone)  # these failures are validation's, not the next step's
        return batch

    @on("rollout", "actor")
    def gathered(self, batch: Batch | Remote, names: Sequence[str]) -> Batch:
        """All rows, where they were sampled and at home."""
        return gather(batch, names, self.runtime.bridge("rollout", "actor"))

    def show(self, batch: Batch | Remote, step: int) -> None:
        """Keep (and show) some of the step's replies."""
        limit, bridge = self.config.observe.samples_per_step, self.runtime.bridge("rollout", "actor")
        self.trackers.samples(sample_rows(batch, limit, bridge), step)

    def save(self) -> None:
        """Not when a step that is sampled ahead has no rewards: the run ends at it, and goes on from before it."""
        failed = any(isinstance(found, Collected) and found.failed for found in self.ahead)
        if self.lag and self.runtime.job.any(failed):
            self.trackers.say(f"not saved after step {self.done}: the reward failed for a step that is sampled ahead")
            return
        super().save()

    def state(self) -> dict[str, Any]:
        """What this rank's pool knows; a checkpoint holds what all pools know together."""
        state = super().state()
        if self.runtime.plays("actor"):
            state["kl_coef"] = self.kl_ctrl.value
        if self.runtime.plays("rollout", "reward"):
            state["ahead"] = [None if found is None else here(found).metrics for found in self.ahead]
            state["carried"] = self.tails.state()
        else:
            del state["order"]  # of no use here
        return state

    def load_json(self, state: dict[str, Any], folder: Path) -> None:
        super().load_json(state, folder)
        self.kl_ctrl.value = state["kl_coef"]
        check_in_flight(state, self.config)
        self.ahead = load_ahead(state["ahead"], folder, self.runtime)
        self.produced = self.done + len(self.ahead)
        self.tails.load(state["carried"], folder)
        self.lengths.load(folder)

    def files(self) -> dict[str, Tensor]:
        return saved_ahead(self.ahead, self.runtime) | self.tails.files() | self.lengths.files()

    @contextmanager
    def phase(self, name: str) -> Iterator[Guard]:
        """A phase of the step: its pieces on the device, its time and peak taken, and what looks for nan and inf."""
        with self.timer.phase(name, waits=False), self.residency.hold(name), self.peaks.phase(name):
            yield Guard(self.runtime, name)


def _add_baselines(batch: Batch, greedy: Batch, n: int) -> None:
    batch["reward_baselines"] = greedy["score"].repeat_interleave(n)
