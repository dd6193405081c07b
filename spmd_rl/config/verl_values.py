"""verl's keys whose values change on the way to ours: each with what it becomes, how, and the function that does it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmd_rl.config.choices import CHOICES
from spmd_rl.config.verl_keys import ACTOR, REF, ROLLOUT

Values = dict[str, Any]
Converter = Callable[[str, Any, Values], Values | str | None]
"""(verl's key, value, all that was given) to our keys and values, or why there are none, or None to leave it."""

ROLES = {
    ACTOR: "actor",
    REF: "ref",
    "critic": "critic",
    "reward_model": "reward.model",
    "optim": "actor",
    "engine": "actor",
    "data": "actor",
}
"""Where verl keeps a role to where we do; the last three are the SFT trainer's."""


@dataclass(frozen=True)
class Conversion:
    """What becomes of one of verl's keys."""

    ours: str
    """The key here, for the table of the docs."""
    how: str
    """What happens to the value, for the table of the docs."""
    convert: Converter


def _prefix(key: str) -> str | None:
    return next((prefix for prefix in ROLES if key.startswith(f"{prefix}.")), None)


def _role(key: str) -> str | None:
    return ROLES.get(_prefix(key) or "")


def _as_list(ours: str) -> Converter:
    return lambda key, value, given: {ours: value if isinstance(value, list) else [value]} if value else {}


def _at_least(ours: str, least: int, otherwise: int) -> Converter:
    return lambda key, value, given: {ours: value if value is not None and value >= least else otherwise}


def _of_role(ours: str, convert: Callable[[Any], Any]) -> Converter:
    def converter(key: str, value: Any, given: Values) -> Values | str | None:
        role = _role(key)
        return None if role is None else {f"{role}.{ours}": convert(value)}

    return converter


def _choice(ours: str, known: Values, otherwise: str) -> Converter:
    """`known` values renamed; others have no counterpart, for the reason `otherwise`. `*` in `ours` is the role."""

    def converter(key: str, value: Any, given: Values) -> Values | str | None:
        return {ours.replace("*", _role(key) or ""): known[value]} if value in known else otherwise

    return converter


def _unless(usual: tuple[Any, ...]) -> Converter:
    """Nothing to say about a usual value; another one is looked up among the absent."""
    return lambda key, value, given: {} if value in usual else None


def _schedule(key: str, value: Any, given: Values) -> Values | str | None:
    if value is None:
        return {}
    return {f"{_role(key)}.optim.schedule": value} if value in ("constant", "cosine") else "constant and cosine only"


def _min_lr(key: str, value: Any, given: Values) -> Values | str | None:
    rate = given.get(key.replace("min_lr", "lr"))
    return {f"{_role(key)}.optim.min_lr_ratio": value / rate} if rate else "divide it by the role's optim.lr"


def _ranks_of_a_row(prefix: str, given: Values) -> int:
    """Ranks that share a row (Ulysses, context parallel); ref follows the actor, as in verl."""
    names = [
        f"{holder}ulysses_sequence_parallel_size" for holder in ("", "fsdp_config.", "model.fsdp_config.", "fsdp.")
    ]
    keys = [
        f"{p}.{name}"
        for p in (prefix, ACTOR)[: 1 + (prefix == REF)]
        for name in [*names, "megatron.context_parallel_size"]
    ]
    return int(next((given[key] for key in [*keys, names[0]] if key in given), 1))


def _is_dynamic(prefix: str, given: Values) -> bool:
    """Whether verl cuts the role's micro-batches by tokens; otherwise it counts rows."""
    names = (f"{prefix}.use_dynamic_bsz", f"{prefix}.log_prob_use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz")
    return bool(next((given[name] for name in names if name in given), prefix == "data"))


def _token_budget(key: str, value: Any, given: Values) -> Values | str | None:
    prefix = _prefix(key)
    if prefix is None or value is None or ".forward_" in key:
        return None
    rows = ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu")
    if not _is_dynamic(prefix, given) and any(given.get(f"{prefix}.{name}") for name in rows):
        return {}
    return {f"{ROLES[prefix]}.engine.max_tokens_per_micro_batch": value * _ranks_of_a_row(prefix, given)}


def _row_budget(key: str, value: Any, given: Values) -> Values | str | None:
    prefix = _prefix(key)
    if prefix is None or ".forward_" in key:
        return None
    ours = f"{ROLES[prefix]}.engine.max_tokens_per_micro_batch"
    if not value or _is_dynamic(prefix, given):
        return {}
    lengths = [given.get(name) for name in ("data.max_prompt_length", "data.max_response_length")]
    if None in lengths:
        return f"give a budget of tokens: {ours}"
    return {ours: value * sum(int(length or 0) for length in lengths)}


def _dtype(ours: str) -> Converter:
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}

    def converter(key: str, value: Any, given: Values) -> Values | str | None:
        name = "rollout.dtype" if key.startswith(ROLLOUT) else f"{_role(key)}.engine.fsdp.{ours}"
        return {name: names[value]} if value in names else "bfloat16 and float32 only"

    return converter


