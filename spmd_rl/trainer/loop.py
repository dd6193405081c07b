"""What every training loop does around its step: resume, validate, save, log, end. RL and SFT differ in `step` only."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config import Config
from spmd_rl.data.order import PromptOrder
from spmd_rl.engines.base import Engine
from spmd_rl.observe.live import HERE
from spmd_rl.observe.memory import PeakMemory, against_plan
from spmd_rl.observe.metrics import timing_metrics
from spmd_rl.observe.timer import Timer
from spmd_rl.observe.tracking import Trackers
from spmd_rl.roles.residency import Residency
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.liveness import LOST_RANK
from spmd_rl.trainer.border import Idle, together, together_and_largest
from spmd_rl.trainer.checkpoint import Checkpointer, read_state
from spmd_rl.trainer.stop import StopRequest


class Loop(ABC):
    """Steps 1..total_steps. A step's number names its checkpoint, its metrics and its sampling noise."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        engines: Mapping[str, Engine],
        residency: Residency,
        order: PromptOrder[Any],
        trackers: Trackers,
        checkpointer: Checkpointer,
        total_steps: int,
        fingerprint: Mapping[str, Any],
    ) -> None:
        """`engines`: the trained ones, by role; what a checkpoint holds."""
        self.config, self.runtime, self.engines, self.order = config, runtime, engines, order
        self.residency = residency
        self.trackers, self.checkpointer, self.total_steps = trackers, checkpointer, total_steps
        work = _wait_for_work if runtime.device.type == "cuda" else None
        self.timer = Timer(work, lambda: runtime.waits.seconds)
        self.peaks = PeakMemory(runtime.device, lambda: residency.asleep())
        self.idle = Idle(runtime)
        self.fingerprint = dict(fingerprint)
        self.done = self.saved = 0
        """The last step, and that of the last checkpoint."""
        self.started = time.monotonic()
        self.asked_to_stop = StopRequest(runtime.is_first)

    @abstractmethod
    def step(self, step: int) -> dict[str, float] | None:
        """Do one training step; its metrics, or None when the data has run out (on every rank alike).

        Every rank's call makes the same collectives.
        """

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Metrics on the validation rows; empty when there are none."""

    def run(self, resume_from: Path | None) -> None:
        """From the start (or the checkpoint) to the last step, the time limit, or a signal."""
        if resume_from is not None:
            HERE.begin("resume")
            self.load(resume_from)
        self.checkpointer.begin(self.done)
        self.trackers.say(HERE.startup())
        HERE.begin("between phases")
        if resume_from is None and self.config.trainer.val_before_train and self.config.trainer.test_freq >= 0:
            self.log(self.validate(0), 0)
        ended = self.done >= self.total_steps
        while not ended:
            number = HERE.step = self.done + 1
            with self.timer.phase("step"):
                metrics = self.step(number)
            if metrics is None:
                self.end_of_data()
                break
            self.done = number
            ended = number == self.total_steps or self._on_any_rank(bool(self.asked_to_stop) or self._late())
            metrics = self._together(metrics)
            if self.checkpointer.pending and not self._on_any_rank(not self.checkpointer.written):
                self.checkpointer.finish()
            if self._due(self.config.trainer.test_freq, number, ended):
                metrics |= self.validate(number)
            self.log(metrics, number)
            if self._due(self.config.trainer.save_freq, number, ended):
                self.save()
        self.checkpointer.finish()
        if ended and self.done < self.total_steps:
            self.trackers.say(self._why_ended())
            if self._on_any_rank(self.asked_to_stop.launcher_gone):
                sys.exit(LOST_RANK)  # on all hosts: whoever is left shall start again

    def _why_ended(self) -> str:
        """And what the same command will do."""
        why = self.asked_to_stop.name or "another rank was asked to"
        if self._late():
            why = f"trainer.time_limit_s={self.config.trainer.time_limit_s:g}"
        after = f"ended   after step {self.done} of {self.total_steps} ({why})"
        if self.saved != self.done:
            return f"{after}; nothing is saved (trainer.save_freq={self.config.trainer.save_freq})"
        return f"{after}; its checkpoint is saved, and with trainer.resume=auto the same command goes on"

    def end_of_data(self) -> None:
        """The last step turned out to be the last only afterwards: what is due at the end is done now."""
        test, save = self.config.trainer.test_freq, self.config.trainer.save_freq
        if self._due(test, self.done, True) and not self._due(test, self.done, False):
            self.log(self.validate(self.done), self.done)
        if self._due(save, self.done, True) and not self._due(save, self.done, False):
            self.save()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if metrics:
            self.trackers.log(metrics, step)

    def save(self) -> None:
        """Save everything that the next step depends on."""
        with self.timer.phase("save_checkpoint"), self.residency.hold("save"):
            tensors = {role: engine.state() for role, engine in self.engines.items()}
            self.checkpointer.save(self.done, tensors, together(self.state(), self.runtime), self.files())
        self.saved = self.done

    def files(self) -> dict[str, Tensor]:
        """Other files of a checkpoint that this rank writes: name -> bytes."""
        return {}

    def state(self) -> dict[str, Any]:
        """The JSON part of a checkpoint, as far as this rank's pool knows it."""
        return {
            "step": self.done,
            "fingerprint": self.fingerprint,
            "order": self.order.state_dict(),
            "versions": {role: engine.version for role, engine in self.engines.items()},
            "world_size": self.runtime.plan.world_size,
        }

    def load(self, folder: Path) -> None:
        """Continue after the step that `folder` was saved at, with the very next prompt."""
        with self.residency.hold("save"):
            tensors = {role: engine.state() for role, engine in self.engines.items()}
            state = self.checkpointer.load(folder, tensors)
            for role, engine in self.engines.items():
                engine.load_state(tensors[role], state["versions"][role])
        self.load_json(state, folder)

    def load_json(self, state: dict[str, Any], folder: Path) -> None:
        """Take the JSON part of the checkpoint in `folder`."""
        self.done = state["step"]
        self.order.load_state_dict(state["order"])

    def _due(self, every: int, step: int, last: bool) -> bool:
        """-1 never, 0 only at the end, else every so many steps and at the end."""
        return every >= 0 and (last or (every > 0 and step % every == 0))

    def _late(self) -> bool:
        limit = self.config.trainer.time_limit_s
        return limit > 0 and time.monotonic() - self.started > limit

    def _on_any_rank(self, here: bool) -> bool:
        return self.runtime.job.any(here)

    def _together(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The step's metrics of all pools, with its times, its swaps, and its peaks beside the plan's."""
        measured = [self.timer.take(), self.peaks.take(self.runtime.everyone), self.residency.take()]
        known = {**metrics, **self.idle.take()}
        metrics, (seconds, peaks, swaps) = together_and_largest(known, measured, self.runtime)
        memory = peaks | against_plan(peaks, self.runtime.plan.timed_peaks)
        return metrics | self._timing(metrics, seconds) | memory | swaps

    def _timing(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        prompt = metrics.get("prompt_length/mean", 0.0)
        response = metrics.get("response_length/mean", 0.0)
        tokens = metrics.get("perf/total_num_tokens", 0.0)
        rows = tokens / (prompt + response) if prompt + response else 0.0
        return timing_metrics(seconds, prompt * rows, response * rows, self.runtime.plan.world_size)


def _wait_for_work() -> None:
    """For what the rank gave its device, not for what goes on beside it (hot swap)."""
    torch.cuda.current_stream().synchronize()


def saved_step(folder: Path | None) -> int:
    """The last step that is done when a run resumes from `folder`; 0 for a fresh run."""
    return int(read_state(folder)["step"]) if folder is not None else 0
