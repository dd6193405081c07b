"""An actor's engine on this world of ranks, fed with rows that every rank knows, for tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmd_rl.assemble.model import load_model_facts
from spmd_rl.config.load import compose
from spmd_rl.config.roles import OptimConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.engines.base import Outputs
from spmd_rl.engines.fsdp import FsdpEngine, full
from spmd_rl.engines.host_pool import Swap
from spmd_rl.models.loading import build_meta
from spmd_rl.models.policy import Policy, huggingface_name
from spmd_rl.observe.metrics import Partial, total
from spmd_rl.ranked import plan_of
from spmd_rl.roles.model import sum_over
from spmd_rl.runtime.bootstrap import start, stop
from spmd_rl.runtime.environment import read_environment

PROMPTS, RESPONSES = [3, 7, 2, 5, 1, 4, 6], [5, 2, 9, 1, 4, 7, 3]
TEMPERATURE = 0.8
Plan = list[list[int]]
"""Micro-batches, as rows of `batch()`."""


def batch() -> Batch:
    """Seven rows of the tiny model's tokens, with a weight for each response token."""
    generator = torch.Generator().manual_seed(3)

    def tokens(lengths: list[int]) -> Ragged:
        return Ragged.from_rows([torch.randint(4, 104, (n,), generator=generator) for n in lengths], torch.int64)

    made = Batch(TensorDict({"row_id": torch.arange(len(PROMPTS))}, batch_size=[len(PROMPTS)]))
    made["prompts"], made["responses"] = tokens(PROMPTS), tokens(RESPONSES)
    weights = torch.randn(sum(RESPONSES), generator=generator, dtype=torch.float64)
    made["weights"] = Ragged(weights, torch.tensor(RESPONSES))
    return made


def objective(rows: Batch, outputs: Outputs) -> tuple[Tensor, Partial]:
    """A loss that looks at every token's log-prob and entropy, and adds up over rows."""
    weights = rows["weights"].values
    loss = (weights * outputs["log_probs"]).sum() + 0.1 * outputs["entropy"].square().sum()
    return loss, {"tokens": total(len(weights))}


@contextmanager
def actor(
    overrides: Sequence[str], dtype: str = "float32", optim: dict[str, Any] | None = None
) -> Iterator[FsdpEngine]:
    """The tiny model, as the config would have it but for the type of its weights and the optimizer's settings."""
    config = compose(["experiment=tiny", *overrides])
    settings = config.actor.engine
    plan = plan_of(config, read_environment())
    if dtype == "float64":  # which no config may ask for
        settings.fsdp.param_dtype = settings.fsdp.reduce_dtype = "float64"
    model = load_model_facts(config)
    runtime = start(config, plan)
    try:
        policy = Policy(build_meta(model.hf_config, getattr(torch, dtype)))
        if settings.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        chosen = OptimConfig(**{"lr": 1e-3, "clip_grad": 0.0, **(optim or {})})
        yield FsdpEngine(
            policy,
            model.folder,
            runtime.layout("actor"),
            runtime,
            settings,
            optim=chosen,
            total_steps=10,
            temperature=TEMPERATURE,
        )
    finally:
        stop()


def mine(engine: FsdpEngine, plan: Plan) -> tuple[Batch, Plan]:
    """This rank's rows (every dp_size-th) and the micro-batches of them; some of these may be empty."""
    dp, rank = engine.layout.dp_size, engine.layout.dp_rank(torch.distributed.get_rank())
    rows = list(range(rank, len(PROMPTS), dp))
    return batch().select(rows), [[rows.index(i) for i in micro if i in rows] for micro in plan]


def gradient(engine: FsdpEngine) -> dict[str, Tensor]:
    return {huggingface_name(n): full(p.grad).clone() for n, p in engine.model.named_parameters() if p.grad is not None}


def parameters(engine: FsdpEngine) -> dict[str, Tensor]:
    return {huggingface_name(n): full(p).detach().clone() for n, p in engine.model.named_parameters()}


