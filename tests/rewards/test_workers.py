"""Real worker processes: time limits, deaths, replacement, and that none outlives its rank."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.config.roles import RewardConfig
from spmd_rl.rewards import Scorer
from tests.rewards.groups import group

CODE = """
    import os, signal, subprocess, time
    print("loaded")
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "hang":
            time.sleep(1000)
        if solution_str == "spin":  # holds the interpreter, hears no signal handler
            "a" * 30 == __import__("re").match("(a+)+b", "a" * 40)
        if solution_str == "child":
            subprocess.run(["sleep", "4321"])
        if solution_str == "exit":
            os._exit(7)
        if solution_str == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if solution_str == "lambda":
            return {"score": 1.0, "what": lambda: 0, "mine": Mine(), "list": [1, (2.5, None)]}
        if solution_str == "env":
            return {"score": 1.0, "env": dict(os.environ), "pid": os.getpid()}
        return 1.0
    class Mine:
        def __str__(self):
            return "mine"
    def group_reward(completions, **kwargs):
        if "hang" in completions:
            time.sleep(1000)
        return [2.0] * len(completions)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))
    return str(tmp_path / "mine.py")


@pytest.fixture
def scorer(path: str) -> Iterator[Scorer]:
    with Scorer(RewardConfig(functions=[path], timeout_s=2.0, on_error=-1.0)) as scorer:
        yield scorer


def pids(scorer: Scorer) -> list[int]:
    assert scorer._workers is not None
    return scorer._workers.pids()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_slow_call_costs_its_worker_and_nobody_else(scorer: Scorer, how: str) -> None:
    (before,) = pids(scorer)
    start = time.monotonic()
    ((first, slow, last),) = scorer.score([group("ok", how, "ok")])
    assert time.monotonic() - start < 20
    assert (first.score, slow.score, last.score) == (1.0, -1.0, 1.0)
    assert "no result within reward.timeout_s=2 s" in str(slow.error)
    assert scorer.stats["timeouts"] == scorer.stats["errors"] == 1
    assert gone(before)
    assert pids(scorer) != [before]


def test_what_a_slow_call_started_dies_with_it(scorer: Scorer) -> None:
    ((slow,),) = scorer.score([group("child")])
    assert slow.score == -1.0
    assert scorer.stats["timeouts"] == 1
    listed = subprocess.run(["pgrep", "-f", "^sleep 4321$"], capture_output=True, text=True, check=False).stdout
    assert all(gone(int(pid)) for pid in listed.split())


@pytest.mark.parametrize(("how", "status"), [("exit", "7"), ("kill", "-9")])
def test_a_call_that_takes_its_process_down(scorer: Scorer, how: str, status: str) -> None:
    ((first, dead, last),) = scorer.score([group("ok", how, "ok")])
    assert (first.score, dead.score, last.score) == (1.0, -1.0, 1.0)
    assert f"the worker process ended with status {status}" in str(dead.error)
    assert scorer.stats["crashes"] == 1
    assert scorer.score([group("ok")])[0][0].score == 1.0


def test_a_worker_that_died_between_two_steps_is_replaced(scorer: Scorer) -> None:
    os.kill(pids(scorer)[0], signal.SIGKILL)
    ((one, two),) = scorer.score([group("ok", "ok")])
    assert one.error is None or "ended with status -9" in one.error
    assert two.score == 1.0


def test_hopeless_functions_are_given_up_so_that_the_rank_goes_on(path: str) -> None:
    config = RewardConfig(functions=[path, "gsm8k"], timeout_s=0.5, num_workers=2)
    with Scorer(config) as scorer:
        start = time.monotonic()
        scored = [s for g in scorer.score([group(*["hang"] * 50, uid=i) for i in range(4)]) for s in g]
        assert time.monotonic() - start < 60
        assert all(s.error and s.parts["gsm8k"] == 0.0 for s in scored)
        assert 8 <= scorer.stats["timeouts"] <= 10
        assert scorer.stats["timeouts"] + scorer.stats["given_up"] == 200
        assert scorer.score([group("ok")])[0][0].error is None, "the next step starts afresh"


