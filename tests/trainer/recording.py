"""A run that remembers what it saw: prompts, samples, rewards, gradients and losses of every step, of all ranks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.assemble import build_roles, load_inputs
from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch
from spmd_rl.data.shard import Shard
from spmd_rl.engines.fsdp import FsdpEngine, full
from spmd_rl.models.policy import huggingface_name
from spmd_rl.observe.tracking import Trackers
from spmd_rl.ranked import plan_of
from spmd_rl.runtime.bootstrap import start, stop
from spmd_rl.runtime.environment import read_environment
from spmd_rl.runtime.exchange import gather
from spmd_rl.runtime.remote import Remote, here
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.trainer import Trainer

REWARD = Path(__file__).with_name("reward.py")
TINY = [
    "experiment=tiny",
    f"reward.functions=['{REWARD}:digits']",
    "observe.trackers=[]",
    "data.train.size=40",
    "data.val.task=null",
    "data.max_response_length=12",
    "rollout.stop_token_ids=[10,20,30,40,50,60,70,80]",
    "actor.optim.eps=1e-5",
]
"""The tiny model from scratch, with a reward that differs between replies to one prompt. Adam's first step is nearly
sign(g): with its eps of 1e-8 a rounding error of a gradient near 0 would come out as a whole step."""


@dataclass
class Record:
    """What a run did. Tensors are of the whole batch, in row order."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """A step each: uid, prompts, responses, score …"""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """An optimizer step each, before clipping."""
    losses: list[float] = field(default_factory=list)
    """An optimizer step each."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """A step each."""
    own_rows: list[int] = field(default_factory=list)
    """Rows that this rank trained on, a step each."""


class _Recording(Trainer):
    def watch(self) -> Record:
        self.record = Record()
        if isinstance(self.roles.actor, Remote):
            return self.record
        engine = self.roles.actor.engine
        assert isinstance(engine, FsdpEngine)
        clip, train = engine._clip, engine.train

        def clip_and_note() -> float:
            named = engine.model.named_parameters()
            grads = {huggingface_name(n): full(p.grad).clone() for n, p in named if p.grad is not None}
            self.record.gradients.append(grads)
            return clip()

        def train_and_note(*args: Any) -> Any:
            result = train(*args)
            part = torch.tensor([result.loss], dtype=torch.float64)
            dist.all_reduce(part, group=here(self.roles.actor).dp_group)
            self.record.losses.append(part.item())
            return result

        engine._clip, engine.train = clip_and_note, train_and_note  # type: ignore[method-assign]
        return self.record

    def consume(self, shard: Shard | Remote) -> dict[str, float]:
        metrics = super().consume(shard)
        self.record.metrics.append(dict(metrics))  # the loop adds what the clock decides
        if isinstance(shard, Remote):
            return metrics
        self.record.own_rows.append(len(shard.batch))
        wanted = ["uid", "sample", "prompts", "responses", "score", "advantages", "ref_log_probs"]
        whole: Batch = gather(shard.batch, [c for c in wanted if c in shard.batch], here(self.roles.actor).dp_group)
        row: dict[str, Any] = {"uid": whole["uid"].tolist(), "sample": whole["sample"].tolist()}
        row |= {"score": whole["score"].tolist(), "advantages": whole["advantages"].values}
        row |= {name: [r.tolist() for r in whole[name].rows()] for name in ("prompts", "responses")}
        self.record.rows.append(row)
        return metrics


def record(overrides: list[str], steps: int = 3, base: list[str] = TINY, lag: int | None = None) -> Record:
    """Run some steps on this world of ranks; with `lag` by the few lines of `lagging`, which know of one rank only."""
    config = compose([*base, f"trainer.total_training_steps={steps}", *overrides])
    env = read_environment()
    plan = plan_of(config, env)
    inputs = load_inputs(config, plan, env.rank)
    try:
        runtime = start(config, plan, env)
        roles = build_roles(config, inputs, runtime)
        checkpointer = Checkpointer(Path(config.trainer.output_dir), config.trainer.checkpoint, runtime)
        trainer = _Recording(
            config, runtime, roles, inputs.order, None, Trackers([]), checkpointer, inputs.total_steps, {}
        )
        seen = trainer.watch()
        if lag is None:
            trainer.run(None)
        else:
            lagging(trainer, steps, lag)
        return seen
    finally:
        inputs.scorer.close()
        stop()


def lagging(trainer: Trainer, steps: int, lag: int) -> None:
    """Step k is sampled with the weights after step k - 1 - lag: what a rollout that is `lag` steps ahead does."""
    waiting: dict[int, Any] = {}
    for step in range(1, steps + 1):
        for ahead in range(step, min(step + lag, steps) + 1):
            if ahead not in waiting:  # the first time several steps are sampled with the weights of the start
                waiting[ahead] = trainer.deliver(trainer.produce(ahead), ahead)
        trainer.consume(waiting[step])
        trainer.done = step
