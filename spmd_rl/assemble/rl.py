"""An RL run: its inputs, checked before a model is loaded, then its roles on the runtime."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from spmd_rl.algorithms.correction import is_band, rejection_bands
from spmd_rl.algorithms.registry import resolve as resolve_function
from spmd_rl.assemble.model import (
    Model,
    check_rollout_engine,
    let_move,
    load_model_facts,
    make_classifier,
    make_critic,
    make_engine,
    make_order,
    make_rollout_engine,
    rollout_dtype,
    updates_a_step,
)
from spmd_rl.config import Config, ConfigError, ModelConfig
from spmd_rl.config.roles import EngineConfig
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.prompts import Prompt, Prompts
from spmd_rl.data.rows import data_sources, is_set
from spmd_rl.engines.base import Engine
from spmd_rl.models.loading import load_hf_config, load_tokenizer, resolve
from spmd_rl.observe.tracking import Trackers
from spmd_rl.rewards.scorer import Scorer
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.residency import Residency
from spmd_rl.roles.reward import Reward
from spmd_rl.roles.reward_model import Questions, make_questions
from spmd_rl.roles.rollout import Rollout
from spmd_rl.roles.weight_sync import WeightSync
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.remote import Remote
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.roles import role_specs
from spmd_rl.topology.tails import in_rounds
from spmd_rl.trainer.advantages import configured_estimator
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.critic import critic_updates
from spmd_rl.trainer.objective import configured_loss
from spmd_rl.trainer.trainer import Roles, Trainer


@dataclass
class Inputs:
    """Everything of an RL run that needs no device: a mistake in any of it is found here."""

    model: Model
    order: PromptOrder[Prompt]
    validation: Prompts | None
    scorer: Scorer
    questions: Questions | None
    """How a reward model is asked; None without one."""
    total_steps: int

    def facts(self, config: Config, runtime: Runtime) -> dict[str, str]:
        """Lines for the console's header that only an RL run has."""
        return {
            "batch": f"{config.data.train_batch_size} prompts × {config.rollout.n} samples a step",
            "prompts": f"{len(self.order.rows)} to train on, {len(self.validation or [])} to validate on",
        }

    def loop(self, config: Config, runtime: Runtime, trackers: Trackers, checkpointer: Checkpointer) -> Trainer:
        """The roles on the runtime, and the loop over them."""
        roles = build_roles(config, self, runtime)
        return Trainer(
            config, runtime, roles, self.order, self.validation, trackers, checkpointer, self.total_steps,
            self.model.fingerprint,
        )  # fmt: skip

    def close(self) -> None:
        """End the reward workers."""
        self.scorer.close()


def load_inputs(config: Config, plan: Plan, job_rank: int) -> Inputs:
    """Read the data and start the reward workers (on ranks that collect replies only)."""
    check_choices(config)
    model = load_model_facts(config)
    if job_rank in plan.pools[plan.roles["rollout"].pool]:
        check_rollout_engine(config, model)
    train = Prompts.build(config.data, config.data.train, model.tokenizer)
    validation = None
    if is_set(config.data.val):
        validation = Prompts.build(config.data, config.data.val, model.tokenizer, train_rows=train.rows)
    order: PromptOrder[Prompt]
    order, total = make_order(config, train)
    warmup = config.critic.warmup_steps if "critic" in plan.roles else 0
    if 0 < total <= warmup:
        raise ConfigError(
            f"critic.warmup_steps={warmup} >= {total} steps of the run: the actor would never be trained; lower it, or "
            "raise trainer.total_training_steps"
        )
    check_teacher(config, model)
    scorer = make_scorer(config, plan, job_rank, train, validation)
    return Inputs(model, order, validation, scorer, _questions(config), total)


