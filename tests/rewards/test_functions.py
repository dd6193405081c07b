"""The named reward functions, on replies as models write them."""

import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.rewards import REWARDS
from spmd_rl.rewards.answers import boxed, final_answer, last_number, tagged
from spmd_rl.rewards.functions import rule_for


def score(name: str, reply: str, truth: Any, source: str = "x", **kwargs: Any) -> float:
    result = REWARDS[name](source, reply, truth, kwargs.pop("extra_info", None), **kwargs)
    return float(result["score"] if isinstance(result, dict) else result)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is -4", -4),
        ("5 - 3", 3),
        ("so 5-3", 3),
        ("5 - 3 = - 2", -2),
        ("f(x) - 3", 3),
        ("**−7**.", -7),
        ("it costs 1,234.50 dollars", Fraction(2469, 2)),
        ("$18.", 18),
        ("-$5", -5),
        ("3, 4, 5", 5),
        ("3/4", Fraction(3, 4)),
        (r"\(-\frac{1}{2}\)", Fraction(-1, 2)),
        (".5", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("007", 7),
        ("2024-05-03", 3),
        ("12 apples and no more", 12),
    ],
)
def test_last_number_reads(text: str, value: Any) -> None:
    found = last_number(text)
    assert found is not None
    assert found[1] == value


@pytest.mark.parametrize("text", ["", "none", "1/0", "9" * 5000, r"\frac{a}{b}"])
def test_last_number_finds_none(text: str) -> None:
    assert last_number(text) is None


def test_last_number_is_quick_on_long_hostile_text() -> None:
    assert last_number("1," * 50_000) is not None
    assert last_number("-" * 50_000 + " 7") is not None


def test_last_number_reward() -> None:
    assert score("last_number", "17, no: 18", 18) == 1
    assert score("last_number", "18, no: 17", "18") == 0
    assert score("last_number", "18.0", "18") == 1
    assert score("last_number", "it is 0.5", r"\frac{1}{2}") == 1
    assert score("last_number", "eighteen", "18") == 0
    with pytest.raises(ValueError, match="ground truth 'x' has no number"):
        score("last_number", "1", "x")


def test_finding_the_answer() -> None:
    assert boxed(r"a \boxed{1} b \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1") is None
    assert tagged("<answer> 3 </answer> <answer>4</answer>") == "4"
    assert final_answer(r"<answer>3</answer> \boxed{4}") == "3"
    assert final_answer(r"so \boxed{4}") == "4"
    assert final_answer(" 5\n") == "5"


@pytest.mark.parametrize(
    ("reply", "strict", "flexible"),
    [
        ("so it is\n#### 18", 1, 1),
        ("#### 1,018", 0, 0),
        ("#### 17\n#### 18", 1, 1),
        ("it is 18", 0, 1),
        ("it is 18 .", 0, 1),
        ("#### 18" + " " * 400, 0, 0),
        ("no number", 0, 0),
    ],
)
def test_gsm8k_as_verl(reply: str, strict: float, flexible: float) -> None:
    assert score("gsm8k", reply, "18") == strict
    assert score("gsm8k", reply, "18", method="flexible") == flexible


def test_gsm8k_format_score_is_for_wrong_answers_only() -> None:
    assert score("gsm8k", "#### 3", "18", format_score=0.1) == 0.1
    assert score("gsm8k", "3", "18", format_score=0.1) == 0
    assert score("gsm8k", "#### 1,018", "1018") == 1


def test_exact_match() -> None:
    assert score("exact_match", "<answer>New  york.</answer>", "New York") == 1
    assert score("exact_match", "York", {"target": ["Leeds", "york"]}) == 1
    assert score("exact_match", "York, I think", "York") == 0


def test_regex_and_format() -> None:
    assert score("regex", "a\nb", None, pattern="a.b") == 1
    assert score("regex", "a", None, pattern="b") == 0
    assert score("regex", "it is 1.5!", "1.5", pattern="is {ground_truth}!") == 1
    assert score("regex", "it is 1x5!", "1.5", pattern="is {ground_truth}!") == 0
    assert score("format", "<think>\nhm\n</think>\n<answer>3</answer>", None) == 1
    assert score("format", "<think>hm</think> 3", None) == 0


class TestMathVerify:
    @pytest.fixture(autouse=True)
    def _needs_math_verify(self) -> None:
        pytest.importorskip("math_verify")

    @pytest.mark.parametrize(
        ("reply", "truth", "right"),
        [
            (r"so $\boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1),
            (r"so \boxed{0.5}", r"\frac{1}{2}", 1),
            (r"\boxed{(1, 2)}", r"(1,2)", 1),
            (r"\boxed{3}", r"\frac{1}{2}", 0),
            ("the answer is 18", 18, 1),
            ("I do not know", "18", 0),
        ],
    )
    def test_equal_as_mathematics(self, reply: str, truth: Any, right: float) -> None:
        assert score("math_verify", reply, truth) == right

    def test_dapo(self) -> None:
        assert score("math_dapo", "hm\nAnswer: $\\frac{1}{2}$", r"\frac12") == 1
        assert score("math_dapo", "Answer: 3", "4") == -1
        assert score("math_dapo", "4", "4") == -1


def test_reasoning_gyms_own_scorer_may_give_part_of_the_points() -> None:
    pytest.importorskip("reasoning_gym")
    entry = {"question": "2 + 2 =", "answer": "4", "metadata": {}}
    extra = {"entry": entry, "task_kwargs": {}}
    task = "reasoning_gym/chain_sum"
    assert score("reasoning_gym", "<answer>4</answer>", "4", task, extra_info=extra) == 1
    assert score("reasoning_gym", "It is 4", "4", task, extra_info=extra) < 1
    assert score("reasoning_gym", "It is 4", "4", task, extra_info=extra, extract="last_number") == 1
    assert score("reasoning_gym", "So\n4", "4", task, extra_info=extra, extract="last_line") == 1
    with pytest.raises(ValueError, match=r"has no extra_info\.entry"):
        score("reasoning_gym", "4", "4", task)


def test_auto_picks_by_data_source() -> None:
    assert rule_for("openai/gsm8k") == "gsm8k"
    assert rule_for("aime_2024") == "math_dapo"
    assert rule_for("reasoning_gym/lcm") == "reasoning_gym"
    assert score("auto", "#### 18", "18", source="openai/gsm8k") == 1
    with pytest.raises(ConfigError, match=r"knows no rule for data_source 'mine'; set reward.functions to one of auto"):
        rule_for("mine")


def test_workers_need_no_torch() -> None:
    code = "import sys, spmd_rl.rewards.worker; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