def watch(engine: FsdpEngine, note: Callable[[], Any]) -> list[Any]:
    """What `note()` says each time just before the optimizer steps."""
    seen: list[Any] = []
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(note()))
    return seen


def one_update(
    overrides: Sequence[str], plan: Plan, dtype: str = "float32", optim: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What an optimizer step saw: gradient, the loss of all ranks, log-probs of this rank's rows."""
    with actor(overrides, dtype, optim) as engine:
        seen = watch(engine, lambda: gradient(engine))
        rows, micro = mine(engine, plan)
        columns = engine.forward(rows, micro, ["log_probs", "entropy"])
        result = engine.train(rows, micro, objective)
        dp_group = torch.distributed.group.WORLD
        assert dp_group is not None
        loss = sum_over(torch.tensor([result.loss], dtype=torch.float64), dp_group).item() / engine.sp_size
        return {
            "gradient": seen[0],
            "loss": loss,
            "grad_norm": result.grad_norm,
            "row_id": rows["row_id"].tolist(),
            "log_probs": [r.clone() for r in columns["log_probs"].rows()],
            "after": parameters(engine),
        }


def after_updates(
    plan: Plan, poison: Sequence[int], rank: int, optim: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Three updates; in those numbered in `poison` the objective is infinite on rank `rank`."""
    with actor([], optim=optim) as engine:
        rows, micro = mine(engine, plan)
        seen = []
        for number in range(3):
            bad = number in poison and torch.distributed.get_rank() == rank

            def loss(part: Batch, outputs: Outputs, bad: bool = bad) -> tuple[Tensor, Partial]:
                value, partial = objective(part, outputs)
                return (value * float("inf") if bad else value), partial

            result = engine.train(rows, micro, loss)
            left = [n for n, p in engine.model.named_parameters() if p.grad is not None]
            seen.append({"result": result, "parameters": parameters(engine), "gradients left": left})
        return seen


def swapped_updates(overrides: Sequence[str], swapping: bool) -> list[Tensor]:
    """Log-probs, parameters and optimizer state of three updates, with everything moved away and back at each place."""
    plan = [[6, 0], [2], [], [1, 5], [3, 4]]
    with actor(overrides) as engine:
        swaps = [Swap(name, partial(engine.resident, name), engine.device) for name in ("params", "optimizer")]
        rows, micro = mine(engine, plan)
        seen: list[Tensor] = []
        for _ in range(3):
            move(engine, swaps if swapping else [])
            columns = engine.forward(rows, micro, ["log_probs"])
            move(engine, swaps if swapping else [])
            engine.train(rows, micro, objective)
            move(engine, swaps if swapping else [])
            seen += [columns["log_probs"].values, *parameters(engine).values(), *engine.resident("optimizer")]
        return [x.detach().clone() for x in seen]


def move(engine: FsdpEngine, swaps: Sequence[Swap]) -> None:
    """Away and back; the objects stay the same ones, and while they are away they hold nothing."""
    before = [id(p) for p in engine.model.parameters()]
    for swap in swaps:
        swap.leave()
    for swap in swaps:
        swap.free()
    assert not any(x.untyped_storage().nbytes() for swap in swaps for x in swap.tensors())
    for swap in swaps:
        swap.come()
    for swap in swaps:
        swap.settle()
    assert [id(p) for p in engine.model.parameters()] == before


def swapped_gradients() -> tuple[int, int, bool]:
    """Bytes moved of an optimizer without state: before and after a backward; whether the gradients came back."""
    with actor([]) as engine:
        swap = Swap("optimizer", partial(engine.resident, "optimizer"), engine.device)
        move(engine, [swap])
        without = swap.take()[0].bytes
        rows, micro = mine(engine, [[0, 1, 2, 3]])
        part = rows.select(micro[0])
        objective(part, engine._outputs(part, ["entropy"]))[0].backward()
        known = gradient(engine)
        move(engine, [swap])
        return without, swap.take()[0].bytes, all(torch.equal(x, known[name]) for name, x in gradient(engine).items())