def _engine(key: str, value: Any, given: Values) -> Values | str | None:
    known: dict[Any, Values] = {"fsdp": {}, "fsdp2": {}, "dp": {}, "megatron": {"engine": "megatron"}}
    return known.get(value, "fsdp and megatron only")


def _false(values: Values) -> Converter:
    """`values` when it is false; true is how it is anyway."""
    return lambda key, value, given: {} if value else values


def _true(values: Values) -> Converter:
    """`values` when it is true."""
    return lambda key, value, given: values if value else {}


def _own_pool(pool: str, ours: str) -> Converter:
    def converter(key: str, value: Any, given: Values) -> Values | str | None:
        prefix = key.rpartition(".")[0]
        if not given.get(f"{prefix}.nnodes") or given.get(f"{prefix}.enable_resource_pool", True) is False:
            return {}
        sizes = {"nnodes": given[f"{prefix}.nnodes"], "n_gpus_per_node": given.get(f"{prefix}.n_gpus_per_node") or 8}
        return {f"{ours}.pool": pool, **{f"pools.{pool}.{name}": size for name, size in sizes.items()}}

    return converter


def _reward_file(key: str, value: Any, given: Values) -> Values | str | None:
    prefix = key.rpartition(".")[0]
    path, name = given.get(f"{prefix}.path"), given.get(f"{prefix}.name") or "compute_score"
    return {"reward.functions": [f"{path}:{name}"]} if path else {}


def _overlong(key: str, value: Any, given: Values) -> Values | str | None:
    prefix, _, name = key.rpartition(".")
    if not given.get(f"{prefix}.enable", False):
        return {"reward.overlong_buffer_len": 0}
    renamed = {"len": "reward.overlong_buffer_len", "penalty_factor": "reward.overlong_penalty_factor"}
    return {renamed[name]: value} if name in renamed else {}


