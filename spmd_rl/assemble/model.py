"""The actor's start as far as it is known without weights, and models on their engines."""

import secrets
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.roles import EngineConfig, OptimConfig
from spmd_rl.data.order import PromptOrder, Rows
from spmd_rl.engines.base import Engine
from spmd_rl.engines.fsdp import FsdpEngine, compute_dtype
from spmd_rl.engines.host_pool import Swap
from spmd_rl.models.attention import check_attention
from spmd_rl.models.loading import (
    allocate,
    build_meta,
    load_generation_config,
    load_hf_config,
    load_tokenizer,
    resolve,
)
from spmd_rl.models.lora import add_adapters
from spmd_rl.models.megatron_names import check_model
from spmd_rl.models.policy import Policy
from spmd_rl.models.routing import check_routers, moe_layers, no_routes
from spmd_rl.models.value import HEAD, IGNORED, ValueModel, has_head
from spmd_rl.roles.residency import Residency
from spmd_rl.rollout.base import RolloutEngine
from spmd_rl.rollout.transformers import ATTENTION, TransformersRollout
from spmd_rl.runtime.bootstrap import Runtime, on_stop
from spmd_rl.runtime.environment import as_pool
from spmd_rl.topology.fold import demand
from spmd_rl.topology.roles import role_specs
from spmd_rl.topology.tails import in_flight
from spmd_rl.topology.vllm_memory import cpu_mistakes
from spmd_rl.weights.held import specs_of

T = TypeVar("T")


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
        names = (
            "model_type",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "tie_word_embeddings",
        )
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
    wrong = [i for i in config.rollout.stop_token_ids if i >= hf_config.vocab_size]
    if wrong:
        raise ConfigError(
            f"rollout.stop_token_ids={list(config.rollout.stop_token_ids)}: {wrong[0]} is none of the "
            f"{hf_config.vocab_size} tokens of {model.path}, so it never ends a reply; drop it"
        )
    check_attention(hf_config, config.actor.engine.fsdp.ulysses_size)
    if "megatron" in {spec.engine.name for spec in role_specs(config).values() if spec.engine is not None}:
        megatron()
        check_model(hf_config)
    if config.actor.router_replay == "rollout":
        check_routers(hf_config)
    return Model(tokenizer, hf_config, folder, _eos(tokenizer, folder))


def check_rollout_engine(config: Config, model: Model) -> None:
    """Raise ConfigError where the rollout's engine is not installed, or does not have the model.

    For ranks that sample only: it imports the engine, which takes seconds.
    """
    if config.rollout.name == "vllm":
        from spmd_rl.rollout.vllm_versions import check_arguments, check_installed, check_routes

        kind = model.hf_config.model_type
        check_installed(model.hf_config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)])
        check_arguments(config.rollout.engine_kwargs)
        if config.actor.router_replay == "rollout":
            check_routes()


