"""Settings that nobody reads are warned about, and only those."""

import pytest

from spmd_rl.config.load import compose, groups, packaged_configs
from spmd_rl.topology.idle_keys import idle_warnings

EXPERIMENTS = sorted(groups([packaged_configs()])["experiment"])


@pytest.mark.parametrize(
    ("settings", "unused", "chosen"),
    [
        (["rollout.gpu_memory_utilization=0.8"], "rollout.gpu_memory_utilization=0.8", "rollout.name=vllm"),
        (["engine=megatron", "actor.engine.fsdp.fsdp_size=4"], "actor.engine.fsdp.fsdp_size=4", "this is megatron"),
        (["critic.engine.megatron.tp=2"], "critic.engine.megatron.tp=2", "this is fsdp"),
        (["actor.policy_loss.tau_pos=2"], "actor.policy_loss.tau_pos=2.0", "loss_mode=sapo, and this is vanilla"),
        (["trainer.staleness=2"], "trainer.staleness=2", "schedule=one_step_off, and this is colocated"),
    ],
)  # fmt: skip
def test_a_setting_that_nobody_reads(settings: list[str], unused: str, chosen: str) -> None:
    (warning,) = idle_warnings(compose(settings))
    assert warning.startswith(f"{unused} does nothing: it is for ")
    assert chosen in warning


@pytest.mark.parametrize(
    "settings",
    [
        *([f"experiment={name}"] for name in EXPERIMENTS),
        ["rollout=vllm", "rollout.gpu_memory_utilization=0.8"],
        ["engine=megatron", "actor.engine.megatron.tp=2"],
        ["actor.policy_loss.loss_mode=sapo", "actor.policy_loss.tau_pos=2"],
        ["actor.policy_loss.loss_mode=mine.py:loss", "actor.policy_loss.tau_pos=2"],
        ["trainer.schedule=one_step_off", "trainer.staleness=2"],
    ],
)
def test_settings_that_are_read(settings: list[str]) -> None:
    assert idle_warnings(compose(settings)) == []
