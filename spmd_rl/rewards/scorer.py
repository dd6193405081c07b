"""Scores groups of replies with the functions of `reward.functions`."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.config.roles import RewardConfig
from spmd_rl.data.rows import Row
from spmd_rl.data.tasks import DATA_SOURCE as TASK_SOURCE
from spmd_rl.rewards.calls import Call, Job, Outcome, perform, wants_token_ids
from spmd_rl.rewards.completion import Completion, Scored
from spmd_rl.rewards.functions import NEEDS_NO_TRUTH, REWARDS, rule_for
from spmd_rl.rewards.loading import TRL_NAMES, Function, Signature, prepare
from spmd_rl.rewards.workers import Workers

logger = logging.getLogger("spmd_rl.rewards")

SHOWN = 3
"""Failures that are logged with their traceback; the others are only counted and kept with their replies."""


class Scorer:
    """The reward functions of a run, in worker processes (`num_workers` > 0) or in this process.

    `data_sources` are those that occur (`data.rows.data_sources`), `tasks` names of reasoning_gym tasks besides: what
    their rules need is imported at the start. `max_response_length`: tokens. Construct it before CUDA starts and before
    a model is loaded: it raises `ConfigError` for a function that cannot be loaded or called.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        data_sources: Sequence[str] = (),
        tasks: Sequence[str] = (),
        max_response_length: int = 0,
    ):
        if config.weights and len(config.weights) != len(config.functions):
            raise ConfigError(
                f"reward.weights has {len(config.weights)} entries, reward.functions has {len(config.functions)}"
            )
        if config.timeout_s <= 0:
            raise ConfigError(f"reward.timeout_s={config.timeout_s}: must be above 0 s")
        self.config, self.max_response_length = config, max_response_length
        self.weights = list(config.weights) or [1.0] * len(config.functions)
        self.stats: Counter[str] = Counter()
        """Since the start: replies, calls, errors (failed calls' replies), timeouts, crashes, given_up."""
        sources = sorted({*data_sources, *(TASK_SOURCE + task.removeprefix(TASK_SOURCE) for task in tasks)})
        self._workers: Workers | None = None
        self._functions: list[Function] = []
        if config.num_workers and config.functions:
            self._workers = Workers(
                config.num_workers, config.functions, dict(config.kwargs), sources, config.timeout_s
            )
            self.signatures: list[Signature] = self._workers.signatures
        else:
            self._functions = prepare(config.functions, dict(config.kwargs), sources)
            self.signatures = [f.signature for f in self._functions]

    @property
    def names(self) -> list[str]:
        """The functions' short names: keys of `Scored.parts`."""
        return [s.name for s in self.signatures]

    def check(self, rows: Iterable[Row]) -> None:
        """Raise `ConfigError` for a row that the functions cannot score: no rule, no ground truth, a missing column."""
        for row in rows:
            for signature in self.signatures:
                if signature.spec in REWARDS:
                    rule = rule_for(row.data_source) if signature.spec == "auto" else signature.spec
                    if row.ground_truth is None and rule not in NEEDS_NO_TRUTH:
                        raise ConfigError(
                            f"{row.where}: reward '{rule}' needs a ground truth, this row has none; name its "
                            "column with data.answer_key, or use verl's reward_model.ground_truth"
                        )
                elif signature.style == "trl":
                    self._check_columns(signature, row)

    def _check_columns(self, signature: Signature, row: Row) -> None:
        known = {*TRL_NAMES, "ground_truth", "data_source", "extra_info", *row.columns, *self.config.kwargs}
        nested = self.config.kwargs.get(signature.name)
        known |= set(nested) if isinstance(nested, dict) else set()
        for name in signature.required:
            if name not in known:
                raise ConfigError(
                    f"{row.where}: reward '{signature.spec}' asks for a column '{name}'; the columns are "
                    f"{', '.join(sorted(row.columns)) or 'none'}"
                )

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[Scored]]:
        """Score every reply; each inner list holds the replies to one prompt. Never raises for what a function does."""
        results: list[list[list[Outcome | None]]] = [[[None] * len(self.signatures) for _ in g] for g in groups]

        def done(group: int, call: Call, outcomes: list[Outcome]) -> None:
            self.stats["calls"] += 1
            for sample, outcome in zip(call.samples, outcomes, strict=True):
                results[group][sample][call.function] = outcome

        jobs = self._jobs(groups)
        if self._workers is not None:
            before = Counter(self._workers.counts)
            self._workers.run(jobs, done)
            self.stats.update(self._workers.counts - before)
        else:
            for job in jobs:
                for call in job.calls:
                    done(job.group, call, perform(call, job, self._functions))
        return [
            [self._combine(completion, outcomes) for completion, outcomes in zip(group, rows, strict=True)]
            for group, rows in zip(groups, results, strict=True)
        ]

    def _jobs(self, groups: Sequence[Sequence[Completion]]) -> list[Job]:
        """A group's calls, cut small enough to keep all workers busy to the end."""
        total = sum(len(g) for g in groups)
        size = max(1, total // (4 * max(1, self.config.num_workers)))
        with_ids = any(wants_token_ids(s) for s in self.signatures)
        jobs = []
        for number, group in enumerate(groups):
            if not group:
                continue
            everyone = tuple(range(len(group)))
            whole = [Call(f, everyone) for f, s in enumerate(self.signatures) if s.style == "trl"]
            single = [Call(f, (i,)) for i in everyone for f, s in enumerate(self.signatures) if s.style == "verl"]
            ids = [c.token_ids for c in group] if with_ids else []
            for calls in [whole, *(single[at : at + size] for at in range(0, len(single), size))]:
                if calls:
                    jobs.append(Job(number, group[0].row, [c.text for c in group], ids, calls))
        return jobs

    def _combine(self, completion: Completion, outcomes: Sequence[Outcome | None]) -> Scored:
        """One reply's outcomes to its score: sum of weight × part, plus the over-long penalty."""
        self.stats["replies"] += 1
        scored = Scored(0.0)
        failures = []
        for name, weight, outcome in zip(self.names, self.weights, outcomes, strict=True):
            assert outcome is not None, f"no outcome of reward '{name}'"
            for key, value in outcome.extra.items():
                scored.extra.setdefault(key, value)
            part = self.config.on_error if outcome.error else outcome.score
            scored.parts[name] = part
            scored.score += weight * part
            if outcome.error:
                failures.append(f"reward '{name}': {outcome.error}")
        if self.config.overlong_buffer_len:
            scored.extra["overlong_reward"] = penalty = self._overlong_penalty(completion.length)
            scored.score += penalty
        if failures:
            scored.score, scored.error = self.config.on_error, "\n".join(failures)
            self._count_failure(completion, scored.error)
        return scored

    def _overlong_penalty(self, length: int) -> float:
        """DAPO's, for a reply of `length` tokens."""
        import torch  # here, so that worker processes, which score nothing by length, start without it

        from spmd_rl.algorithms.dapo import overlong_penalty

        buffer, factor = self.config.overlong_buffer_len, self.config.overlong_penalty_factor
        return float(overlong_penalty(torch.tensor([length]), self.max_response_length, buffer, factor))

    def _count_failure(self, completion: Completion, error: str) -> None:
        self.stats["errors"] += 1
        if self.stats["errors"] <= SHOWN:
            more = "; further ones are only counted" if self.stats["errors"] == SHOWN else ""
            logger.warning(
                "%s, sample %d is scored reward.on_error=%g%s\n%s",
                completion.row.where or f"prompt {completion.uid}",
                completion.sample,
                self.config.on_error,
                more,
                error,
            )

    def close(self) -> None:
        """End the workers. May be called twice."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
