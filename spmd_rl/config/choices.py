"""Which values the enumerated and the bounded fields may take. Keys may hold `*` for one name."""

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from spmd_rl.config.fields import nearest

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

CHOICES: dict[str, tuple[str, ...]] = {
    "*.engine.name": ("fsdp", "megatron"),
    "*.engine.fsdp.param_dtype": ("auto", "fastest", "float32", "bfloat16"),
    "*.engine.fsdp.reduce_dtype": ("float32", "bfloat16"),
    "*.engine.megatron.param_dtype": ("auto", "fastest", "float32", "bfloat16"),
    "*.optim.schedule": ("constant", "cosine"),
    "*.loss_agg_mode": AGGREGATIONS,
    "actor.router_replay": ("none", "rollout"),
    "actor.kl_loss_type": (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)),
    "algorithm.kl_penalty": (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": ("auto", "token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "algorithm.filter_groups.metric": ("score", "acc", "seq_reward"),
    "cluster.bind": ("auto", "none", "cores", "numa"),
    "cluster.launcher": ("torchrun", "slurm", "torchx"),
    "cluster.rendezvous": ("c10d", "static"),
    "cluster.srun": ("rank", "node"),
    "data.overlong_prompts": ("filter", "error", "truncate_left", "truncate_right"),
    "pools.*.placement": ("pack", "spread"),
    "reward.model.kind": ("classifier", "judge"),
    "rollout.name": ("transformers", "vllm"),
    "rollout.dtype": ("auto", "fastest", "float32", "bfloat16"),
    "rollout.truncated": ("keep", "mask", "drop_group"),
    "rollout.balance": ("none", "expected_length"),
    "rollout.verify_sync": ("checksum", "full", "off"),
    "trainer.mode": ("rl", "sft"),
    "trainer.schedule": ("colocated", "sequential", "one_step_off"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "observe.trackers": ("console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"),
}
"""Key pattern to allowed values (of a list: of each item). Rewards have a registry of their own."""

NAMED: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": (
        "grpo", "grpo_vectorized", "grpo_passk", "grpo_multi_trajectory", "rloo", "rloo_vectorized",
        "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gdpo", "gae",
        "optimal_token_baseline", "tir_optimal_token_baseline",
    ),
    "actor.policy_loss.loss_mode": (
        "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "cispo", "gpg", "geo_mean", "clip_cov", "kl_cov", "dro",
        "reinforce", "bypass_mode",
    ),
}  # fmt: skip
"""The names of ADVANTAGES and POLICY_LOSSES in `algorithms`, which imports torch; a plan does not. The user's own are
given as `path/to/file.py:function` or `package.module:function`."""

