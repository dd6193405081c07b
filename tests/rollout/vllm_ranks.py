"""What the tests of vLLM do on each rank: a tiny run, whose replies are looked at before and after updates."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from spmd_rl.rollout import vllm_versions
from spmd_rl.rollout.base import Reply, Request
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.rollout.transformers import TransformersRollout
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import steps_taken, with_trainer

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [20] * 33, [40, 41], list(range(4, 90))]
PARAMS = {
    "plain": SamplingParams(max_tokens=24),
    "cool": SamplingParams(max_tokens=24, temperature=0.7),
    "nucleus": SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, top_k=30),
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "stop ids": SamplingParams(max_tokens=24, stop_token_ids=tuple(range(30, 60))),
    "ignore eos": SamplingParams(max_tokens=24, ignore_eos=True),
}


def look(trainer: Trainer, folder: str) -> dict[str, Any]:
    """Replies of the engine against plain transformers with the actor's weights and against our own decode loop."""
    rollout = trainer.roles.rollout
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = _own_loop(trainer, plain)
    plain.load_state_dict(own.model.state_dict())
    seed = torch.get_rng_state()
    rollout.sync()
    requests = [Request(i, prompt, 3, 7) for i, prompt in enumerate(PROMPTS)]
    found: dict[str, Any] = {"log_probs": {}, "finished": {}}
    for name, params in PARAMS.items():
        replies = rollout.engine.generate(requests, params, seed=3)
        flat = [(r.prompt_ids, reply) for r, group in zip(requests, replies, strict=True) for reply in group]
        if params.top_p == 1.0:
            found["log_probs"][name] = max(difference(plain, list(p), reply, params.temperature) for p, reply in flat)
        found["finished"][name] = [(reply.finished, reply.token_ids[-1]) for _, reply in flat]
        found[name] = [reply.token_ids for _, reply in flat]
        assert all(len(r.token_ids) == len(r.log_probs) for _, r in flat)
    found["random state kept"] = torch.equal(seed, torch.get_rng_state())
    for name, params in PARAMS.items():
        replies = own.generate(requests, params, seed=3)
        found[f"own {name}"] = [reply.token_ids for group in replies for reply in group]
    return found


def _own_loop(trainer: Trainer, plain: Any) -> TransformersRollout:
    from spmd_rl.models.loading import allocate, build_meta
    from spmd_rl.rollout.transformers import ATTENTION

    lm = build_meta(plain.config, torch.float32, ATTENTION, False)
    allocate(lm, torch.device("cpu"))
    own = TransformersRollout(lm, sorted(trainer.roles.rollout.engine.eos), 64)
    own.load_weights(trainer.roles.rollout.actor.weights())
    return own


def difference(plain: Any, prompt: list[int], reply: Reply, temperature: float) -> float:
    """Largest difference of a reply's log-probs to plain transformers'."""
    ids = torch.tensor([prompt + reply.token_ids])
    with torch.no_grad():
        log_probs = (plain(ids).logits[0] / (temperature or 1.0)).log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(reply.token_ids))
    return (log_probs[places, reply.token_ids] - torch.tensor(reply.log_probs)).abs().max().item()


def before_and_after(folder: str, overrides: Sequence[str], packed: bool) -> dict[str, Any]:
    """Look, take two steps, look again; whether weights are written in place, and the steps' metrics.

    `packed`: vLLM may pack linear layers for this CPU, as it does by itself.
    """

    def use(trainer: Trainer) -> dict[str, Any]:
        first = look(trainer, folder)
        steps = steps_taken(trainer)
        in_place = trainer.roles.rollout.engine.held is not None
        shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "cpushm" in line]
        found = {"before": first, "after": look(trainer, folder), "steps": steps, "in place": in_place}
        return found | {"shared": shared, "sockets": Path(os.environ["VLLM_RPC_BASE_PATH"]).exists()}

    fixed = [f"model.path={folder}", "rollout=vllm", "data.max_response_length=24"]
    kept = vllm_versions.Settings
    vllm_versions.Settings = partial(kept, packed=packed)  # type: ignore[assignment,misc]
    try:
        return with_trainer(use, [*fixed, *overrides], steps=2)
    finally:
        vllm_versions.Settings = kept  # type: ignore[misc]


def steps_of(folder: str, overrides: Sequence[str]) -> list[dict[str, float]]:
    return with_trainer(steps_taken, [f"model.path={folder}", *overrides], steps=3)
