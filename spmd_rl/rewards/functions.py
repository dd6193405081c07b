"""The reward functions that have names.

All have verl's signature `f(data_source, solution_str, ground_truth, extra_info, **kwargs)`: they return a float, or a
dict with `score` and whatever else should be kept (`acc`, `pred`). `solution_str` is the reply.
"""

import functools
import importlib
import re
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from spmd_rl.config import ConfigError, how_to_install
from spmd_rl.data.tasks import DATA_SOURCE as TASK_SOURCE
from spmd_rl.data.tasks import task_scorer
from spmd_rl.rewards import answers

Reward = float | dict[str, Any]
THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
TAIL = 300
"""Characters at the end of a reply that verl's rules for GSM8K and DAPO look at."""


def judged(right: bool, pred: str | None) -> dict[str, Any]:
    return {"score": float(right), "acc": float(right), "pred": pred or ""}


def last_number(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Reward:
    """1 when the reply's last number equals the ground truth's, exactly, as numbers (18 = 18.0, 1/2 = 0.5)."""
    truth = answers.last_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    found = answers.last_number(solution_str)
    return judged(found is not None and found[1] == truth[1], found and found[0])


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Reward:
    """1 when the reply's answer (tag, box or all of it) is the ground truth, or one of its list, but for case, white
    space and a final full stop."""
    truths = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    truths = truths if isinstance(truths, list | tuple) else [truths]
    pred = _folded(answers.final_answer(solution_str))
    return judged(pred in {_folded(str(t)) for t in truths}, pred)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> Reward:
    """verl's rule for GSM8K. strict: the number behind the last `####`; flexible: the last number.

    Compared as text without commas and dollar signs. `format_score` is for a reply that has an answer, but a wrong one.
    """
    patterns = {"strict": r"#### (-?[0-9.,]+)", "flexible": r"(-?[0-9.,]+)"}
    if method not in patterns:
        raise ValueError(f"method='{method}' is unknown; use strict or flexible")
    found = [f.replace(",", "").replace("$", "") for f in re.findall(patterns[method], solution_str[-TAIL:])]
    found = [f for f in found if f not in ("", ".")]
    if not found:
        return judged(False, None) | {"score": 0.0}
    right = found[-1] == str(ground_truth).replace(",", "")
    return judged(right, found[-1]) | {"score": score if right else format_score}


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Reward:
    """1 when the math-verify package finds the reply's final expression equal to the ground truth (LaTeX or plain)."""
    library, gold, seconds = import_math_verify(), _gold(str(ground_truth)), _alarm()
    pred = library.parse(solution_str, parsing_timeout=seconds)
    right = bool(pred) and bool(library.verify(gold, pred, timeout_seconds=seconds))
    return judged(right, str(pred[-1]) if pred else None)


def import_math_verify() -> ModuleType:
    """The package `math_verify`, or a `ConfigError` that says how to get it."""
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(
            f"reward math_verify needs the package `math-verify`; {how_to_install('quickstart')}"
        ) from error


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> Any:
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    gold = import_math_verify().parse(text if marked else f"\\boxed{{{text}}}", parsing_timeout=_alarm())
    if not gold:
        raise ValueError(f"math-verify cannot read the ground truth {text!r}")
    return gold


def _alarm() -> int | None:
    """Seconds for math-verify's own time limit: it uses SIGALRM, which only a main thread may."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Reward:
    """DAPO's rule: +1 when what follows the last `Answer:` near the reply's end is right, else -1. Equality is of
    texts, or math-verify's where that package is at hand."""
    found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution_str[-TAIL:])
    pred = found[-1].strip().strip("$").strip() if found else ""
    pred = answers.boxed(pred) or pred
    right = bool(pred) and (_folded(pred) == _folded(str(ground_truth)) or _same_math(pred, ground_truth))
    return judged(right, pred) | {"score": 1.0 if right else -1.0}


def _same_math(pred: str, ground_truth: Any) -> bool:
    try:
        return math_verify("", f"\\boxed{{{pred}}}", ground_truth)["score"] == 1.0  # type: ignore[index]
    except ValueError:  # no package, or a ground truth that is no expression: then only the texts can be compared
        return False


def regex(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, pattern: str) -> Reward:
    """1 when `pattern` occurs in the reply; `.` matches line ends too. `{ground_truth}` in it stands for the answer."""
    return float(
        re.search(pattern.replace("{ground_truth}", re.escape(str(ground_truth))), solution_str, re.S) is not None
    )


def format_(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, format: str = THINK_ANSWER
) -> Reward:
    """1 when the whole reply has the form: <think>…</think><answer>…</answer> unless another pattern is given."""
    return float(re.fullmatch(format, solution_str, re.S) is not None)


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, extract: str = "final"
) -> Reward:
    """The task's own scorer, 0..1. `extract` says what of the reply it sees: final (answer tag, else box, else all of
    it), whole, last_line, last_number."""
    entry = (extra_info or {}).get("entry")
    if entry is None:
        raise ValueError(f"a row of '{data_source}' has no extra_info.entry; only rows of data.train.task have one")
    lines = solution_str.strip().splitlines() or [""]
    number = answers.last_number(solution_str) if extract == "last_number" else None
    seen = {
        "final": answers.final_answer(solution_str),
        "whole": solution_str.strip(),
        "last_line": lines[-1].strip(),
        "last_number": number[0] if number else "",
    }[extract]
    score = float(task_scorer(data_source, extra_info.get("task_kwargs", {}))(seen, entry))
    return judged(score >= 1.0, seen) | {"score": score}


AUTO: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_verify",
    "DigitalLearningGmbH/MATH-lighteval": "math_verify",
    "HuggingFaceH4/MATH-500": "math_verify",
    "hiyouga/geometry3k": "math_verify",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "math_verify",
    "searchR1_*": "exact_match",
    TASK_SOURCE + "*": "reasoning_gym",
}
"""`auto`: the rule of each data_source; a trailing * matches any ending."""


def rule_for(data_source: str) -> str:
    """The name in REWARDS that `auto` uses for a data source; `ConfigError` when there is none."""
    for pattern, name in AUTO.items():
        if data_source == pattern or (pattern.endswith("*") and data_source.startswith(pattern[:-1])):
            return name
    raise ConfigError(
        f"reward 'auto' knows no rule for data_source '{data_source}'; set reward.functions to one of "
        f"{', '.join(sorted(REWARDS))}, or to your own path/to/file.py:function"
    )


def auto(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any) -> Reward:
    """The rule that `rule_for` names; `kwargs` go to it."""
    return REWARDS[rule_for(data_source)](data_source, solution_str, ground_truth, extra_info, **kwargs)


REWARDS: dict[str, Callable[..., Reward]] = {
    "auto": auto,
    "exact_match": exact_match,
    "format": format_,
    "gsm8k": gsm8k,
    "last_number": last_number,
    "math_dapo": math_dapo,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "regex": regex,
}
"""Functions by the name that `reward.functions` uses."""

NEEDS_NO_TRUTH = {"format", "regex", "reasoning_gym"}
"""Named functions that can score a row without a ground truth."""
