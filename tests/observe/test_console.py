"""The console, as a pipe and as a terminal."""

import io

import pytest
from rich.console import Console

from spmd_rl.config import Config
from spmd_rl.observe.console import ConsoleTracker
from spmd_rl.observe.tracking import open_trackers

STEP = {
    "critic/score/mean": 0.25,
    "response_length/mean": 4.125,
    "actor/entropy": 1.5,
    "actor/grad_norm": 0.5,
    "perf/throughput": 123.4,
    "perf/time_per_step": 6.0,
    "timing_s/step": 6.0,
    "timing_s/generate": 3.5,
    "timing_s/update_actor": 2.0,
    "timing_s/prompts": 0.01,
    "reward/timeouts": 0.0,
}


def shown(config: Config, terminal: bool = False) -> str:
    file = io.StringIO()
    tracker = ConsoleTracker(Console(file=file, force_terminal=terminal, width=300, highlight=False, soft_wrap=True))
    tracker.start(config, 0, {"model": "tiny", "layout": "fsdp 2", "steps": "3"})
    tracker.log({"val-core/reasoning_gym/chain_sum/reward/mean@1": 0.2}, 0)
    tracker.log(STEP, 1)
    tracker.log({**STEP, "reward/timeouts": 2.0, "val-core/reasoning_gym/chain_sum/reward/mean@1": 0.3}, 2)
    tracker.samples(
        [
            {
                "prompt": "<|im_start|>user\nWhat is\n1 + 1?<|im_end|>\n<|im_start|>assistant\n",
                "response": "2",
                "score": 1.0,
            },
            {"prompt": "other"},
        ],
        2,
    )
    tracker.close()
    return file.getvalue()


def test_into_a_pipe_there_is_one_plain_line_a_step(config: Config) -> None:
    text = shown(config)
    lines = text.splitlines()
    assert "\x1b" not in text
    assert lines[0].strip() == "spmd_rl  p/tiny"
    assert any("layout" in line and "fsdp 2" in line for line in lines)
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2
    assert steps[0].startswith("step 1/3  reward 0.250  len 4.1  entropy 1.500  grad 0.5  tok/s/rank 123  6.0 s")
    assert "(generate 3.5, update_actor 2.0)" in steps[0]
    assert "timeouts" not in steps[0]
    assert "reward/timeouts 2" in steps[1]
    assert "left 0:0" in steps[0]


def test_validation_shows_the_change_since_the_start(config: Config) -> None:
    lines = [line for line in shown(config).splitlines() if line.startswith("validation")]
    assert lines == [
        "validation after step 0  chain_sum reward mean@1 0.200",
        "validation after step 2  chain_sum reward mean@1 0.300 (+0.100)",
    ]


def test_a_resumed_run_compares_with_its_very_first_validation(config: Config) -> None:
    config.observe.trackers = ["jsonl"]
    trackers = open_trackers(config, writes=True)
    for step, accuracy in ((0, 0.1), (2, 0.2), (4, 0.3)):
        trackers.log({"val-core/s/acc/mean@1": accuracy}, step)
    trackers.close()
    file = io.StringIO()
    tracker = ConsoleTracker(Console(file=file, soft_wrap=True))
    tracker.start(config, 3, {})
    tracker.log({"val-core/s/acc/mean@1": 0.5}, 4)
    assert "s acc mean@1 0.500 (+0.400)" in file.getvalue()


def test_a_few_samples_are_shown_on_one_line_each(config: Config) -> None:
    config.observe.show_samples = 1
    text = shown(config)
    assert "What is 1 + 1? → 2  [1]" in text
    assert "other" not in text
    config.observe.show_samples = 0
    assert "What is" not in shown(config)


def test_a_terminal_gets_a_progress_bar_and_the_same_lines(config: Config) -> None:
    text = shown(config, terminal=True)
    assert "\x1b[" in text
    assert "2/3" in text
    assert "step 1/3  reward 0.250" in text


@pytest.mark.parametrize("metrics", [{}, {"sft/loss": 1.25, "actor/lr": 1e-3}])
def test_any_metrics_make_a_line(config: Config, metrics: dict[str, float]) -> None:
    tracker = ConsoleTracker(Console(file=io.StringIO()))
    tracker.start(config, 0, {})
    line = tracker.step_line(metrics, 4)
    assert line == ("step 4  loss 1.2500  lr 0.001" if metrics else "step 4")


def test_the_first_steps_say_what_they_took_of_the_planned_memory(config: Config) -> None:
    file = io.StringIO()
    tracker = ConsoleTracker(Console(file=file, width=300, highlight=False, soft_wrap=True))
    tracker.start(config, 4, {"steps": "9"})
    memory = {
        "perf/max_memory_allocated_gb/ref": 1.0,
        "perf/planned_memory_gb/ref": 2.0,
        "perf/memory_of_plan/ref": 0.5,
    }
    for step in (5, 6, 7):
        tracker.log(STEP | memory, step)
    lines = [line for line in file.getvalue().splitlines() if "peak GB" in line]
    assert lines == ["    peak GB of the plan's: ref 1.0 of 2.0 (0.50)"] * 2


def test_kl_is_the_one_to_the_reference_and_ppo_kl_is_shown_once_it_is_more_than_nothing(config: Config) -> None:
    tracker = ConsoleTracker(Console(file=io.StringIO()))
    tracker.start(config, 0, {})
    shown = [tracker.step_line({"actor/ppo_kl": value}, 1) for value in (0.0, -1e-9, 0.25, 0.0)]
    assert shown == ["step 1", "step 1", "step 1  ppo_kl 0.2500", "step 1  ppo_kl 0.0000"]
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        assert tracker.step_line({name: 0.0, "actor/ppo_kl": 0.1}, 2) == "step 2  kl 0.0000  ppo_kl 0.1000"


def test_replies_whose_reward_failed_are_shown_as_a_share(config: Config) -> None:
    file = io.StringIO()
    tracker = ConsoleTracker(Console(file=file, soft_wrap=True))
    tracker.start(config, 0, {})
    tracker.log(
        {"reward/errors": 0.0, "reward/replies": 64.0, "val-core/s/acc/mean@1": 0.5, "val-aux/reward/errors": 0.0}, 1
    )
    tracker.log(
        {"reward/errors": 3.0, "reward/replies": 64.0, "val-core/s/acc/mean@1": 0.5, "val-aux/reward/errors": 2.0}, 2
    )
    assert file.getvalue().splitlines()[-4:] == [
        "step 1",
        "validation after step 1  s acc mean@1 0.500",
        "step 2  reward errors 3/64",
        "validation after step 2  s acc mean@1 0.500 (+0.000)  reward errors 2",
    ]