def check_choices(config: Config) -> None:
    """Raise ConfigError for an advantage, a loss or a role of the user's own that cannot be found or cannot work."""
    if "reward_baselines" in configured_estimator(config).needs and in_rounds(config.rollout):
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a greedy reply beside each sampled one; "
            "where a step is sampled in rounds (rollout.segment_tokens, over_sampling, limits) that is not supported"
        )
    configured_loss(config)
    own_roles(config)
    correction = config.algorithm.rollout_correction
    try:
        is_band(correction.rollout_is_threshold)
        if correction.rollout_rs:
            rejection_bands(correction.rollout_rs, correction.rollout_rs_threshold)
    except ValueError as error:
        raise ConfigError(f"algorithm.rollout_correction.{error}") from error


def make_scorer(config: Config, plan: Plan, job_rank: int, *prompts: Prompts | None) -> Scorer:
    """The reward functions; worker processes only where replies are collected."""
    rows = [row for p in prompts if p is not None for row in p.rows]
    layout = plan.roles["rollout"]
    pool = plan.pools[layout.pool]
    collects = job_rank in pool and layout.collects(pool.pool_rank(job_rank))
    reward = config.reward
    if not collects:
        reward = replace(reward, num_workers=0)
    scorer = Scorer(reward, data_sources=data_sources(rows), max_response_length=config.data.max_response_length)
    scorer.check(rows)
    return scorer


def build_roles(config: Config, inputs: Inputs, runtime: Runtime) -> Roles:
    """Every role of the plan on its pool, `Remote` elsewhere; in the end the user's own ones take their places."""
    residency, specs = Residency(early=runtime.plan.early, overlap=runtime.plan.overlaps), role_specs(config)
    models: dict[str, ModelRole | Remote] = {}
    for name, make_model in MODELS.items():
        engine_config = specs[name].engine if name in specs else None
        if engine_config is None:
            continue
        if runtime.plays(name):
            engine = make_model(config, inputs, runtime)
            let_move(residency, name, engine, engine_config, runtime.device, specs[name].trained)
            models[name] = ModelRole(name, engine, runtime.groups.along(runtime.layout(name).batch, "dp"))
        else:
            models[name] = Remote((name,))
    rollout, sync = _rollout(config, inputs, runtime, models["actor"], residency)
    roles = Roles(
        **{"reward_model" if name == "reward" else name: model for name, model in models.items()},
        questions=inputs.questions,
        rollout=rollout,
        reward=Reward(inputs.scorer, inputs.model.tokenizer),
        residency=residency,
        weight_sync=sync,
    )
    for name, make in own_roles(config).items():
        if not isinstance(getattr(roles, name), Remote):
            setattr(roles, name, make(getattr(roles, name), config, runtime))
    return roles


def _rollout(
    config: Config, inputs: Inputs, runtime: Runtime, actor: ModelRole | Remote, residency: Residency
) -> tuple[Rollout | Remote, WeightSync | None]:
    """The rollout where it lives, and what brings it the weights when that is not the actor's pool."""
    layout, rollout = runtime.layout("rollout"), None
    if runtime.plays("rollout"):
        residency.enter("decode")  # the engine looks for its share of the card when it starts
        sampler = make_rollout_engine(config, inputs.model, runtime)
        source = actor.engine if isinstance(actor, ModelRole) else None
        rollout = Rollout(config, runtime, sampler, source, residency)
        residency.asleep = sampler.asleep_bytes
    sync = None
    if layout.pool != runtime.layout("actor").pool and runtime.plays("actor", "rollout"):
        engine = actor.engine if isinstance(actor, ModelRole) else None
        sync = WeightSync(runtime, rollout_dtype(config, runtime), config.rollout.verify_sync, engine, rollout)
    return rollout or Remote(("rollout",)), sync


def _actor(config: Config, inputs: Inputs, runtime: Runtime) -> Engine:
    actor, model = config.actor, inputs.model
    steps = inputs.total_steps - (config.critic.warmup_steps if "critic" in runtime.plan.roles else 0)
    return make_engine(
        "actor",
        config,
        model,
        actor.engine,
        runtime,
        folder=model.folder,
        optim=actor.optim,
        total_steps=steps * updates_a_step(config) * actor.ppo_epochs,
        temperature=config.rollout.temperature or 1.0,
    )


