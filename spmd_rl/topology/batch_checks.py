"""What contradicts itself in batches, lengths, sampling, rewards and the schedule, whatever the machines are."""

from spmd_rl.config import Config
from spmd_rl.config.roles import EngineConfig, MegatronConfig, OptimConfig
from spmd_rl.config.run import RolloutCorrectionConfig
from spmd_rl.topology.engine_kwargs import engine_kwargs_mistakes
from spmd_rl.topology.fold import divisors, one_of
from spmd_rl.topology.phases import row_tokens
from spmd_rl.topology.roles import RoleSpec, config_path, role_specs
from spmd_rl.topology.tails import tail_mistakes, tail_warnings

GROUP_ESTIMATORS = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gdpo", "reinforce_plus_plus_baseline",
    "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
"""Advantage estimators that compare the samples of one prompt with each other."""


def batch_mistakes(config: Config) -> list[str]:
    """All of them; rollout and rewards only in rl mode."""
    mistakes = _mini_batch_mistakes(config)
    if config.trainer.mode != "sft":
        mistakes += _group_mistakes(config) + _rollout_mistakes(config) + _reward_mistakes(config)
        mistakes += _correction_mistakes(config) + _schedule_mistakes(config) + tail_mistakes(config)
    return mistakes


def engine_mistakes(config: Config, spec: RoleSpec) -> list[str]:
    """One role's engine: settings of the other engine, offloads that exclude each other, a budget below one row."""
    if spec.engine is None:
        return []
    prefix, engine = config_path(spec), spec.engine
    mistakes = _foreign_axes(f"{prefix}.engine", engine) + _offload_mistakes(config, f"{prefix}.engine", spec, engine)
    longest = row_tokens(config)
    if longest > engine.max_tokens_per_micro_batch:
        mistakes.append(
            f"{prefix}.engine.max_tokens_per_micro_batch={engine.max_tokens_per_micro_batch} cannot hold the "
            f"longest row (max_prompt_length + max_response_length = {config.data.max_prompt_length} + "
            f"{config.data.max_response_length} = {longest}); raise it to {longest} or shorten the rows"
        )
    if spec.optim is not None:
        mistakes += _optim_mistakes(f"{prefix}.optim", spec.optim)
    return mistakes


def _mini_batch_mistakes(config: Config) -> list[str]:
    batch, mistakes = config.data.train_batch_size, _loss_mistakes(config)
    sizes = {"actor.ppo_mini_batch_size": config.actor.ppo_mini_batch_size}
    if config.critic.ppo_mini_batch_size is not None and config.algorithm.adv_estimator == "gae":
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for name, mini in sizes.items():
        if mini > batch:
            mistakes.append(f"{name}={mini} is more than data.train_batch_size={batch}; use at most {batch}")
        elif mini > 0 and batch % mini:
            mistakes.append(
                f"{name}={mini} does not divide data.train_batch_size={batch}: the last optimizer step would see only "
                f"{batch % mini} prompts; use {one_of(divisors(batch))}"
            )
    return mistakes


def _loss_mistakes(config: Config) -> list[str]:
    """A divisor that would turn the loss around."""
    factor = config.actor.loss_scale_factor
    if factor is None or factor > 0:
        return []
    return [f"actor.loss_scale_factor={factor:g} must be above 0: the loss is divided by it"]


def _group_mistakes(config: Config) -> list[str]:
    n = config.rollout.n
    mistakes = []
    if n == 1 and config.algorithm.filter_groups.enable:
        mistakes.append(
            "algorithm.filter_groups drops groups of equal scores, but with rollout.n=1 every group is equal"
        )
    if n > 1 and config.rollout.temperature == 0:
        mistakes.append(f"rollout.temperature=0 makes the {n} samples of a prompt equal; use a temperature above 0")
    return mistakes


def batch_warnings(config: Config) -> list[str]:
    """What can run but hardly does what is wanted."""
    n, estimator = config.rollout.n, config.algorithm.adv_estimator
    if config.trainer.mode == "sft":
        return []
    warnings = tail_warnings(config) + _truncation_warnings(config)
    if n == 1 and estimator in GROUP_ESTIMATORS:
        compares = f"algorithm.adv_estimator={estimator} compares the samples of a prompt with each other"
        warnings.append(f"{compares}, but rollout.n=1: there is no signal from the group; use n of 2 and more")
    return warnings