def _rest(prefix: str, ours: str) -> Converter:
    def converter(key: str, value: Any, given: Values) -> Values | str | None:
        if key == prefix:
            return {f"{ours}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {}
        return {f"{ours}.{key.removeprefix(prefix + '.')}": value}

    return converter


def _trackers(key: str, value: Any, given: Values) -> Values | str | None:
    names = value if isinstance(value, list) else [value]
    return {"observe.trackers": [*(name for name in names if name in CHOICES["observe.trackers"]), "jsonl"]}


def _resume(key: str, value: Any, given: Values) -> Values | str | None:
    known = {"auto": "auto", "disable": "never", "resume_path": given.get("trainer.resume_from_path")}
    return {"trainer.resume": known[value]} if known.get(value) else {}


def _truncated_importance(key: str, value: Any, given: Values) -> Values | str | None:
    correction = "algorithm.rollout_correction.rollout_is"
    return {correction: "token", f"{correction}_threshold": value} if value and value > 0 else {}


NOTHING: Values = {}
SCHEDULE = Conversion("*.optim.schedule", "constant | cosine", _schedule)
ROLLOUT_POOL = Conversion(
    "pools.rollout.*, rollout.pool", "nnodes above 0: a pool of its own", _own_pool("rollout", "rollout")
)
REWARD_POOL = Conversion("pools.reward.*, reward.model.pool", "a pool of its own", _own_pool("reward", "reward.model"))
REWARD_FILE = Conversion("reward.functions", "[path:name]; the name is compute_score when not given", _reward_file)
OVERLONG = Conversion(
    "reward.overlong_buffer_len, reward.overlong_penalty_factor", "not enabled is length 0", _overlong
)
CONVERTED: dict[str, Conversion] = {
    "data.train_files": Conversion("data.train.files", "always a list", _as_list("data.train.files")),
    "data.val_files": Conversion("data.val.files", "always a list", _as_list("data.val.files")),
    "data.train_max_samples": Conversion("data.train.size", "-1 (all) is 0", _at_least("data.train.size", 0, 0)),
    "data.val_max_samples": Conversion("data.val.size", "-1 (all) is 0", _at_least("data.val.size", 0, 0)),
    "data.val_batch_size": Conversion("data.val_batch_size", "null (all) is 0", _at_least("data.val_batch_size", 0, 0)),
    "data.seed": Conversion("data.seed", "null is 1: the order is always seeded", _at_least("data.seed", 0, 1)),
    "data.filter_overlong_prompts": Conversion(
        "data.overlong_prompts",
        "true is filter, whatever data.truncation says",
        _true({"data.overlong_prompts": "filter"}),
    ),
    "data.truncation": Conversion(
        "data.overlong_prompts",
        "error | truncate_left | truncate_right",
        _choice(
            "data.overlong_prompts",
            {"error": "error", "left": "truncate_left", "right": "truncate_right"},
            "error, left and right only",
        ),
    ),
    "data.reward_fn_key": Conversion("(none)", "the column is data_source", _unless(("data_source",))),
    "data.max_length": Conversion(
        "data.max_prompt_length, data.max_response_length",
        "SFT: verl bounds the sum, here each has its bound",
        lambda key, value, given: {"data.max_prompt_length": value, "data.max_response_length": value},
    ),
    "*optim.lr_warmup_steps": Conversion(
        "*.optim.warmup_steps", "-1 (unset) is 0", _of_role("optim.warmup_steps", lambda value: max(value or 0, 0))
    ),
    "*optim.warmup_style": SCHEDULE,
    "*optim.lr_scheduler*": SCHEDULE,
    "*optim.lr_decay_style": SCHEDULE,
    "*optim.min_lr": Conversion("*.optim.min_lr_ratio", "divided by lr", _min_lr),
    "*optim.total_training_steps": Conversion("(none)", "trainer.total_training_steps", _unless((-1, None))),
    "*.target_modules": Conversion("model.lora.target_modules", "always a list", _as_list("model.lora.target_modules")),
    "*.virtual_pipeline_model_parallel_size": Conversion(
        "*.engine.megatron.vpp", "null is 1", _of_role("engine.megatron.vpp", lambda value: value or 1)
    ),
    "*max_token_len_per_gpu": Conversion(
        "*.engine.max_tokens_per_micro_batch",
        "times the Ulysses or context parallel size: the budget is that of a dp rank, and never exceeded",
        _token_budget,
    ),
    "*micro_batch_size_per_gpu": Conversion(
        "*.engine.max_tokens_per_micro_batch",
        "rows times the longest prompt and response (without use_dynamic_bsz)",
        _row_budget,
    ),
    "*.mixed_precision.param_dtype": Conversion("*.engine.fsdp.param_dtype", "bf16, fp32", _dtype("param_dtype")),
    "*.mixed_precision.reduce_dtype": Conversion("*.engine.fsdp.reduce_dtype", "bf16, fp32", _dtype("reduce_dtype")),
    "*.dtype": Conversion("*.engine.fsdp.param_dtype, rollout.dtype", "no float16", _dtype("param_dtype")),
    "*.strategy": Conversion("engine=…", "fsdp, fsdp2: engine=fsdp; megatron: engine=megatron", _engine),
    "model_engine": Conversion("engine=…", "dp: engine=fsdp; megatron: engine=megatron", _engine),
    f"{ACTOR}.use_token_level_loss": Conversion(
        "actor.loss_agg_mode", "true is token-mean", _true({"actor.loss_agg_mode": "token-mean"})
    ),
    f"{ACTOR}.tis_imp_ratio_cap": Conversion(
        "algorithm.rollout_correction.rollout_is*", "token weights, truncated there", _truncated_importance
    ),
    f"{ACTOR}*.router_replay.mode": Conversion(
        "actor.router_replay",
        "disabled is none, R3 is rollout",
        _choice(
            "actor.router_replay",
            {"disabled": "none", "R3": "rollout"},
            "no R2: set actor.router_replay=rollout, which replays the rollout's experts (R3)",
        ),
    ),
    f"{ROLLOUT}.enable_rollout_routing_replay": Conversion(
        "(none)", "it follows actor.router_replay", lambda key, value, given: NOTHING
    ),
    f"{ROLLOUT}.name": Conversion(
        "rollout=…",
        "hf is transformers; sglang and trtllm become vllm",
        lambda key, value, given: {"rollout": "transformers" if value == "hf" else "vllm"},
    ),
    f"{ROLLOUT}.top_k": Conversion("rollout.top_k", "0 (all) is -1", _at_least("rollout.top_k", 1, -1)),
    f"{ROLLOUT}.do_sample": Conversion("rollout.temperature", "false is 0", _false({"rollout.temperature": 0.0})),
    f"{ROLLOUT}.val_kwargs.do_sample": Conversion(
        "rollout.val_temperature", "false is 0", _false({"rollout.val_temperature": 0.0})
    ),
    f"{ROLLOUT}.val_kwargs.top_k": Conversion("(none)", "validation keeps all tokens", _unless((-1, 0, None))),
    f"{ROLLOUT}.free_cache_engine": Conversion(
        "rollout.sleep_level",
        "true is 2, false is 0",
        lambda key, value, given: {"rollout.sleep_level": 2 if value else 0},
    ),
    f"{ROLLOUT}.engine_kwargs.vllm*": Conversion(
        "rollout.engine_kwargs.*", "passed on", _rest(f"{ROLLOUT}.engine_kwargs.vllm", "rollout.engine_kwargs")
    ),
    f"{ROLLOUT}.nnodes": ROLLOUT_POOL,
    f"{ROLLOUT}.n_gpus_per_node": ROLLOUT_POOL,
    "*custom_reward_function.path": REWARD_FILE,
    "*custom_reward_function.name": REWARD_FILE,
    "custom_reward_function.reward_kwargs*": Conversion(
        "reward.kwargs.*", "passed on", _rest("custom_reward_function.reward_kwargs", "reward.kwargs")
    ),
    "*.overlong_buffer_cfg.*": OVERLONG,
    "*.overlong_buffer.*": OVERLONG,
    "reward_model.nnodes": REWARD_POOL,
    "reward_model.n_gpus_per_node": REWARD_POOL,
    "reward_model.enable_resource_pool": REWARD_POOL,
    "trainer.logger": Conversion("observe.trackers", "those that exist here, and jsonl always", _trackers),
    "trainer.resume_mode": Conversion("trainer.resume", "disable is never; resume_path is the path", _resume),
    "trainer.resume_from_path": Conversion(
        "trainer.resume", "with resume_mode=resume_path", lambda key, value, given: NOTHING
    ),
    "trainer.max_actor_ckpt_to_keep": Conversion(
        "trainer.checkpoint.keep", "null (all) is 0", _at_least("trainer.checkpoint.keep", 1, 0)
    ),
    "trainer.nnodes": Conversion(
        "cluster.nodes", "and torchrun's --nnodes", lambda key, value, given: {"cluster.nodes": value}
    ),
    "trainer.n_gpus_per_node": Conversion(
        "cluster.gpus_per_node",
        "and torchrun's --nproc-per-node",
        lambda key, value, given: {"cluster.gpus_per_node": value},
    ),
    "global_profiler.steps": Conversion(
        "observe.profile_steps", "null is empty", lambda key, value, given: {"observe.profile_steps": value or []}
    ),
}
"""verl's key (a pattern) to what becomes of it; the first pattern that matches and answers is taken."""
