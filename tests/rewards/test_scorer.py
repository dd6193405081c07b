"""The scorer: signatures, sums, mistakes. The same through worker processes and in the process itself."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.config.roles import RewardConfig
from spmd_rl.config.run import DataConfig, SourceConfig
from spmd_rl.data.rows import data_sources, load_rows
from spmd_rl.rewards import Completion, Scorer
from spmd_rl.rewards.calls import in_one_line
from tests.rewards.groups import group

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(code: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(code))
        return str(tmp_path / name)

    return write


@pytest.fixture(params=[0, 1], ids=["in_process", "worker"])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def scores(config: RewardConfig, *groups: Any, **options: Any) -> list[list[float]]:
    with Scorer(config, **options) as scorer:
        return [[s.score for s in g] for g in scorer.score(groups)]


def test_verls_signature(write: Write, workers: int) -> None:
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
            assert data_source == "openai/gsm8k" and extra_info == {"index": 0}, extra_info
            return {"score": float(solution_str == ground_truth) + bonus, "pred": solution_str}
    """)
    config = RewardConfig(functions=[f"{path}:compute_score"], kwargs={"bonus": 0.25}, num_workers=workers)
    with Scorer(config) as scorer:
        ((right, wrong),) = scorer.score([group("18", "17")])
    assert (right.score, wrong.score) == (1.25, 0.25)
    assert (right.parts, right.extra, right.error) == ({"compute_score": 1.25}, {"pred": "18"}, None)


def test_a_file_alone_means_compute_score(write: Write) -> None:
    path = write("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 3")
    assert scores(RewardConfig(functions=[path], num_workers=0), group("x")) == [[3.0]]


def test_trls_signature_sees_the_whole_group(write: Write, workers: int) -> None:
    path = write("""
        def rank_reward(prompts, completions, level, **kwargs):
            assert prompts == ["What is 9 + 9?"] * len(completions)
            assert level == ["hard"] * len(completions) and kwargs["ground_truth"] == ["18"] * len(completions)
            assert kwargs["completion_ids"] == [[ord(c) for c in text] for text in completions]
            order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
            return [float(order.index(i)) for i in range(len(completions))]
    """)
    config = RewardConfig(functions=[f"{path}:rank_reward"], num_workers=workers)
    groups = [group("ccc", "a", "bb", columns={"level": "hard"}), group("a", columns={"level": "hard"})]
    assert scores(config, *groups) == [[2.0, 0.0, 1.0], [0.0]]


def test_trls_conversational_form(write: Write, workers: int) -> None:
    path = write("""
        def reward_func(prompts, completions, **kwargs):
            assert prompts[0] == [{"role": "user", "content": "hi"}]
            return [float(completion[0]["content"] == "ho") for completion in completions]
    """)
    config = RewardConfig(functions=[f"{path}:reward_func"], num_workers=workers)
    assert scores(config, group("ho", "hu", messages=[{"role": "user", "content": "hi"}])) == [[1.0, 0.0]]


def test_trls_async_form_and_none(write: Write, workers: int) -> None:
    path = write("""
        import asyncio
        async def reward_func(completions, **kwargs):
            await asyncio.sleep(0)
            return [None if c == "skip" else 2.0 for c in completions]
    """)
    config = RewardConfig(functions=[f"{path}:reward_func", "gsm8k"], weights=[1.0, 0.5], num_workers=workers)
    with Scorer(config) as scorer:
        ((skipped, whole),) = scorer.score([group("skip", "#### 18")])
    assert (skipped.score, skipped.parts, skipped.error) == (0.0, {"reward_func": 0.0, "gsm8k": 0.0}, None)
    assert whole.score == 2.0 + 0.5 * 1.0