def _truncation_warnings(config: Config) -> list[str]:
    """The sampler's log-probs are of what it keeps of the vocabulary, the actor's of all of it."""
    r, c = config.rollout, config.algorithm.rollout_correction.under(config.trainer.schedule, config.rollout.partial)
    bypasses = c.bypass_mode or config.actor.policy_loss.loss_mode == "bypass_mode"
    reader = "bypass_mode" if bypasses else next((f"{k}={v}" for k, v in _rules(c).items() if v), None)
    cut = f"top_p={r.top_p:g}" if r.top_p < 1 else f"top_k={r.top_k}" if r.top_k > 0 else None
    if reader is None or cut is None:
        return []
    part = f"rollout.{cut} draws from a part of the vocabulary, and algorithm.rollout_correction ({reader}) compares"
    off = "the log-probs there with the actor's of all of it: ratios are off even where the policies are equal"
    return [f"{part} {off}; set rollout.top_p=1 and top_k=-1"]


def _rules(c: RolloutCorrectionConfig) -> dict[str, str | None]:
    return {"rollout_is": c.rollout_is, "rollout_rs": c.rollout_rs}


def schedule_warnings(config: Config) -> list[str]:
    """Pools that both stages of a step need, so that one waits for the other where they should overlap."""
    if config.trainer.schedule != "one_step_off":
        return []
    specs = role_specs(config)
    ahead = {specs[role].pool: role for role in ("rollout", "reward") if role in specs}
    return [
        f"{role} lives on pool {spec.pool!r} with {ahead[spec.pool]}: under trainer.schedule=one_step_off the training "
        f"of a step waits there until the next one is sampled; give {role} another pool"
        for role, spec in specs.items()
        if role not in ("rollout", "reward") and spec.pool in ahead
    ]


def _rollout_mistakes(config: Config) -> list[str]:
    r, mistakes = config.rollout, engine_kwargs_mistakes(config)
    if r.name == "transformers":
        for axis, size in (("infer_tp", r.infer_tp), ("infer_pp", r.infer_pp)):
            if size > 1:
                mistakes.append(f"rollout.{axis}={size} needs rollout.name=vllm: transformers holds the whole model")
        if r.max_batch_rows < r.n:
            mistakes.append(
                f"rollout.max_batch_rows={r.max_batch_rows} cannot hold a group of rollout.n={r.n} samples; "
                f"use {r.n} or more"
            )
    if r.top_k == 0:
        mistakes.append("rollout.top_k=0 keeps no token; use -1 to keep all")
    for name, value in (("top_p", r.top_p), ("val_top_p", r.val_top_p)):
        if value == 0:
            mistakes.append(f"rollout.{name}=0 keeps no token; use 1 to keep all, or temperature=0 for greedy")
    return mistakes


def _reward_mistakes(config: Config) -> list[str]:
    r, mistakes = config.reward, []
    if r.weights and len(r.weights) != len(r.functions):
        mistakes.append(f"reward.weights has {len(r.weights)} entries, but reward.functions has {len(r.functions)}")
    gdpo = config.algorithm.gdpo_weights
    if gdpo and len(gdpo) != len(r.functions):
        mistakes.append(f"algorithm.gdpo_weights has {len(gdpo)} entries, but reward.functions has {len(r.functions)}")
    if r.overlong_buffer_len > config.data.max_response_length:
        mistakes.append(
            f"reward.overlong_buffer_len={r.overlong_buffer_len} is longer than "
            f"data.max_response_length={config.data.max_response_length}"
        )
    if not r.functions and not r.model.enable:
        mistakes.append(
            "reward.functions is empty and reward.model.enable=false: nothing scores a reply; set one of them"
        )
    if r.model.enable and r.model.path is None:
        mistakes.append("reward.model.enable=true needs reward.model.path")
    if r.model.enable and r.model.kind == "judge" and len(r.model.answers) != 2:
        mistakes.append(f"reward.model.answers={list(r.model.answers)} must be two: the good answer and the bad one")
    if r.model.enable and r.model.kind == "classifier" and r.model.engine.name != "fsdp":
        mistakes.append(
            f"reward.model.kind=classifier needs reward.model.engine.name=fsdp, but it is {r.model.engine.name}"
        )
    for role in ("actor", "teacher"):
        name = getattr(config, role).engine.name
        if config.teacher.enable and config.teacher.top_k and name != "fsdp":
            mistakes.append(
                f"teacher.top_k={config.teacher.top_k} needs {role}.engine.name=fsdp, but it is {name}; use "
                "teacher.top_k=0"
            )
    if config.teacher.enable and config.teacher.path is None:
        mistakes.append("teacher.enable=true needs teacher.path")
    return mistakes