def test_group_calls_have_one_time_limit(path: str) -> None:
    with Scorer(RewardConfig(functions=[f"{path}:group_reward"], timeout_s=1.0, on_error=-1.0)) as scorer:
        slow, fine = scorer.score([group("ok", "hang"), group("ok", "ok", uid=1)])
    assert [s.score for s in slow] == [-1.0, -1.0]
    assert [s.score for s in fine] == [2.0, 2.0]


def test_workers_see_no_gpu_and_extras_always_come_back(scorer: Scorer) -> None:
    ((env, odd),) = scorer.score([group("env", "lambda")])
    assert env.extra["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert env.extra["pid"] in pids(scorer)
    assert "<lambda>" in odd.extra["what"]
    assert (odd.extra["mine"], odd.extra["list"]) == ("mine", [1, [2.5, None]])
    assert odd.score == 1.0


def test_many_cheap_rewards_take_well_under_a_millisecond_each() -> None:
    with Scorer(RewardConfig(), data_sources=["openai/gsm8k"]) as scorer:
        start = time.monotonic()
        scored = scorer.score([group("#### 18", "17", uid=i) for i in range(1000)])
        assert time.monotonic() - start < 4.0
    assert all((right.score, wrong.score) == (1.0, 0.0) for right, wrong in scored)


def test_math_verify_works_in_a_worker() -> None:
    pytest.importorskip("math_verify")
    with Scorer(RewardConfig(functions=["math_verify"])) as scorer:
        ((right, wrong),) = scorer.score([group(r"\boxed{\frac{36}{2}}", r"\boxed{2}")])
    assert (right.score, wrong.score) == (1.0, 0.0)


def test_scoring_from_a_thread_that_ends_leaves_the_workers_alive(scorer: Scorer) -> None:
    """The kernel's death signal follows the thread that forked; replacements made in a passing thread must live on."""
    # The second group is scored by the replacement, so that it has told the kernel before the thread ends.
    thread = threading.Thread(target=lambda: scorer.score([group("exit"), group("ok", uid=1)]))
    thread.start()
    thread.join()
    (replacement,) = pids(scorer)
    time.sleep(0.3)
    assert alive(replacement)
    assert scorer.score([group("ok")])[0][0].score == 1.0
    assert pids(scorer) == [replacement]


def test_close_leaves_no_process(path: str) -> None:
    scorer = Scorer(RewardConfig(functions=[path], num_workers=2))
    started = pids(scorer)
    assert all(alive(pid) for pid in started)
    scorer.close()
    scorer.close()
    assert all(gone(pid) for pid in started)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_their_rank(path: str, busy: bool) -> None:
    """kill -9 of the rank, while a worker idles and while it is in the middle of a call that never looks up."""
    code = f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.rewards.groups import group
from tests.rewards.test_workers import pids
from spmd_rl.config.roles import RewardConfig
from spmd_rl.rewards import Scorer
scorer = Scorer(RewardConfig(functions=[{path!r}], num_workers=2, timeout_s=1000))
print("pids", *pids(scorer), flush=True)
if {busy}:
    scorer.score([group("spin"), group("spin", uid=1)])
threading.Event().wait()
"""
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    started = next(line for line in rank.stdout if line.startswith("pids")).split()[1:]
    workers = [int(pid) for pid in started]
    assert len(workers) == 2
    assert all(alive(pid) for pid in workers)
    time.sleep(0.5 if busy else 0)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert all(gone(pid) for pid in workers)


def test_a_worker_that_cannot_start_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os; os._exit(5)")
    with pytest.raises(ConfigError, match="the reward worker ended with status 5 while it loaded the functions"):
        Scorer(RewardConfig(functions=[f"{tmp_path}/dies.py:f"]))
