"""Loss and gradient of one optimizer step over a fixed mini-batch, computed by real ranks and real micro-batches."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config import Config
from spmd_rl.config.load import compose
from spmd_rl.config.roles import EngineConfig, FsdpConfig, OptimConfig
from spmd_rl.data.balance import assign
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.shard import Shard
from spmd_rl.engines.fsdp import FsdpEngine, full
from spmd_rl.models.loading import build_meta, load_hf_config, resolve
from spmd_rl.models.policy import Policy
from spmd_rl.models.value import HEAD, IGNORED, ValueModel
from spmd_rl.ranked import plan_of
from spmd_rl.roles.model import ModelRole
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import read_environment
from spmd_rl.trainer.critic import update_critic
from spmd_rl.trainer.finite import Guard
from spmd_rl.trainer.objective import update_actor
from tests.trainer.runs import BASE

RESPONSES = [5, 0, 9, 1, 3, 7, 12, 2, 6, 4, 8, 3]
"""Lengths; one reply is empty."""
N = 2
"""Samples a prompt."""
VOCAB = 50
PICKS = [
    "actor.policy_loss.clip_cov_ratio=0.2",
    "actor.policy_loss.clip_cov_lb=0.01",
    "actor.policy_loss.kl_cov_ratio=0.2",
]


@dataclass
class Case:
    """What is compared: config overrides, and whether the batch has the rollout correction's weights."""

    overrides: list[str]
    weighted: bool = False


def whole_batch(weighted: bool) -> Batch:
    """Twelve rows, the same everywhere: ragged, one empty, one rejected, single tokens masked."""
    make = torch.Generator().manual_seed(7)
    lengths = torch.tensor(RESPONSES)
    tokens, count = int(lengths.sum()), len(lengths)

    def column(low: float, high: float) -> Ragged:
        return Ragged(torch.rand(tokens, generator=make) * (high - low) + low, lengths)

    batch = Batch.empty_like(count)
    batch["row_id"] = torch.arange(count)
    batch["uid"], batch["sample"] = torch.arange(count) // N + 100, torch.arange(count) % N
    prompts = torch.tensor([3 + i % 4 for i in range(count)])
    batch["prompts"] = Ragged(torch.randint(0, VOCAB, (int(prompts.sum()),), generator=make), prompts)
    batch["responses"] = Ragged(torch.randint(0, VOCAB, (tokens,), generator=make), lengths)
    batch["old_log_probs"], batch["ref_log_probs"] = column(-5.2, -3.8), column(-5.2, -3.8)
    batch["rollout_log_probs"] = column(-5.2, -3.8)
    batch["advantages"], batch["returns"], batch["values"] = column(-2, 2), column(-1, 1), column(-1, 1)
    mask = (torch.rand(tokens, generator=make) > 0.2).float()
    mask[int(lengths[:3].sum())] = 0.0  # the only token of row 3
    batch["response_mask"] = Ragged(mask, lengths)
    if weighted:
        batch["rollout_is_weights"] = column(0.2, 2.0)
    return batch


def losses_and_gradients(cases: dict[str, Case], layout: list[str], budget: int) -> dict[str, tuple[float, Tensor]]:
    """Case -> (loss, whole gradient [all parameters]) on this world of ranks, everything in float64."""
    config = compose([*BASE, *PICKS, "algorithm.adv_estimator=gae", *layout, f"rollout.n={N}"])
    env = read_environment()
    try:
        runtime = start(config, plan_of(config, env), env)
        actor, critic = _role("actor", config, runtime), _role("critic", config, runtime)
        out = {}
        for name, case in cases.items():
            out[name] = _update(
                compose([*BASE, *PICKS, f"rollout.n={N}", *case.overrides]), case, actor, runtime, budget
            )
        out["critic"] = _update(config, Case([]), critic, runtime, budget)
        return out
    finally:
        stop()


def _role(name: str, config: Config, runtime: Runtime) -> ModelRole:
    hf_config = load_hf_config(config.model)
    lm = build_meta(hf_config, torch.float64)
    model = Policy(lm) if name == "actor" else ValueModel(lm)
    wanted: EngineConfig = config.actor.engine if name == "actor" else config.critic.engine
    exact = replace(
        wanted, fsdp=FsdpConfig(**{**vars(wanted.fsdp), "param_dtype": "float64", "reduce_dtype": "float64"})
    )
    folder: Path = resolve(config.model.path)
    optim = OptimConfig(lr=0.0, weight_decay=0.0)
    layout = runtime.layout(name)
    engine = FsdpEngine(model, folder, layout, runtime, exact, optim=optim, fresh=(HEAD,), ignore=IGNORED)
    return ModelRole(name, engine, runtime.groups.along(layout.batch, "dp"))


def _update(config: Config, case: Case, role: ModelRole, runtime: Runtime, budget: int) -> tuple[float, Tensor]:
    layout, engine = runtime.layout(role.name), role.engine
    assert isinstance(engine, FsdpEngine)
    whole = whole_batch(case.weighted)
    lengths = (whole["prompts"].lengths + whole["responses"].lengths).tolist()
    assignment = assign(lengths, [list(range(len(lengths)))], layout.dp_size, budget)
    dp_rank = layout.dp_rank(runtime.pool_rank)
    shard = Shard(whole.select(assignment.rows(dp_rank)), assignment, dp_rank, lengths, whole["uid"])
    seen: list[Tensor] = []

    def note() -> float:
        seen.append(torch.cat([full(p.grad).flatten() for p in engine.model.parameters() if p.grad is not None]))
        return float(seen[-1].norm())

    engine._clip = note  # type: ignore[method-assign]
    guard = Guard(runtime, "update")
    if role.name == "critic":
        config.critic.engine.max_tokens_per_micro_batch = budget
        config.critic.ppo_mini_batch_size = len(lengths) // N
        (result,) = update_critic(config, role, shard, runtime, guard)
    else:
        result = update_actor(config, role, shard, 0, guard)
    return result.loss, seen[-1].clone()


def measured(cases: dict[str, Case], layout: list[str], budget: int) -> Any:
    """`losses_and_gradients`, as rank 0 has it; the other ranks' losses must be the same."""
    found = losses_and_gradients(cases, layout, budget)
    rank = read_environment().rank
    return {name: (loss, gradient.tolist() if rank == 0 else None) for name, (loss, gradient) in found.items()}
