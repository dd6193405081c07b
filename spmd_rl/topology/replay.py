"""What router replay (`actor.router_replay`) cannot run with."""

from spmd_rl.config import Config
from spmd_rl.topology.shape import ModelShape


def replay_mistakes(config: Config, shape: ModelShape | None) -> list[str]:
    """All of them; without a `shape` those that do not depend on the model."""
    if config.actor.router_replay == "none":
        return []
    replay, mistakes = f"actor.router_replay={config.actor.router_replay}", []
    if config.trainer.mode == "sft":
        mistakes.append(f"{replay} takes the experts of a rollout, but trainer.mode=sft has none; drop it")
    if config.actor.engine.compile:
        mistakes.append(f"{replay} does not go through torch.compile; set actor.engine.compile=false")
    if shape is not None and not shape.moe_layers:
        mistakes.append(f"{replay} needs a model with experts, but {shape.name} is dense; set actor.router_replay=none")
    if config.rollout.name == "vllm":
        mistakes += _vllm_mistakes(config, replay)
    return mistakes


def _vllm_mistakes(config: Config, replay: str) -> list[str]:
    rollout, mistakes = config.rollout, []
    if rollout.infer_pp > 1:
        mistakes.append(f"{replay}: vLLM tells no experts with rollout.infer_pp={rollout.infer_pp}; use infer_pp=1")
    if not rollout.enable_prefix_caching:
        mistakes.append(f"{replay}: vLLM tells experts only with rollout.enable_prefix_caching=true; set it")
    return mistakes
