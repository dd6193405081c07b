"""Topologies and settings that cannot run, each with the whole of what the plan says about it."""

from pathlib import Path

import pytest
import yaml

from spmd_rl.config import Config, ConfigError
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.command import main
from spmd_rl.topology.plan import Plan
from tests.topology.configured import configured

FOUND = yaml.safe_load((Path(__file__).parent / "bad_plans.yaml").read_text())
BAD: list[tuple[list[str], list[str]]] = [(case["overrides"], case["mistakes"]) for case in FOUND]


@pytest.mark.parametrize(("overrides", "mistakes"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_the_mistake_is_named_with_its_mend(overrides: list[str], mistakes: list[str]) -> None:
    config = configured(*overrides)
    with pytest.raises(ConfigError) as caught:
        Plan.from_config(config, Cluster.from_config(config))
    assert str(caught.value).splitlines() == mistakes


def test_at_least_sixty_distinct_mistakes_are_known() -> None:
    assert len({mistake for _, mistakes in BAD for mistake in mistakes}) >= 60


def test_all_mistakes_of_a_config_come_together() -> None:
    config = configured("actor.pool=a", "rollout.pool=b", "rollout.top_k=0", "data.train_batch_size=40")
    with pytest.raises(ConfigError) as caught:
        Plan.from_config(config, Cluster.from_counts([8]))
    text = str(caught.value)
    assert all(part in text for part in ("actor.pool='a'", "rollout.pool='b'", "top_k=0", "train_batch_size=40"))


@pytest.mark.parametrize(
    ("overrides", "counts", "mistake"),
    [
        (["cluster.nodes=2"], [8], "cluster.nodes=2, but 1 host(s) started; start 2 or drop cluster.nodes"),
        (
            ["cluster.gpus_per_node=8"],
            [4, 4],
            "cluster.gpus_per_node=8 · ranks_per_gpu=1 asks for 8 ranks a host, but 4 started",
        ),
        (
            ["cluster.gpus_per_node=[8,4]", "cluster.nodes=2"],
            [4, 8],
            "cluster.gpus_per_node=[8, 4] · ranks_per_gpu=1 asks for [8, 4] ranks a host, but [4, 8] started",
        ),
        (["cluster.ranks_per_gpu=2"], [3], "cluster.ranks_per_gpu=2 does not divide the 3 ranks of a host"),
    ],
)
def test_what_started_is_held_against_the_config(overrides: list[str], counts: list[int], mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.from_config(configured(*overrides), Cluster.from_counts(counts))
    assert str(caught.value) == mistake


def test_a_config_made_in_code_is_checked_too() -> None:
    config = Config()
    config.actor.engine.name = "deepspeed"
    config.rollout.n = 0
    with pytest.raises(ConfigError, match=r"actor\.engine\.name=deepspeed is not one of fsdp, megatron") as caught:
        Plan.from_config(config, Cluster.from_counts([1]))
    assert "rollout.n=0 is out of range: at least 1" in str(caught.value)


def test_the_command_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster.gpus_per_node=8", "actor.engine.fsdp.fsdp_size=3"]) == 2
    error = capsys.readouterr().err
    assert "actor.engine.fsdp.fsdp_size=3 does not divide the 8 ranks of pool 'global'; use 1, 2, 4 or 8" in error


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_is_a_warning_not_an_error(estimator: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["rollout.n=1", f"algorithm.adv_estimator={estimator}"]
    config = configured(*overrides)
    (warning,) = Plan.from_config(config, Cluster.from_config(config)).warnings
    assert f"adv_estimator={estimator}" in warning
    assert "no signal" in warning
    assert main(["model=qwen3-0.6b", "cluster.gpus_per_node=8", *overrides]) == 0
    assert f"warning: {warning}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "cut", "reader"),
    [
        (["rollout.top_p=0.5", "algorithm.rollout_correction.bypass_mode=true"], "top_p=0.5", "bypass_mode"),
        (["rollout.top_k=5", "algorithm.rollout_correction.rollout_is=token"], "top_k=5", "rollout_is=token"),
        (["rollout.top_p=0.5"], "", ""),
        (["algorithm.rollout_correction.rollout_is=token"], "", ""),
    ],
)
def test_a_cut_vocabulary_under_a_correction_is_a_warning(overrides: list[str], cut: str, reader: str) -> None:
    config = configured(*overrides)
    warnings = Plan.from_config(config, Cluster.from_config(config)).warnings
    assert [w.split(" draws")[0] for w in warnings] == ([f"rollout.{cut}"] if cut else [])
    assert all(f"rollout_correction ({reader}) compares" in warning for warning in warnings)
