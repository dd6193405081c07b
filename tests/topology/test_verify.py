"""The process groups that are really built (torch's fake world, DeviceMesh, RankGenerator) are the planned ones."""

import math
from dataclasses import replace

import pytest

from spmd_rl.runtime.verify import verify
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.layout import Layout
from spmd_rl.topology.plan import Plan
from tests.topology.configured import configured

FSDP = [
    "actor.engine.fsdp.fsdp_size=8",
    "actor.engine.fsdp.ulysses_size=2",
    "model.path=none",
    "actor.use_kl_loss=true",
]
MEGATRON = [
    "engine=megatron", "model.shape=qwen3-30b-a3b", "trainer.device=cpu", "rollout.name=vllm", "rollout.infer_tp=4",
    "actor.engine.megatron.tp=2", "actor.engine.megatron.pp=2", "actor.engine.megatron.ep=2",
]  # fmt: skip


def plan_of(size: int, *overrides: str) -> Plan:
    return Plan.from_config(configured(*overrides), Cluster.from_counts([8] * (size // 8)))


@pytest.mark.parametrize("size", [8, 16, 32, 256])
@pytest.mark.parametrize("overrides", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
def test_built_groups_are_the_planned_ones(size: int, overrides: list[str]) -> None:
    assert verify(plan_of(size, *overrides)) == []


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
def test_at_4096_ranks(overrides: list[str]) -> None:
    assert verify(plan_of(4096, *overrides)) == []


def test_pools_are_worlds_of_their_own() -> None:
    plan = plan_of(
        16, *FSDP, "+pools.rollout.nnodes=1", "rollout.pool=rollout", "rollout.name=vllm", "rollout.infer_tp=2"
    )
    assert verify(plan) == []
    assert plan.groups("rollout/infer_tp").members().tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]


class Backwards(Layout):
    """Folds with the first axis fastest."""

    def stride(self, axis: str) -> int:
        return math.prod(self.sizes[: self.names.index(axis)])


def test_a_wrong_fold_is_found() -> None:
    plan = plan_of(8, "model.path=none", "actor.engine.fsdp.fsdp_size=4")
    wrong = replace(plan.roles["actor"], mesh=Backwards(("ddp", "fsdp"), (2, 4)))
    differences = verify(replace(plan, roles={**plan.roles, "actor": wrong}))
    assert "actor mesh ddp of pool rank 0: built [0, 4], planned [0, 1]" in differences
    assert "actor mesh fsdp of pool rank 7: built [4, 5, 6, 7], planned [1, 3, 5, 7]" in differences
