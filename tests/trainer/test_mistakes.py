"""What a user gets wrong is said once, whatever the number of ranks."""

import signal

import pytest

from spmd_rl import ranked
from spmd_rl.assemble.model import load_model_facts
from spmd_rl.assemble.rl import check_choices, load_inputs
from spmd_rl.config import ConfigError
from spmd_rl.config.load import compose
from spmd_rl.runtime.environment import read_environment
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from tests.trainer.launched import new_mark, torchrun


def test_a_mistake_is_printed_once_and_ends_all_ranks() -> None:
    with torchrun(2, "-m", "spmd_rl.train", "experiment=tiny", "trainer.sead=1", mark=new_mark()) as process:
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert said.count("error: unknown key trainer.sead; did you mean") == 1, said
    assert "exitcode  : 2 " in said
    assert 'spmd_rl/train.py", line' not in said, said


def test_a_rank_that_waits_for_the_first_ones_words_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's handler notes SIGTERM and goes on, which would hold a launcher up for LINGER_S."""
    monkeypatch.setattr(ranked, "LINGER_S", 0.0)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        ranked.report("a mistake", read_environment())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([f"{CORRECTION}.rollout_is_threshold=abc"], "rollout_is_threshold='abc' is neither a number nor lower_upper"),
        ([f"{CORRECTION}.rollout_is_threshold=5_0.5"], "rollout_is_threshold='5_0.5': needs 0 < lower <= upper"),
        (
            [f"{CORRECTION}.rollout_rs=bogus", f"{CORRECTION}.rollout_rs_threshold=2"],
            "rollout_rs='bogus': unknown bogus; use token_k1",
        ),
    ],
)
def test_thresholds_are_read_before_anything_is_loaded(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_choices(compose(["experiment=tiny", *settings]))
    assert str(caught.value).startswith(f"algorithm.rollout_correction.{says}")


def test_a_stop_token_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids=\[3, 104\]: 104 is none of the 104 tokens of tiny-digits"):
        load_model_facts(compose(["experiment=tiny", "rollout.stop_token_ids=[3,104]"]))


def test_a_warm_up_as_long_as_the_run() -> None:
    config = compose(["experiment=ppo_tiny", "trainer.total_training_steps=3", "critic.warmup_steps=3"])
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps=3 >= 3 steps of the run: the actor would never"):
        load_inputs(config, Plan.from_config(config, Cluster.from_counts([1])), 0)