BOUNDS: dict[str, tuple[float, float]] = {
    "cluster.nodes": (1, math.inf),
    "cluster.ranks_per_gpu": (1, math.inf),
    "cluster.time_h": (0, math.inf),
    "cluster.memory_gib": (0, math.inf),
    "cluster.retries": (0, math.inf),
    "cluster.links": (1, math.inf),
    "cluster.warning_s": (1, math.inf),
    "cluster.cpus_per_rank": (1, math.inf),
    "cluster.master_port": (1, 65535),
    "cluster.min_nodes": (1, math.inf),
    "pools.*.nnodes": (1, math.inf),
    "*.engine.fsdp.fsdp_size": (-1, math.inf),
    "*.engine.fsdp.ulysses_size": (1, math.inf),
    "*.engine.megatron.tp": (1, math.inf),
    "*.engine.megatron.pp": (1, math.inf),
    "*.engine.megatron.vpp": (1, math.inf),
    "*.engine.megatron.cp": (1, math.inf),
    "*.engine.megatron.ep": (1, math.inf),
    "*.engine.megatron.etp": (1, math.inf),
    "*.engine.max_tokens_per_micro_batch": (1, math.inf),
    "*.engine.logprob_chunk_tokens": (1, math.inf),
    "*.optim.lr": (0, math.inf),
    "*.optim.eps": (0, math.inf),
    "*.optim.weight_decay": (0, math.inf),
    "*.optim.clip_grad": (0, math.inf),
    "*.optim.warmup_steps": (0, math.inf),
    "*.optim.warmup_ratio": (0, 1),
    "*.optim.min_lr_ratio": (0, 1),
    "*.optim.betas": (0, 1),
    "*.ppo_mini_batch_size": (1, math.inf),
    "*.ppo_epochs": (1, math.inf),
    "*.warmup_steps": (0, math.inf),
    "actor.clip_ratio": (0, math.inf),
    "actor.clip_ratio_low": (0, math.inf),
    "actor.clip_ratio_high": (0, math.inf),
    "actor.clip_ratio_c": (1, math.inf),
    "actor.policy_loss.clip_cov_ratio": (0, 1),
    "actor.policy_loss.kl_cov_ratio": (0, 1),
    "actor.policy_loss.ppo_kl_coef": (0, math.inf),
    "actor.policy_loss.tau_*": (0, math.inf),
    "actor.policy_loss.dro_beta": (0, math.inf),
    "actor.kl_loss_coef": (0, math.inf),
    "critic.cliprange_value": (0, math.inf),
    "rollout.infer_tp": (1, math.inf),
    "rollout.infer_pp": (1, math.inf),
    "rollout.n": (1, math.inf),
    "rollout.val_n": (1, math.inf),
    "rollout.temperature": (0, math.inf),
    "rollout.val_temperature": (0, math.inf),
    "rollout.top_p": (0, 1),
    "rollout.val_top_p": (0, 1),
    "rollout.top_k": (-1, math.inf),
    "rollout.stop_token_ids": (0, math.inf),
    "rollout.segment_tokens": (0, math.inf),
    "rollout.over_sampling": (1, math.inf),
    "rollout.max_new_tokens_per_step": (0, math.inf),
    "rollout.time_limit_s": (0, math.inf),
    "rollout.max_batch_rows": (1, math.inf),
    "rollout.gpu_memory_utilization": (0, 1),
    "rollout.sleep_level": (0, 2),
    "teacher.top_k": (-1, math.inf),
    "teacher.coef": (0, math.inf),
    "teacher.reward_weight": (0, math.inf),
    "reward.num_workers": (0, math.inf),
    "reward.timeout_s": (0, math.inf),
    "reward.on_error": (-math.inf, math.inf),
    "reward.overlong_buffer_len": (0, math.inf),
    "reward.overlong_penalty_factor": (0, math.inf),
    "data.*.size": (0, math.inf),
    "data.train_batch_size": (1, math.inf),
    "data.val_batch_size": (0, math.inf),
    "data.max_prompt_length": (1, math.inf),
    "data.max_response_length": (1, math.inf),
    "algorithm.gamma": (0, 1),
    "algorithm.lam": (0, 1),
    "algorithm.kl_ctrl.kl_coef": (0, math.inf),
    "algorithm.kl_ctrl.horizon": (1, math.inf),
    "algorithm.kl_ctrl.target_kl": (0, math.inf),
    "algorithm.filter_groups.max_num_gen_batches": (0, math.inf),
    "model.lora.rank": (0, math.inf),
    "model.lora.alpha": (1, math.inf),
    "trainer.total_training_steps": (0, math.inf),
    "trainer.total_epochs": (1, math.inf),
    "trainer.save_freq": (-1, math.inf),
    "trainer.test_freq": (-1, math.inf),
    "trainer.staleness": (1, math.inf),
    "trainer.time_limit_s": (0, math.inf),
    "trainer.timeout_s": (1, math.inf),
    "trainer.checkpoint.keep": (0, math.inf),
    "*.seed": (-(2**63), 2**63 - 1),
    "observe.profile_steps": (1, math.inf),
    "observe.samples_per_step": (-1, math.inf),
    "observe.show_samples": (0, math.inf),
}
"""Key pattern to the smallest and the largest value, both allowed; NaN and infinities never are."""


def matching(patterns: dict[str, Any], key: str) -> Any:
    """The value of the first pattern that the key matches, or None."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(key, pattern)), None)


def check_value(key: str, value: Any) -> Iterator[str]:
    """What is wrong with a leaf's value, one sentence each; yields nothing when all is well or the value is unset."""
    items = value if isinstance(value, list) else [value]
    choices, bounds = matching(CHOICES, key), matching(BOUNDS, key)
    for item in items:
        if key in NAMED and ":" not in str(item) and item not in NAMED[key]:
            near = nearest(str(item), NAMED[key], 1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield (
                f"{key}={item} is not known; {hint}Known are {', '.join(NAMED[key])}; your own is given as "
                "path/to/file.py:function or package.module:function"
            )
        if choices and item is not None and item not in choices:
            near = nearest(str(item), choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{key}={item} is not one of {', '.join(choices)}{hint}"
        if isinstance(item, float) and not math.isfinite(item):
            yield f"{key}={item} is not a finite number"
        elif bounds and isinstance(item, (int, float)) and not bounds[0] <= item <= bounds[1]:
            yield f"{key}={item} is out of range: {_spell(bounds)}"


def _spell(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
