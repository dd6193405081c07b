"""Runs of the tiny model on this world of ranks, for tests: build a Trainer, do something with it, take it down."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spmd_rl.assemble import build_roles, load_inputs
from spmd_rl.config.load import compose
from spmd_rl.observe.tracking import Trackers
from spmd_rl.ranked import plan_of
from spmd_rl.runtime.bootstrap import start, stop
from spmd_rl.runtime.environment import read_environment
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.trainer import Trainer

T = TypeVar("T")
REWARDS = Path(__file__).with_name("reward.py")
BASE = [
    "experiment=tiny",
    f"reward.functions=['{REWARDS}:digits']",
    "observe.trackers=[]",
    "data.train.size=40",
    "data.val.task=null",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "critic.ppo_mini_batch_size=4",
    "critic.optim.lr=1e-3",
    "critic.engine={gradient_checkpointing: false, max_tokens_per_micro_batch: 2048}",
    "ref.engine.max_tokens_per_micro_batch=2048",
]
"""The tiny model from scratch, with a reward that differs between replies to one prompt."""


def with_trainer(use: Callable[[Trainer], T], overrides: list[str], steps: int = 3) -> T:
    """use(trainer) with a fresh trainer."""
    config = compose([*BASE, f"trainer.total_training_steps={steps}", *overrides])
    env = read_environment()
    plan = plan_of(config, env)
    inputs = load_inputs(config, plan, env.rank)
    try:
        runtime = start(config, plan, env)
        roles = build_roles(config, inputs, runtime)
        checkpointer = Checkpointer(Path(config.trainer.output_dir), config.trainer.checkpoint, runtime)
        parts = (roles, inputs.order, inputs.validation, Trackers([]), checkpointer, inputs.total_steps, {})
        return use(Trainer(config, runtime, *parts))
    finally:
        inputs.close()
        stop()


def steps_taken(trainer: Trainer) -> list[dict[str, float]]:
    """The metrics of each step of a whole run."""
    seen: list[dict[str, float]] = []
    trainer.log = lambda metrics, step: seen.append(dict(metrics))  # type: ignore[method-assign,assignment]
    trainer.run(None)
    return seen


def train(overrides: list[str], steps: int = 3) -> list[dict[str, float]]:
    """A whole run's metrics."""
    return with_trainer(steps_taken, overrides, steps)


def many(cases: list[list[str]], steps: int = 3) -> list[Any]:
    """Several runs after each other: metrics a step, or the exception's text."""
    out: list[Any] = []
    for overrides in cases:
        try:
            out.append(train(overrides, steps))
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}")
    return json.loads(json.dumps(out))
