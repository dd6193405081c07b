"""One call of a reward function: its arguments, and what its result means. Runs in a worker, or in the rank itself."""

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmd_rl.data.rows import Row
from spmd_rl.rewards.loading import Function, Signature


class Outcome(NamedTuple):
    """What a function made of one reply."""

    score: float
    extra: dict[str, Any]
    error: str | None


class Call(NamedTuple):
    """One function on some replies of a job: one reply (verl's style), all of the group (TRL's)."""

    function: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What is sent to a worker at a time: calls on the replies to one prompt."""

    group: int
    row: Row
    texts: list[str]
    token_ids: list[list[int]] = field(default_factory=list)
    """Empty unless a function asks for `completion_ids`."""
    calls: list[Call] = field(default_factory=list)


def perform(call: Call, job: Job, functions: Sequence[Function]) -> list[Outcome]:
    """Call the function; one outcome a sample, whatever it does short of not returning."""
    function = functions[call.function]
    try:
        arguments = trl_arguments if function.signature.style == "trl" else verl_arguments
        result = function.call(**arguments(call, job, function))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if function.signature.style == "verl":
            if result is None:  # TRL's way to pass; here it is a forgotten return
                raise ValueError("the function returned None")
            result = [result]
        return _outcomes(result, len(call.samples))
    except (Exception, SystemExit) as error:
        last = traceback.format_exception(type(error), error, error.__traceback__, limit=-4)
        return [Outcome(math.nan, {}, "".join(last).strip())] * len(call.samples)


def in_one_line(error: str, longest: int = 300) -> str:
    """`reward 'mine': ValueError: no`: a failed reply's error without the frames of its traceback."""
    last = error[error.rfind("\nreward '") + 1 :]  # of several functions that failed
    who, _, trace = last.partition("Traceback (most recent call last):")
    lines = trace.splitlines() or [who]
    frames = [place for place, line in enumerate(lines) if line.startswith("  ")]
    ended = lines[frames[-1] + 1 :] if frames else lines
    words = (who if trace else "") + " ".join(line.strip() for line in ended or lines[-1:])
    return words if len(words) <= longest else words[:longest] + "…"


async def _awaited(result: Any) -> Any:
    return await result


def verl_arguments(call: Call, job: Job, function: Function) -> dict[str, Any]:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)` of verl."""
    (sample,) = call.samples
    values = {
        "data_source": job.row.data_source,
        "solution_str": job.texts[sample],
        "ground_truth": job.row.ground_truth,
        "extra_info": dict(job.row.extra_info),
    }
    return {k: v for k, v in values.items() if function.signature.takes(k)} | function.kwargs


def trl_arguments(call: Call, job: Job, function: Function) -> dict[str, Any]:
    """`reward_func(prompts, completions, completion_ids, **columns)` of TRL: lists with one entry a reply.
    Conversational prompts give conversational completions."""
    n = len(call.samples)
    texts = [job.texts[s] for s in call.samples]
    plain = isinstance(job.row.messages, str)
    row = {"ground_truth": job.row.ground_truth, "data_source": job.row.data_source, "extra_info": job.row.extra_info}
    values: dict[str, Any] = {name: [value] * n for name, value in (row | job.row.columns).items()}
    values["prompts"] = [job.row.messages] * n
    values["completions"] = texts if plain else [[{"role": "assistant", "content": text}] for text in texts]
    values["completion_ids"] = [job.token_ids[s] for s in call.samples] if job.token_ids else [[] for _ in texts]
    values |= {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return {k: v for k, v in values.items() if function.signature.takes(k)} | function.kwargs


def _ignore(*args: Any, **kwargs: Any) -> None:
    """TRL hands its logging to reward functions; ours are the returned values."""


def wants_token_ids(signature: Signature) -> bool:
    """Whether a function looks at the replies' token ids: they are only sent to those."""
    return signature.style == "trl" and signature.takes("completion_ids")


def _outcomes(results: Any, n: int) -> list[Outcome]:
    if results is None or not hasattr(results, "__len__") or len(results) != n:
        got = len(results) if hasattr(results, "__len__") else repr(results)
        raise ValueError(f"the function returned {got} rewards for {n} completions")
    return [_outcome(result) for result in results]


def _outcome(result: Any) -> Outcome:
    """A float; a dict with `score`; verl's tuple that starts with one; None (TRL: this function does not apply)."""
    extra: dict[str, Any] = {}
    if isinstance(result, dict):
        if "score" not in result:
            raise ValueError(f"the function returned a dict without 'score': {', '.join(map(str, result))}")
        extra = {str(k): plain(v) for k, v in result.items() if k != "score"}
        result = result["score"]
    if result is None:
        return Outcome(0.0, extra, None)
    score = float(result[0] if isinstance(result, list | tuple) else result)
    if not math.isfinite(score):
        return Outcome(score, extra, f"the function returned {score}")
    return Outcome(score, extra, None)


def plain(value: Any) -> Any:
    """Numbers, texts, and lists and dicts of them; anything else as its text: a rank need not know their classes."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, numbers.Number) and not isinstance(value, complex) and hasattr(value, "item"):
        return value.item()  # numpy's
    return str(value)
