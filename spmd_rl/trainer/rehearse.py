"""`trainer.rehearse=true`: one real step at the longest lengths, by the same loop on the same ranks, and no traces.

Prompts are the run's own, repeated to `max_prompt_length` tokens; replies do not end before `max_response_length`; each
reply's score is changed by its number in the group, so that there is something to learn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.chat import ChatRows
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.prompts import Prompt, Prompts
from spmd_rl.observe.memory import ALLOCATED
from spmd_rl.observe.tracking import Trackers
from spmd_rl.roles.reward import Reward
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.hardware import GIB, hardware
from spmd_rl.topology.phases import TIMED
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.border import largest
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.loop import Loop
from spmd_rl.trainer.trainer import Trainer


class RunInputs(Protocol):
    """What a mode's inputs are here: `assemble.RunInputs` with an order that can be replaced."""

    model: Any
    """Its `hf_config` is the actor's."""
    order: PromptOrder[Any]

    def loop(self, config: Config, runtime: Runtime, trackers: Trackers, checkpointer: Checkpointer) -> Loop:
        """Models on their engines, and the loop over them."""
        ...


@dataclass(frozen=True)
class Line:
    """One phase of the step: seconds, and bytes on the rank that has most."""

    phase: str
    seconds: float
    bound: float
    estimated: int
    measured: int | None
    """None where the device does not say (CPU)."""


def rehearse(config: Config, inputs: RunInputs, runtime: Runtime) -> str:
    """Take the step; what it took, as a table. Raises what the run itself would (out of memory)."""
    plan, config = runtime.plan, long_replies(config)
    inputs.order = PromptOrder(longest(inputs.order.rows, config), config.data.train_batch_size, drop_last=False)
    nowhere = Checkpointer(Path(config.trainer.output_dir), config.trainer.checkpoint, runtime)  # never saves
    loop = inputs.loop(config, runtime, Trackers([]), nowhere)
    if isinstance(loop, Trainer):
        loop.roles.reward = Varied(loop.roles.reward)  # type: ignore[assignment]
    with loop.timer.phase("step"):
        loop.step(1)
    seconds = largest(slowest(loop.timer.take(), runtime), runtime)
    peaks = largest(loop.peaks.take(runtime.everyone), runtime)
    return table(lines(plan, runtime.env.rank, seconds, peaks), plan, runtime.device)


def long_replies(config: Config) -> Config:
    """Replies go on to the limit, and the first round of sampling is the step's batch."""
    filtering = replace(config.algorithm.filter_groups, enable=False)
    to_the_end: dict[str, Any] = {
        "over_sampling": 1.0,
        "max_new_tokens_per_step": 0,
        "time_limit_s": 0.0,
        "truncated": "keep",
    }
    return replace(
        config,
        rollout=replace(config.rollout, ignore_eos=True, stop_token_ids=[], **to_the_end),
        algorithm=replace(config.algorithm, filter_groups=filtering),
    )


def longest(rows: Any, config: Config) -> Any:
    """The same rows, each as long as allowed."""
    prompt, reply = config.data.max_prompt_length, config.data.max_response_length
    if isinstance(rows, Prompts):
        return replace(rows, prompt_ids=[_repeated(ids, prompt) for ids in rows.prompt_ids])
    assert isinstance(rows, ChatRows), f"no way to lengthen {type(rows).__name__}"
    ids = [_repeated(row, prompt + reply) for row in rows.input_ids]
    return replace(rows, input_ids=ids, loss_masks=[[0] * prompt + [1] * reply for _ in ids])


def _repeated(ids: Sequence[int], length: int) -> list[int]:
    return list(islice(cycle(ids), length))


class Varied:
    """The reward role with other scores for every second reply of a group."""

    def __init__(self, role: Reward) -> None:
        self.role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)

    def score(self, batch: Batch, prompts: Sequence[Prompt], n: int) -> Batch:
        batch = self.role.score(batch, prompts, n)
        batch["score"] = batch["score"] + batch["sample"] % 2
        return batch


def slowest(seconds: dict[str, float], runtime: Runtime) -> dict[str, float]:
    """Each phase's seconds on the rank that took longest."""
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=runtime.everyone)
    return dict(zip(seconds, times.tolist(), strict=True))


def lines(plan: Plan, job_rank: int, seconds: dict[str, float], peaks: dict[str, float]) -> list[Line]:
    """What was measured beside what the plan says, in the plan's order; the step as a whole comes last."""
    found = []
    bounds = {bound.phase: bound.seconds for bound in plan.bounds}
    estimates = {entry.phase: entry.peak for entry in plan.memory_of(job_rank)}
    bounds["generate"] = bounds.get("generate", 0.0) + bounds.get("weight sync", 0.0)
    for phase, timed in TIMED.items():
        if timed in seconds:
            peak = peaks.get(f"{ALLOCATED}/{timed}")
            measured = int(peak * GIB) if peak is not None else None
            found.append(Line(phase, seconds[timed], bounds.get(phase, 0.0), estimates.get(phase, 0), measured))
    total = peaks.get(ALLOCATED)
    measured = int(total * GIB) if total is not None else None
    bound = sum(line.bound for line in found)
    return [*found, Line("step", seconds["step"], bound, max(estimates.values(), default=0), measured)]


def card(plan: Plan, device: torch.device) -> tuple[int, str]:
    """Bytes of a rank's card, and which it is: the real one, or the one that is planned with."""
    planned = hardware(plan.config)
    on_cuda = device.type == "cuda"
    whole = torch.cuda.get_device_properties(device).total_memory if on_cuda else planned.memory
    return whole // plan.config.cluster.ranks_per_gpu, torch.cuda.get_device_name(device) if on_cuda else planned.name


def table(found: Sequence[Line], plan: Plan, device: torch.device) -> str:
    """The lines as text. Head-room is what a rank's card has left at the measured peak (else at the estimated one)."""
    whole, name = card(plan, device)
    head = f"{'phase':<14} {'seconds':>9} {'at least':>9} {'GiB':>8} {'estimated':>9} {'head-room':>9}"
    text = [f"one step at full length on {plan.world_size} × {device.type}; a {name} has {whole / GIB:.1f} GiB", head]
    for line in found:
        peak = line.estimated if line.measured is None else line.measured
        measured = "-" if line.measured is None else f"{line.measured / GIB:.2f}"
        left = f"{(whole - peak) / GIB:9.2f}" if peak else f"{'-':>9}"
        estimated = f"{line.estimated / GIB:9.2f}" if line.estimated else f"{'-':>9}"
        text.append(f"{line.phase:<14} {line.seconds:9.3f} {line.bound:9.3g} {measured:>8} {estimated} {left}")
    text.append("The first step also compiles kernels and connects ranks; `at least` is a bound, not a forecast.")
    if device.type == "cpu":
        text.append("A CPU does not say what a phase took at its peak: GiB is unknown, the estimate is for the card.")
    return "\n".join(text) + "\n"
