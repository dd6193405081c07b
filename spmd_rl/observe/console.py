"""The console: a header, a line a step, validation, a few replies; with a progress bar when it is a terminal."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from spmd_rl.config import Config
from spmd_rl.observe.jsonl import read_metrics
from spmd_rl.observe.live import Report
from spmd_rl.observe.memory import ALLOCATED, OF_PLAN, PLANNED
from spmd_rl.observe.tracking import Metrics, Sample

COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("sft/loss", "train/loss"), ".4f"),
    ("reward", ("critic/score/mean",), ".3f"),
    ("len", ("response_length/mean",), ".1f"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), ".4f"),
    ("ppo_kl", ("actor/ppo_kl",), ".4f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("grad", ("actor/grad_norm", "sft/grad_norm"), ".3g"),
    ("lr", ("actor/lr", "sft/lr"), ".2g"),
    ("tok/s/rank", ("perf/throughput",), ".0f"),
)
"""What a step's line shows: label, the metrics of which the first present is taken, format. `kl` is to the reference,
`ppo_kl` to the policy that sampled: shown from the step on in which it is more than its rounding."""

SHOWN_PPO_KL = 5e-5
"""Below, `ppo_kl` is printed as 0.0000, as always when a step has one update."""

CHAT_MARKER = re.compile(r"<\|im_start\|>\w*|<\|start_header_id\|>\w*|<\|[^|<>]*\|>")
"""What a chat template puts around the turns; not worth a reader's eye."""

MEMORY_STEPS = 2
"""How many steps say what they took of the planned memory: AdamW's state is there from the second one on."""

WARN_ABOVE_ZERO = ("reward/timeouts", "actor/skipped_updates", "sft/skipped_updates")
"""Counters that are shown only when something happened."""

SLOW_PHASE_S = 60.0
"""A phase of so many seconds is worth a line where there is no progress bar; then one at twice as many, and so on."""


class ConsoleTracker:
    """Lines on the terminal, or plain lines (one a step, no escape codes) into a file or a pipe."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._first_validation: dict[str, float] = {}
        self._steps = self._start_step = self._show_samples = 0
        self._started = time.monotonic()
        self._next_word = SLOW_PHASE_S
        self._ppo_kl_moves = False

    def start(self, config: Config, start_step: int, facts: Mapping[str, str]) -> None:
        """Print the header; `facts["steps"]` is the number of steps, for the progress and the time left."""
        self._show_samples, self._start_step = config.observe.show_samples, start_step
        self._steps = int(facts.get("steps", 0))
        title = f"spmd_rl  {config.trainer.project_name}/{config.trainer.experiment_name}"
        self._console.print(Text(title, style="bold"))
        resumed = {"resumed": f"after step {start_step}"} if start_step else {}
        lines = {**facts, "output": config.trainer.output_dir, **resumed}
        width = max(map(len, lines))
        for name, value in lines.items():
            self._console.print(Text.assemble("  ", (name.ljust(width), "cyan"), f"  {value}"))
        self._first_validation = _first_validation(Path(config.trainer.output_dir), start_step)
        self._started = time.monotonic()
        if self._console.is_terminal and self._steps:
            self._progress = _progress(self._console, start_step, self._steps)

    def log(self, metrics: Metrics, step: int) -> None:
        """The step's line, and the validation's when there is one among the metrics."""
        validation = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        if len(validation) < len(metrics) and any(not name.startswith("val-") for name in metrics):
            self._print(Text(self.step_line(metrics, step)))
            memory = memory_line(metrics)
            if memory and step <= self._start_step + MEMORY_STEPS:
                self._print(Text(memory, style="dim"))
            if self._progress:
                self._progress.update(self._progress.task_ids[0], completed=step, left=self._left(step))
        if validation:
            failed = metrics.get("val-aux/reward/errors", 0)
            words = self.validation_line(validation, step) + (f"  reward errors {failed:g}" if failed else "")
            self._print(Text(words, style="green"))

    def samples(self, rows: Sequence[Sample], step: int, kind: str = "train") -> None:
        """The first few replies, on one line each."""
        for row in rows[: self._show_samples]:
            shown = f"    {_one_line(row.get('prompt', ''), -60)} → {_one_line(row.get('response', ''), 90)}"
            self._print(Text(f"{shown}  [{_number(row.get('score'))}]", style="dim"))

    def say(self, text: str) -> None:
        """A line that is no metric."""
        self._print(Text(text, style="dim"))

    def live(self, reports: Sequence[Report]) -> None:
        """What the ranks do now: beside the progress bar; without one, a line when a phase goes on for minutes."""
        working = [report for report in reports if not report.ended]
        if not working:
            return
        last = min(working, key=lambda report: (report.step, -report.seconds))
        if self._progress:
            self._progress.update(self._progress.task_ids[0], now=now_words(reports))
        elif last.seconds >= self._next_word:
            self._print(Text(f"still {now_words(reports)}", style="dim"))
            self._next_word *= 2
        elif last.seconds < SLOW_PHASE_S:
            self._next_word = SLOW_PHASE_S

    def close(self) -> None:
        """Stop the progress bar."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def step_line(self, metrics: Metrics, step: int) -> str:
        """`step 3/30  reward 0.250  len 4.1 … 6.1 s (generate 3.2, update_actor 2.1)  left 2:10`."""
        words = [f"step {step}/{self._steps}" if self._steps else f"step {step}"]
        for label, names, spec in COLUMNS:
            value = next((metrics[name] for name in names if name in metrics), None)
            if value is not None and (label != "ppo_kl" or self._moves(value)):
                words.append(f"{label} {value:{spec}}")
        if (errors := metrics.get("reward/errors", 0)) > 0:
            words.append(f"reward errors {errors:g}/{metrics.get('reward/replies', 0):g}")
        words += [f"{name} {metrics[name]:g}" for name in WARN_ABOVE_ZERO if metrics.get(name, 0) > 0]
        words += _times(metrics)
        if self._steps and not self._progress:
            words.append(f"left {self._left(step)}")
        return "  ".join(words)

    def validation_line(self, validation: Metrics, step: int) -> str:
        """`validation after step 10  chain_sum reward mean@1 0.410 (+0.170)`: the change since the first one."""
        words = [f"validation after step {step}"]
        for name, value in validation.items():
            if name.endswith("/std"):
                continue
            change = f" ({value - self._first_validation[name]:+.3f})" if name in self._first_validation else ""
            self._first_validation.setdefault(name, value)
            words.append(f"{_metric_words(name)} {value:.3f}{change}")
        return "  ".join(words)

    def _print(self, text: Text) -> None:
        (self._progress.console if self._progress else self._console).print(text)

    def _moves(self, ppo_kl: float) -> bool:
        """Whether ppo_kl says something: it did so once."""
        self._ppo_kl_moves |= abs(ppo_kl) >= SHOWN_PPO_KL
        return self._ppo_kl_moves

    def _left(self, step: int) -> str:
        done = max(step - self._start_step, 1)
        return _clock((time.monotonic() - self._started) / done * max(self._steps - step, 0))