def _eos(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> list[int]:
    generation = load_generation_config(folder) if folder is not None else None
    found = getattr(generation, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def make_order(config: Config, rows: Rows[T]) -> tuple[PromptOrder[T], int]:
    """The order in which rows are met, and how many steps the run has."""
    data, steps = config.data, config.trainer.total_training_steps
    at_once = in_flight(config)
    if data.drop_last and at_once > max(len(rows), data.train_batch_size):
        raise ConfigError(
            f"rollout.over_sampling={config.rollout.over_sampling:g} × data.train_batch_size={data.train_batch_size} = "
            f"{at_once} > {len(rows)} prompts, and with data.drop_last=true a step's prompts are of one epoch; lower "
            "rollout.over_sampling, or set data.drop_last=false"
        )
    order = PromptOrder(
        rows,
        data.train_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        epochs=None if steps is not None else config.trainer.total_epochs,
    )
    total = steps if steps is not None else order.total_steps()
    assert total is not None, "an order with a number of epochs has an end"
    return order, total


def updates_a_step(config: Config) -> int:
    """Mini-batches that a step's rows are cut into."""
    return -(-config.data.train_batch_size // config.actor.ppo_mini_batch_size)


def megatron() -> ModuleType:
    """The Megatron engine's module. Raises ConfigError when megatron-core is not installed."""
    try:
        return import_module("spmd_rl.engines.megatron.engine")
    except ImportError as error:
        raise ConfigError(
            f"engine=megatron needs megatron-core ({error}): pip install megatron-core==0.16.1"
        ) from error


def make_critic(config: Config, model: Model, runtime: Runtime, total_steps: int) -> Engine:
    """The value model on its engine. A start without a value head (the actor's has none) gets one that says 0."""
    critic = config.critic
    hf_config = load_hf_config(config.model, critic.path) if critic.path else model.hf_config
    folder = resolve(critic.path) if critic.path else model.folder
    if critic.engine.name == "megatron":
        return megatron().MegatronEngine(
            hf_config,
            folder,
            runtime.layout("critic"),
            runtime,
            critic.engine,
            optim=critic.optim,
            total_steps=total_steps,
            seed=config.model.seed,
            value_head=True,
            fresh_head=not has_head(folder),
        )
    value_model = ValueModel(build_meta(hf_config, trust_remote_code=config.model.trust_remote_code))
    if critic.engine.gradient_checkpointing:
        value_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    headed = has_head(folder)
    engine = FsdpEngine(
        value_model,
        folder,
        runtime.layout("critic"),
        runtime,
        critic.engine,
        optim=critic.optim,
        total_steps=total_steps,
        seed=config.model.seed,
        fresh=() if headed else (HEAD,),
        ignore=IGNORED,
    )
    if not headed:
        value_model.zero_head()
    return engine


def make_classifier(config: Config, runtime: Runtime, path: str) -> Engine:
    """A sequence classifier with one label, frozen. ConfigError where the folder has no such head."""
    hf_config, folder = load_hf_config(config.model, path), resolve(path)
    if not has_head(folder):
        raise ConfigError(
            f"reward.model.path={path} holds no tensor {HEAD}.weight, so it is no sequence classifier; for a causal LM "
            "set reward.model.kind=judge"
        )
    model = ValueModel(build_meta(hf_config, trust_remote_code=config.model.trust_remote_code))
    layout, engine = runtime.layout("reward"), config.reward.model.engine
    return FsdpEngine(model, folder, layout, runtime, engine, ignore=IGNORED)


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
    temperature: float = 1.0,
    top_k: int = 0,
) -> Engine:
    """A policy on its engine; each rank reads its own slices of the weights."""
    replays = role == "actor" and config.actor.router_replay == "rollout"
    if engine.name == "megatron":
        return megatron().MegatronEngine(
            model.hf_config,
            folder,
            runtime.layout(role),
            runtime,
            engine,
            optim=optim,
            total_steps=total_steps,
            temperature=temperature,
            seed=config.model.seed,
            replays=replays,
        )
    lm = build_meta(model.hf_config, trust_remote_code=config.model.trust_remote_code)
    if config.model.lora.rank and optim is not None:
        lm = add_adapters(lm, config.model.lora)
    policy = Policy(lm)
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
        temperature=temperature,
        seed=config.model.seed,
        top_k=top_k,
        replays=replays,
    )


def rollout_dtype(config: Config, runtime: Runtime) -> torch.dtype:
    """What the rollout's weights are held in."""
    actor = config.actor.engine
    trained = actor.megatron.param_dtype if actor.name == "megatron" else actor.fsdp.param_dtype
    wanted = config.rollout.dtype if config.rollout.dtype != "auto" else trained
    return compute_dtype(wanted, runtime.device)


def make_rollout_engine(config: Config, model: Model, runtime: Runtime) -> RolloutEngine:
    """An engine without weights: the first sync brings them."""
    lm = build_meta(model.hf_config, rollout_dtype(config, runtime), ATTENTION, config.model.trust_remote_code)
    routed = no_routes(lm.config) if config.actor.router_replay == "rollout" else None
    if config.rollout.name == "vllm":
        return _vllm(config, model, runtime, lm, routed)
    allocate(lm, runtime.device)
    return TransformersRollout(lm, model.eos_token_ids, config.rollout.max_batch_rows, routed)


def _vllm(
    config: Config, model: Model, runtime: Runtime, lm: PreTrainedModel, routed: torch.Tensor | None
) -> RolloutEngine:
    from spmd_rl.rollout.vllm import VllmRollout
    from spmd_rl.rollout.vllm_versions import Settings, forget_names

    rollout, data = config.rollout, config.data
    if runtime.device.type == "cpu" and runtime.plan.shape is not None:
        demand(cpu_mistakes(config, runtime.plan.shape))
    shared = any(role != "rollout" and runtime.plays(role) for role in runtime.plan.roles)
    sleep_level = rollout.sleep_level if shared else 0
    with TemporaryDirectory(prefix="spmd-rl-") as made:
        if model.folder is None:
            lm.config.architectures = [type(lm).__name__]  # without, vLLM takes it for a model that embeds
            lm.config.save_pretrained(made)
        settings = Settings(
            folder=model.folder or Path(made),
            dtype=rollout_dtype(config, runtime),
            infer_tp=rollout.infer_tp,
            infer_pp=rollout.infer_pp,
            max_model_len=data.max_prompt_length + data.max_response_length,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            sleep=sleep_level > 0,
            seed=config.trainer.seed,
            device=runtime.device,
            trust_remote_code=config.model.trust_remote_code,
            name=_agreed_name(runtime),
            sockets=Path(made),
            more=rollout.engine_kwargs,
            moe_layers=moe_layers(lm.config) if routed is not None else (),
        )
        with as_pool(runtime.pool_rank, runtime.pool.size, runtime.device.index or 0):
            engine = VllmRollout(settings, specs_of(lm), model.eos_token_ids, sleep_level, routed)
        dist.barrier(group=runtime.control)  # all have opened what another one made, so that its name may go
        forget_names(settings)
    on_stop(engine.close)
    return engine


def _agreed_name(runtime: Runtime) -> str:
    """Eight random bytes, the same on all ranks of the pool."""
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, group_src=0, group=runtime.control)
    return name[0]


def let_move(
    residency: Residency, role: str, engine: Engine, config: EngineConfig, device: torch.device, trained: bool = True
) -> None:
    """Register what the config lets leave the device."""
    optimizer = trained and config.offload_optimizer
    for piece, may in (("params", config.offload_params), ("optimizer", optimizer)):
        if may:
            name = f"{role}.{piece}"
            residency.register(name, Swap(name, partial(engine.resident, piece), device))