def test_module_and_neighbour_imports(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("VALUE = 4.0", "neighbour_of_mine.py")
    code = "from neighbour_of_mine import VALUE\ndef f(completions, **kw): return [VALUE] * len(completions)"
    path = write(code, "has_neighbour.py")
    assert scores(RewardConfig(functions=[f"{path}:f"]), group("x")) == [[4.0]]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert scores(RewardConfig(functions=["has_neighbour:f"]), group("x")) == [[4.0]]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return [1.0]", "the function returned 1 rewards for 2 completions"),
        ("return 1.0", "the function returned 1.0 rewards for 2 completions"),
        ("return [1.0, float('nan')]", "the function returned nan"),
        ("return [1.0, float('inf')]", "the function returned inf"),
        ("return [1.0, 'x']", "could not convert string to float"),
        ("raise KeyError('boom')", "KeyError: 'boom'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_failures_are_counted_shown_and_scored_as_configured(
    write: Write, workers: int, body: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(f"def f(prompts, completions): {body}")
    config = RewardConfig(functions=["gsm8k", f"{path}:f"], on_error=-0.5, num_workers=workers)
    with Scorer(config) as scorer:
        ((first, second),) = scorer.score([group("#### 18", "#### 18")])
        assert scorer.stats["errors"] == (1 if body.startswith("return [1.0, f") else 2)
    assert second.score == -0.5
    assert second.parts == {"gsm8k": 1.0, "f": -0.5}
    assert error in str(second.error)
    assert error in caplog.text
    assert "t.jsonl:1, sample 1 is scored reward.on_error=-0.5" in caplog.text
    assert first.score == (2.0 if first.error is None else -0.5)


def test_a_traceback_names_the_users_line(write: Write) -> None:
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 1 / len(solution_str)
    """)
    with Scorer(RewardConfig(functions=[path])) as scorer:
        ((empty, full),) = scorer.score([group("", "x")])
    assert (empty.score, full.score, full.error) == (0.0, 1.0, None)
    assert 'mine.py", line 3, in compute_score' in str(empty.error)
    assert "ZeroDivisionError" in str(empty.error)


def test_only_the_first_failures_are_logged(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("def compute_score(data_source, solution_str, ground_truth, extra_info=None): pass")
    with Scorer(RewardConfig(functions=[path], num_workers=0)) as scorer:
        scorer.score([group(*"abcdefgh")])
        assert (scorer.stats["errors"], scorer.stats["replies"]) == (8, 8)
    assert caplog.text.count("is scored reward.on_error") == 3
    assert "the function returned None" in caplog.text


@pytest.mark.parametrize(
    ("functions", "kwargs", "message"),
    [
        (["gsm9k"], {}, "unknown reward 'gsm9k'; the nearest is 'gsm8k'"),
        (["no/such.py:f"], {}, "no such file: .*/no/such.py"),
        (["no_such_module:f"], {}, "cannot be imported:(.|\n)*No module named 'no_such_module'"),
        (["{ok}:nope"], {}, "no function 'nope' there; it has f, odd"),
        (["{broken}:f"], {}, "cannot be imported:(.|\n)*broken.py(.|\n)*ZeroDivisionError"),
        (["{ok}:odd"], {}, r"parameters \(a, b\) fit neither verl's .* nor TRL's"),
        (["regex"], {}, r"reward 'regex' needs reward\.kwargs\.pattern"),
        (["gsm8k"], {"methods": "strict"}, r"reward\.kwargs\.methods: none of gsm8k takes it; .* is 'method'"),
        (["gsm8k", "format"], {"gsm8k": {"x": 1}}, r"reward\.kwargs\.gsm8k\.x: gsm8k takes"),
    ],
)
def test_what_cannot_be_called_is_found_at_construction(
    write: Write, workers: int, functions: list[str], kwargs: dict[str, Any], message: str
) -> None:
    ok = write("def f(completions): return [0.0]\ndef odd(a, b): return 0", "ok.py")
    broken = write("1 / 0", "broken.py")
    specs = [f.format(ok=ok, broken=broken) for f in functions]
    with pytest.raises(ConfigError, match=message):
        Scorer(RewardConfig(functions=specs, kwargs=kwargs, num_workers=workers))


def test_other_config_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"reward\.weights has 2 entries, reward\.functions has 1"):
        Scorer(RewardConfig(weights=[1.0, 2.0]))
    with pytest.raises(ConfigError, match=r"reward\.timeout_s=0"):
        Scorer(RewardConfig(timeout_s=0))
    with pytest.raises(ConfigError, match="knows no rule for data_source 'mine'"):
        Scorer(RewardConfig(), data_sources=["openai/gsm8k", "mine"])
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="unknown reasoning_gym task 'chain_sums'"):
        Scorer(RewardConfig(), data_sources=["reasoning_gym/chain_sums"])
    with pytest.raises(ConfigError, match="unknown reasoning_gym task 'chain_sums'"):
        Scorer(RewardConfig(), tasks=["chain_sums"])


def test_rows_that_cannot_be_scored_are_found_before_the_first_step(write: Write) -> None:
    rows = [group("x", truth=None)[0].row]
    with Scorer(RewardConfig(functions=["last_number"], num_workers=0)) as scorer:
        with pytest.raises(ConfigError, match=r"t\.jsonl:1: reward 'last_number' needs a ground truth"):
            scorer.check(rows)
    with Scorer(RewardConfig(functions=["format"], num_workers=0)) as scorer:
        scorer.check(rows)
    path = write("def f(completions, level): return [0.0]")
    with Scorer(RewardConfig(functions=[f"{path}:f"], num_workers=0)) as scorer:
        with pytest.raises(ConfigError, match=r"t\.jsonl:1: reward '.*:f' asks for a column 'level'; .* are none"):
            scorer.check(rows)
        scorer.check([group("x", columns={"level": 1})[0].row])


def test_kwargs_for_one_function_and_for_all(write: Write) -> None:
    path = write("def f(completions, method='none', **kwargs): return [float(method == 'flexible')] * len(completions)")
    shared = RewardConfig(functions=["gsm8k", f"{path}:f"], kwargs={"method": "flexible"}, num_workers=0)
    assert scores(shared, group("18")) == [[2.0]]
    own = RewardConfig(functions=["gsm8k", f"{path}:f"], kwargs={"gsm8k": {"method": "flexible"}}, num_workers=0)
    assert scores(own, group("18")) == [[1.0]]


def test_equal_names_are_told_apart(write: Write) -> None:
    one = write("def f(completions): return [1.0]", "one.py") + ":f"
    two = write("def f(completions): return [2.0]", "two.py") + ":f"
    with Scorer(RewardConfig(functions=[one, two], num_workers=0)) as scorer:
        assert scorer.score([group("x")])[0][0].parts == {one: 1.0, two: 2.0}


def test_overlong_penalty_is_dapos() -> None:
    config = RewardConfig(overlong_buffer_len=4, overlong_penalty_factor=0.5, num_workers=0, functions=["gsm8k"])
    ((short, long),) = Scorer(config, max_response_length=10).score([group("#### 1", "####    18")])
    assert (short.score, short.extra["overlong_reward"]) == (0.0, 0.0)
    assert (long.score, long.extra["overlong_reward"]) == (-0.5, -0.5)
    (plain,) = Scorer(RewardConfig(num_workers=0, functions=["gsm8k"])).score([group("####    18")])
    assert (plain[0].score, "overlong_reward" in plain[0].extra) == (0.0, False)


def test_a_tasks_rows_are_scored_by_its_own_scorer_in_a_worker() -> None:
    pytest.importorskip("reasoning_gym")
    source = SourceConfig(task="chain_sum", size=4, task_kwargs={"max_terms": 3})
    rows = load_rows(source, DataConfig())
    groups = [
        [Completion(row, row.index, i, "", text, []) for i, text in enumerate([row.ground_truth, "no idea"])]
        for row in rows
    ]
    with Scorer(RewardConfig(), data_sources=data_sources(rows)) as scorer:
        scorer.check(rows)
        assert all(right.score == 1 > wrong.score for right, wrong in scorer.score(groups))


def test_nothing_to_score() -> None:
    with Scorer(RewardConfig(functions=[])) as scorer:
        assert [s.score for s in scorer.score([group("a", "b")])[0]] == [0.0, 0.0]
    with Scorer(RewardConfig(functions=["gsm8k"])) as scorer:
        assert scorer.score([]) == []
        assert scorer.score([[]]) == [[]]


def test_the_layout_does_not_change_the_scores(write: Write) -> None:
    path = write("def f(completions, **kw): return [float(len(completions))] * len(completions)")
    groups = [group(*("x" * (i + j) for j in range(3)), uid=i) for i in range(7)]
    together = scores(RewardConfig(functions=[f"{path}:f", "gsm8k"], num_workers=2), *groups)
    apart = [scores(RewardConfig(functions=[f"{path}:f", "gsm8k"], num_workers=0), g)[0] for g in groups]
    assert together == apart


def test_an_error_in_one_line_is_the_last_functions_without_its_frames(write: Write, workers: int) -> None:
    path = write("""
        def first(data_source, solution_str, ground_truth, extra_info=None):
            raise KeyError("answer")
        def second(data_source, solution_str, ground_truth, extra_info=None):
            try:
                int(solution_str)
            except ValueError as error:
                raise RuntimeError("two\\nlines") from error
        def nothing(data_source, solution_str, ground_truth, extra_info=None):
            return None if solution_str else 1.0
    """)
    for names, said in (
        (("first",), "reward 'first': KeyError: 'answer'"),
        (("first", "second"), "reward 'second': RuntimeError: two lines"),
        (("second", "nothing"), "reward 'nothing': ValueError: the function returned None"),
    ):
        with Scorer(RewardConfig(functions=[f"{path}:{n}" for n in names], num_workers=workers)) as scorer:
            ((scored,),) = scorer.score([group("x")])
        assert scored.error is not None
        assert in_one_line(scored.error) == said
    assert in_one_line("reward 'late': no result within 2 s") == "reward 'late': no result within 2 s"
    assert in_one_line("x" * 301) == "x" * 300 + "…"