def _correction_mistakes(config: Config) -> list[str]:
    c, mistakes = config.algorithm.rollout_correction.under(config.trainer.schedule, config.rollout.partial), []
    wants = [name for name in ("rollout_is", "rollout_rs") if getattr(c, name)] + ["bypass_mode"] * c.bypass_mode
    if wants and not config.rollout.calculate_log_probs:
        mistakes.append(
            f"algorithm.rollout_correction.{wants[0]} needs the rollout's log-probs; "
            "set rollout.calculate_log_probs=true"
        )
    if c.rollout_rs and c.rollout_rs_threshold is None:
        mistakes.append(f"algorithm.rollout_correction.rollout_rs={c.rollout_rs} needs rollout_rs_threshold")
    return mistakes


def _schedule_mistakes(config: Config) -> list[str]:
    t, same = config.trainer, config.rollout.pool == config.actor.pool
    mistakes = []
    if t.schedule in ("one_step_off", "sequential") and same:
        mistakes.append(
            f"trainer.schedule={t.schedule} needs the rollout on a pool of its own, but rollout.pool and actor.pool "
            f"are both {config.actor.pool!r}; add pools.rollout and set rollout.pool=rollout"
        )
    reward = config.reward.model
    if t.schedule == "one_step_off" and not same and reward.enable and reward.pool == config.actor.pool:
        mistakes.append(
            f"trainer.schedule=one_step_off scores the next step while this one is trained on, but reward.model.pool "
            f"and actor.pool are both {reward.pool!r}; set reward.model.pool={config.rollout.pool}, or give it its own"
        )
    if t.schedule != "one_step_off" and t.staleness != 1:
        mistakes.append(f"trainer.staleness={t.staleness} needs trainer.schedule=one_step_off, not {t.schedule}")
    return mistakes


def _foreign_axes(prefix: str, engine: EngineConfig) -> list[str]:
    """Sizes of the engine that is not chosen: they would silently do nothing."""
    mistakes = []
    if engine.name == "fsdp":
        plain = MegatronConfig()
        for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"):
            size = getattr(engine.megatron, axis)
            if size != getattr(plain, axis):
                mistakes.append(f"{prefix}.megatron.{axis}={size} needs {prefix}.name=megatron, but it is fsdp")
    if engine.name == "megatron":
        if engine.compile:
            mistakes.append(f"{prefix}.compile=true needs {prefix}.name=fsdp, but it is megatron")
        for name, size, default in (
            ("fsdp_size", engine.fsdp.fsdp_size, -1),
            ("ulysses_size", engine.fsdp.ulysses_size, 1),
            ("offload_policy", engine.fsdp.offload_policy, False),
        ):
            if size != default:
                mistakes.append(f"{prefix}.fsdp.{name}={size} needs {prefix}.name=fsdp, but it is megatron")
    return mistakes


def _offload_mistakes(config: Config, prefix: str, spec: RoleSpec, engine: EngineConfig) -> list[str]:
    mistakes = []
    if engine.name == "fsdp" and engine.fsdp.offload_policy and (engine.offload_params or engine.offload_optimizer):
        which = "offload_params" if engine.offload_params else "offload_optimizer"
        mistakes.append(
            f"{prefix}.fsdp.offload_policy=true keeps the role on the host already; set {prefix}.{which}=false"
        )
    if spec.role == "actor" and config.model.lora.rank > 0 and engine.name == "megatron":
        mistakes.append(f"model.lora.rank={config.model.lora.rank} needs {prefix}.name=fsdp, but it is megatron")
    return mistakes


def _optim_mistakes(prefix: str, optim: OptimConfig) -> list[str]:
    mistakes = []
    if len(optim.betas) != 2:
        mistakes.append(f"{prefix}.betas={list(optim.betas)} must be two numbers")
    elif max(optim.betas) >= 1:
        mistakes.append(f"{prefix}.betas={list(optim.betas)} must be below 1")
    if optim.warmup_steps and optim.warmup_ratio:
        mistakes.append(
            f"{prefix}.warmup_steps={optim.warmup_steps} and warmup_ratio={optim.warmup_ratio} are both set; choose one"
        )
    return mistakes
