"""From a config to what a run is made of: inputs (checked before a model is loaded), then roles on the runtime."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.roles import EngineConfig, OptimConfig
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.prompts import Prompt, Prompts
from spmd_rl.data.rows import is_set
from spmd_rl.engines.base import Engine
from spmd_rl.engines.fsdp import FsdpEngine, compute_dtype
from spmd_rl.models.loading import build_meta, load_generation_config, load_hf_config, load_tokenizer, materialise, resolve
from spmd_rl.models.policy import Policy
from spmd_rl.rewards.scorer import Scorer
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.residency import Residency
from spmd_rl.roles.reward import Reward
from spmd_rl.roles.rollout import Rollout
from spmd_rl.rollout.base import RolloutEngine
from spmd_rl.rollout.transformers import ATTENTION, TransformersRollout
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.trainer import Roles


@dataclass
class Model:
    """The actor's start, as far as it is known without weights."""

    tokenizer: PreTrainedTokenizerBase
    hf_config: PretrainedConfig
    folder: Path | None
    """None for random weights."""
    eos_token_ids: list[int]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to fit."""
        names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "vocab_size", "tie_word_embeddings")
        return {name: getattr(self.hf_config, name, None) for name in names}


def load_model_facts(config: Config) -> Model:
    """Tokenizer, config and where the weights are. Raises ConfigError for what is missing or does not fit."""
    model = config.model
    tokenizer = load_tokenizer(model)
    hf_config = load_hf_config(model)
    folder = None if model.random_init else resolve(model.path, trust_remote_code=model.trust_remote_code)
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {longest} > {limit} positions of {model.path} "
            "(max_position_embeddings); lower one of them"
        )
    return Model(tokenizer, hf_config, folder, _eos(tokenizer, folder))


def _eos(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> list[int]:
    generation = load_generation_config(folder) if folder is not None else None
    found = getattr(generation, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


@dataclass
class Inputs:
    """Everything of an RL run that needs no device: a mistake in any of it is found here."""

    model: Model
    order: PromptOrder[Prompt]
    validation: Prompts | None
    scorer: Scorer
    total_steps: int


def load_inputs(config: Config, plan: Plan, job_rank: int, threads: bool = True) -> Inputs:
    """Read the data and start the reward workers (on ranks that collect replies only)."""
    model = load_model_facts(config)
    train = Prompts.build(config.data, config.data.train, model.tokenizer)
    validation = None
    if is_set(config.data.val):
        validation = Prompts.build(config.data, config.data.val, model.tokenizer, train_rows=train.rows)
    data, steps = config.data, config.trainer.total_training_steps
    order = PromptOrder(
        train,
        data.train_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        epochs=None if steps is not None else config.trainer.total_epochs,
    )
    total = steps if steps is not None else order.total_steps()
    assert total is not None, "an order with a number of epochs has an end"
    return Inputs(model, order, validation, make_scorer(config, plan, job_rank, train, validation), total)


def make_scorer(config: Config, plan: Plan, job_rank: int, *prompts: Prompts | None) -> Scorer:
    """The reward functions; worker processes only where replies are collected."""
    rows = [row for p in prompts if p is not None for row in p.rows]
    layout = plan.roles["rollout"]
    pool = plan.pools[layout.pool]
    collects = job_rank in pool and layout.collects(pool.pool_rank(job_rank))
    reward = config.reward
    if not collects:
        reward = type(reward)(**{**vars(reward), "num_workers": 0})
    tasks = sorted({s.task for s in (config.data.train, config.data.val) if s.task})
    scorer = Scorer(reward, tasks=tasks, max_response_length=config.data.max_response_length)
    scorer.check(rows)
    return scorer


def optimizer_steps(config: Config, total_steps: int) -> int:
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    minis = -(-config.data.train_batch_size // config.actor.ppo_mini_batch_size)
    return total_steps * minis * config.actor.ppo_epochs


def make_engine(
    role: str,
    config: Config,
    model: Model,
    engine: EngineConfig,
    runtime: Runtime,
    *,
    folder: Path | None,
    optim: OptimConfig | None = None,
    total_steps: int = 1,
) -> Engine:
    """A policy on its engine: on the meta device first, then each rank's slices."""
    policy = Policy(build_meta(model.hf_config, trust_remote_code=config.model.trust_remote_code))
    if engine.gradient_checkpointing and optim is not None:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    return FsdpEngine(
        policy,
        folder,
        runtime.layout(role),
        runtime,
        engine,
        optim=optim,
        total_steps=total_steps,
        temperature=config.rollout.temperature or 1.0,
        seed=config.model.seed,
    )


def make_rollout_engine(config: Config, model: Model, runtime: Runtime) -> RolloutEngine:
    """An engine without weights: the first sync brings them."""
    wanted = config.rollout.dtype if config.rollout.dtype != "auto" else config.actor.engine.fsdp.param_dtype
    dtype = compute_dtype(wanted, runtime.device)
    lm = build_meta(model.hf_config, dtype, ATTENTION, config.model.trust_remote_code)
    materialise(lm, None, runtime.device)
    return TransformersRollout(lm, model.eos_token_ids, config.rollout.max_batch_rows)


def build_roles(config: Config, inputs: Inputs, runtime: Runtime) -> Roles:
    """Every role of the plan, on this rank's pool."""
    model, residency = inputs.model, Residency()
    steps = optimizer_steps(config, inputs.total_steps)
    actor = make_engine(
        "actor", config, model, config.actor.engine, runtime,
        folder=model.folder, optim=config.actor.optim, total_steps=steps,
    )
    _let_move(residency, "actor", actor, config.actor.engine)
    ref = None
    if "ref" in runtime.plan.roles:
        folder = resolve(config.ref.path) if config.ref.path else model.folder
        ref = make_engine("ref", config, model, config.ref.engine, runtime, folder=folder)
        _let_move(residency, "ref", ref, config.ref.engine)
    layout = runtime.layout("rollout")
    engine = make_rollout_engine(config, model, runtime)
    return Roles(
        actor=ModelRole("actor", actor, runtime.groups.along(runtime.layout("actor").batch, "dp")),
        ref=ModelRole("ref", ref, runtime.groups.along(runtime.layout("ref").batch, "dp")) if ref else None,
        rollout=Rollout(config, layout, runtime.pool_rank, engine, actor),
        reward=Reward(inputs.scorer, model.tokenizer),
        residency=residency,
    )


def _let_move(residency: Residency, role: str, engine: Engine, config: EngineConfig) -> None:
    """Register what the config lets leave the device."""
    for piece, may in (("params", config.offload_params), ("optimizer", config.offload_optimizer)):
        if may:
            residency.register(
                f"{role}.{piece}",
                lambda piece=piece: engine.move(piece, to_host=False),
                lambda piece=piece: engine.move(piece, to_host=True),
            )
