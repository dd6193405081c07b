"""What `rollout.engine_kwargs` may not say: for vLLM they come before the settings that our ranks share."""

from collections.abc import Mapping
from typing import Any

from spmd_rl.config import Config
from spmd_rl.topology.phases import row_tokens

KEYS = {
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "trainer.seed",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.infer_tp",
    "pipeline_parallel_size": "rollout.infer_pp",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_sleep_mode": "rollout.sleep_level",
    "enable_return_routed_experts": "actor.router_replay",
}
"""Argument of vLLM -> the key that sets it."""
FIXED = {
    "data_parallel_size": "replicas are the pool's ranks over infer_tp·infer_pp",
    "prefill_context_parallel_size": "a replica is infer_tp·infer_pp ranks",
    "nnodes": "the launcher says where the ranks are",
    "node_rank": "the launcher says where the ranks are",
    "distributed_executor_backend": "each rank is its own worker",
    "load_format": "the weights come from the actor",
    "runner": "it generates",
    "skip_tokenizer_init": "prompts are token ids already",
    "speculative_config": "every token is drawn by spmd_rl's own sampler",
    "logits_processors": "every token is drawn by spmd_rl's own sampler",
}
"""Argument of vLLM that belongs to how it is run here -> why."""
COUNTS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory_bytes", "block_size")
"""Whole numbers above 0; the plan counts with them."""


def engine_kwargs_mistakes(config: Config) -> list[str]:
    """All of them. Which other arguments there are depends on vLLM's version: it is asked when it is imported."""
    kwargs: Mapping[str, Any] = config.rollout.engine_kwargs
    if not kwargs:
        return []
    if config.rollout.name != "vllm":
        return [f"rollout.engine_kwargs={dict(kwargs)} needs rollout.name=vllm: {config.rollout.name} takes none"]
    path, mistakes = "rollout.engine_kwargs", []
    for name, value in kwargs.items():
        if name in KEYS:
            mistakes.append(f"{path}.{name}={value} would override {KEYS[name]}; set {KEYS[name]} in its place")
        elif name in FIXED:
            mistakes.append(f"{path}.{name}={value} cannot be chosen: {FIXED[name]}; drop it")
        elif name in COUNTS and value is not None and not _counts(value):
            mistakes.append(f"{path}.{name}={value} must be a whole number of at least 1")
    longest, limit = row_tokens(config), kwargs.get("max_model_len")
    if limit is not None and _counts(limit) and limit < longest:
        mistakes.append(
            f"{path}.max_model_len={limit} cannot hold the longest row (max_prompt_length + max_response_length = "
            f"{config.data.max_prompt_length} + {config.data.max_response_length} = {longest}); raise it to {longest}, "
            "or drop it"
        )
    return mistakes


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