def _ref(config: Config, inputs: Inputs, runtime: Runtime) -> Engine:
    folder = resolve(config.ref.path) if config.ref.path else inputs.model.folder
    temperature = config.rollout.temperature or 1.0
    return make_engine("ref", config, inputs.model, config.ref.engine, runtime, folder=folder, temperature=temperature)


def _critic(config: Config, inputs: Inputs, runtime: Runtime) -> Engine:
    prompts, epochs = critic_updates(config)
    updates = -(-config.data.train_batch_size // prompts) * epochs
    return make_critic(config, inputs.model, runtime, inputs.total_steps * updates)


def _reward(config: Config, inputs: Inputs, runtime: Runtime) -> Engine:
    reward = config.reward.model
    assert reward.path is not None, "checked while planning"
    if reward.kind == "judge":
        return _frozen("reward", config, inputs, runtime, reward.engine, reward.path)
    return make_classifier(config, runtime, reward.path)


def _teacher(config: Config, inputs: Inputs, runtime: Runtime) -> Engine:
    teacher = config.teacher
    assert teacher.path is not None, "checked while planning"
    temperature = config.rollout.temperature or 1.0
    return _frozen("teacher", config, inputs, runtime, teacher.engine, teacher.path, temperature, teacher.top_k)


def _frozen(
    role: str,
    config: Config,
    inputs: Inputs,
    runtime: Runtime,
    engine: EngineConfig,
    path: str,
    temperature: float = 1.0,
    top_k: int = 0,
) -> Engine:
    """A causal LM of its own kind, which is only read."""
    model = replace(inputs.model, hf_config=load_hf_config(config.model, path))
    folder = resolve(path, trust_remote_code=config.model.trust_remote_code)
    return make_engine(role, config, model, engine, runtime, folder=folder, temperature=temperature, top_k=top_k)


MODELS: dict[str, Callable[[Config, Inputs, Runtime], Engine]] = {
    "actor": _actor,
    "ref": _ref,
    "critic": _critic,
    "teacher": _teacher,
    "reward": _reward,
}
"""What makes the engine of each role that holds a model."""


def _questions(config: Config) -> Questions | None:
    """How the reward model is asked; its tokenizer is read. None without one."""
    path = config.reward.model.path
    if not config.reward.model.enable or path is None:
        return None
    return make_questions(config, load_tokenizer(ModelConfig(path=path)))


def check_teacher(config: Config, model: Model) -> None:
    """ConfigError when the teacher does not know the actor's tokens: it is asked about them by their ids."""
    if not config.teacher.enable or config.teacher.path is None:
        return
    theirs, ours = load_hf_config(config.model, config.teacher.path).vocab_size, model.hf_config.vocab_size
    vocabulary = load_tokenizer(ModelConfig(path=config.teacher.path)).get_vocab()
    if vocabulary != model.tokenizer.get_vocab() or (config.teacher.top_k and theirs != ours):
        raise ConfigError(
            f"teacher.path={config.teacher.path} has another vocabulary ({theirs} tokens) than the actor ({ours}): it "
            "would be asked about other words; use a teacher of the same family"
        )


def own_roles(config: Config) -> dict[str, Callable[[Any, Config, Runtime], Any]]:
    """`trainer.roles`: what makes each role of the user's own, from the built-in one."""
    known = [f.name for f in fields(Roles) if f.name not in ("residency", "weight_sync", "questions")]
    wrong = [name for name in config.trainer.roles if name not in known]
    if wrong:
        raise ConfigError(f"trainer.roles.{wrong[0]}: there is no such role; use {', '.join(known)}")
    return {name: resolve_function(place, {}, "role") for name, place in config.trainer.roles.items()}