def now_words(reports: Sequence[Report]) -> str:
    """`generate 12 s (ranks 0-2), reward 3 s (rank 3)`: what the ranks do now, the longest first."""
    phases: dict[str, list[Report]] = {}
    for report in reports:
        word = "ended" if report.ended else "no word" if report.unheard_s else report.phase
        phases.setdefault(word, []).append(report)
    longest = sorted(phases.items(), key=lambda item: -max(report.seconds for report in item[1]))
    return ", ".join(
        f"{name} {max(report.seconds for report in found):.0f} s ({_ranks([report.rank for report in found])})"
        for name, found in longest[:3]
    )


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2`, or how many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"{len(ranks)} ranks"


def memory_line(metrics: Metrics) -> str:
    """`peak GB of the plan's: generate 60.1 of 69.9 (0.86), update_actor 33.2 of 32.5 (1.02)`; empty on a CPU."""
    words = []
    for name, ratio in metrics.items():
        if name.startswith(f"{OF_PLAN}/"):
            phase = name.removeprefix(f"{OF_PLAN}/")
            planned = metrics[f"{PLANNED}/{phase}"]
            words.append(f"{phase} {metrics[f'{ALLOCATED}/{phase}']:.1f} of {planned:.1f} ({ratio:.2f})")
    return f"    peak GB of the plan's: {', '.join(words)}" if words else ""


def _progress(console: Console, start_step: int, steps: int) -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}  {task.fields[now]}"),
    )
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task("steps", total=steps, completed=start_step, left="?", now="")
    progress.start()
    return progress


def _first_validation(folder: Path, start_step: int) -> dict[str, float]:
    """The first value of each validation metric of a run that resumes, when its metrics.jsonl is there."""
    first: dict[str, float] = {}
    if start_step > 0 and (folder / "metrics.jsonl").is_file():
        for row in read_metrics(folder / "metrics.jsonl"):
            if row["step"] <= start_step:
                first = {name: value for name, value in row.items() if name.startswith("val-core/")} | first
    return first


def _metric_words(name: str) -> str:
    """`val-core/openai/gsm8k/reward/best@4/mean` as `gsm8k reward best@4`: a data source may hold slashes itself."""
    parts = name.split("/")
    place = next((i for i, part in enumerate(parts) if "@" in part), len(parts) - 1)
    return " ".join(parts[max(place - 2, 1) : place + 1])


def _times(metrics: Metrics) -> list[str]:
    """The step's seconds, and in brackets the phases that took a twentieth of it or more, longest first."""
    step = metrics.get("perf/time_per_step")
    if step is None:
        return []
    phases = {name[9:]: value for name, value in metrics.items() if name.startswith("timing_s/") and name[9:] != "step"}
    shown = sorted((item for item in phases.items() if item[1] >= 0.05 * step), key=lambda item: -item[1])
    inside = ", ".join(f"{name} {value:.1f}" for name, value in shown)
    return [f"{step:.1f} s" + (f" ({inside})" if inside else "")]


def _one_line(text: object, width: int) -> str:
    """Text without line breaks and chat markers, cut to its first `width` characters, or to its last when negative."""
    folded = " ".join(CHAT_MARKER.sub(" ", str(text)).split())
    if len(folded) <= abs(width):
        return folded
    return f"…{folded[width + 1 :]}" if width < 0 else f"{folded[: width - 1]}…"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
