"""Pools, process groups, edges, traffic and bounds of whole plans, at small and large sizes."""

import subprocess
import sys
import time

import numpy as np
import pytest

from spmd_rl.config import ConfigError
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.text import header_lines
from tests.topology.configured import configured


def plan_of(*overrides: str, counts: list[int] | None = None, tags: list[str] | None = None) -> Plan:
    return Plan.from_config(
        configured("model.path=none", *overrides), Cluster.from_counts(counts or [8, 8], tags=tags or ())
    )


def test_global_starts_at_rank_0_and_other_pools_come_from_the_end() -> None:
    plan = plan_of("+pools.rollout.n_gpus_per_node=4", "rollout.pool=rollout")
    assert plan.pools["global"].ranks == tuple(range(12))
    assert plan.pools["rollout"].ranks == (12, 13, 14, 15)
    assert plan.pools["rollout"].pool_rank(14) == 2
    assert plan.pool_of(11).name == "global"
    with pytest.raises(KeyError, match=r"rank 16 is outside the job's 0\.\.15"):
        plan.pool_of(16)


def test_pack_fills_a_host_that_is_in_use_and_spread_takes_the_emptiest() -> None:
    pools = [
        "+pools.a.n_gpus_per_node=2",
        "rollout.pool=a",
        "+pools.b.n_gpus_per_node=2",
        "actor.use_kl_loss=true",
        "ref.pool=b",
    ]
    packed = plan_of(*pools)
    assert packed.pools["a"].ranks == (14, 15)
    assert packed.pools["b"].ranks == (12, 13)
    spread = plan_of(*pools, "pools.b.placement=spread")
    assert spread.pools["b"].ranks == (6, 7)


def test_hosts_of_different_sizes_and_classes() -> None:
    plan = plan_of(
        "+pools.rollout.nnodes=2", "+pools.rollout.n_gpus_per_node=[2,4]", "rollout.pool=rollout",
        "pools.rollout.node_tag=l40",
        counts=[8, 4, 8, 2], tags=["h100", "l40", "h100", "l40"],
    )  # fmt: skip
    assert plan.pools["rollout"].ranks == (8, 9, 10, 11, 20, 21)
    assert plan.pools["rollout"].counts == (4, 2)
    assert plan.pools["global"].ranks == (*range(8), *range(12, 20))


def test_hosts_of_a_class_may_come_in_any_order() -> None:
    asked = ["cluster.nodes=3", "cluster.gpus_per_node=[8,8,4]", "cluster.node_tags=[big,big,small]"]
    started = plan_of(*asked, counts=[8, 4, 8], tags=["big", "small", "big"])
    assert [node.tag for node in started.cluster.nodes] == ["big", "small", "big"]
    with pytest.raises(ConfigError, match="big: 8, big: 8, small: 4; started were big: 4, small: 8, big: 8"):
        plan_of(*asked, counts=[4, 8, 8], tags=["big", "small", "big"])


def test_equal_groups_are_one_entry_and_every_name_finds_it() -> None:
    plan = plan_of("actor.use_kl_loss=true", "actor.engine.fsdp.fsdp_size=8")
    assert plan.groups("ref/fsdp") is plan.groups("rollout/dp") is plan.process_groups["pool/global"]
    assert plan.groups("actor/fsdp").members().tolist() == [list(range(8)), list(range(8, 16))]
    assert plan.groups("actor/ddp").members_of(13) == (5, 13)
    assert plan.process_groups["control"].count == 1
    assert len({g.key for g in plan.process_groups.values()}) == len(plan.process_groups)
    with pytest.raises(KeyError, match="no process groups 'actor/tp'"):
        plan.groups("actor/tp")


def test_pools_meet_over_bridges_only() -> None:
    plan = plan_of(
        "+pools.rollout.n_gpus_per_node=4", "rollout.pool=rollout", "+pools.ref.n_gpus_per_node=4", "ref.pool=ref",
        "actor.use_kl_loss=true",
    )  # fmt: skip
    bridges = [g for g in plan.process_groups.values() if g.kind == "bridge"]
    assert [g.name for g in bridges] == ["bridge/global-rollout", "bridge/global-ref"]
    assert bridges[0].members().tolist() == [sorted([*plan.pools["global"].ranks, *plan.pools["rollout"].ranks])]
    for groups in plan.process_groups.values():
        if groups.kind == "axis":
            assert all(len({plan.pool_of(r).name for r in members}) == 1 for members in groups.members().tolist())


def test_two_pools_of_a_cluster_have_a_bridge_besides_control() -> None:
    plan = plan_of("+pools.rollout.n_gpus_per_node=8", "rollout.pool=rollout")
    assert plan.groups("control").name == "control"
    assert plan.groups("bridge/global-rollout").name == "bridge/global-rollout"


@pytest.mark.parametrize("rows", [256, 250, 3])
def test_exchanges_cover_every_row_once_for_every_part(rows: int) -> None:
    plan = plan_of(
        "+pools.rollout.n_gpus_per_node=4", "rollout.pool=rollout", "rollout.name=vllm", "rollout.infer_tp=2",
        "actor.engine.fsdp.ulysses_size=2",
    )  # fmt: skip
    (edge,) = plan.exchanges
    assert (edge.source.role, edge.target.role) == ("rollout", "actor")
    covered: list[int] = []
    for rank in plan.pools["global"].array[plan.roles["actor"].collectors].tolist():
        for sender, first, end in edge.sources(rank, rows):
            assert plan.roles["rollout"].collects(plan.pools["rollout"].pool_rank(sender))
            covered += range(first, end)
    assert covered == list(range(rows))


def test_weights_come_from_one_whole_copy() -> None:
    plan = plan_of("actor.engine.fsdp.fsdp_size=8")
    assert plan.weight_sync is not None
    assert plan.weight_sync.sources(11) == [(rank, 1 / 8) for rank in range(8, 16)]
    moe = [
        "engine=megatron", "model.shape=qwen3-30b-a3b", "trainer.device=cpu", "actor.engine.megatron.tp=2",
        "actor.engine.megatron.pp=2", "actor.engine.megatron.ep=2", "rollout.name=vllm", "rollout.infer_tp=4",
    ]  # fmt: skip
    plan = plan_of(*moe)
    sync = plan.weight_sync
    assert sync is not None
    assert [rank for rank, _ in sync.sources(5)] == [4, 5, 12, 13]
    assert [rank for rank, _ in sync.expert_sources(5)] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert sync.slice_of(5) == "slice 2 of 4 of each matrix"


def test_traffic_counts_each_byte_once_and_splits_hosts() -> None:
    plan = plan_of("model.shape=qwen3-0.6b", "data.train_batch_size=64")
    update = {t.what: t for t in plan.traffic if t.phase == "update"}
    gathered = 2 * 596_049_920 * 2 * 2  # bfloat16, for the forward and again for the backward, two micro-batches
    assert update["parameters"].inside + update["parameters"].between == pytest.approx(gathered * 15 / 16)
    assert update["parameters"].between == pytest.approx(gathered / 2 / 8)
    hybrid = plan_of("model.shape=qwen3-0.6b", "data.train_batch_size=64", "actor.engine.fsdp.fsdp_size=8")
    over = {t.groups: t for t in hybrid.traffic if t.phase == "update"}
    assert over["actor/fsdp"].between == 0
    assert over["actor/ddp"].inside == 0


def test_bounds_grow_with_slower_links_and_never_exceed_their_parts() -> None:
    fast = plan_of("model.shape=qwen3-8b")
    slow = plan_of("model.shape=qwen3-8b", "cluster.bandwidth={inter_node: 0.5}")
    for a, b in zip(fast.bounds, slow.bounds, strict=True):
        assert a.seconds == max(a.compute, a.memory, a.inside, a.between)
        assert b.seconds >= a.seconds
    assert next(b for b in slow.bounds if b.phase == "weight sync").seconds > 50 * fast.bounds[-1].seconds


def test_one_update_a_step_skips_the_old_log_probs_and_says_why() -> None:
    assert [p.name for p in plan_of().phases if p.why_skipped] == ["old log-probs", "ref log-probs"]
    several = plan_of("actor.ppo_mini_batch_size=16", "actor.use_kl_loss=true")
    assert not [p for p in several.phases if p.why_skipped]
    ppo = plan_of("algorithm.adv_estimator=gae")
    assert [p.name for p in ppo.phases][-4:] == ["values", "advantages", "critic update", "update"]
    assert list(plan_of("trainer.mode=sft").roles) == ["actor"]


def test_a_hundred_thousand_ranks_in_four_roles() -> None:
    start = time.perf_counter()
    plan = plan_of(
        "model.shape=qwen3-8b", "actor.use_kl_loss=true", "actor.engine.fsdp.fsdp_size=8", "rollout.pool=rollout",
        "+pools.rollout.nnodes=2500", "rollout.name=vllm", "rollout.infer_tp=4", "reward.model.enable=true",
        "reward.model.path=x", "data.train_batch_size=65536", counts=[8] * 12500,
    )  # fmt: skip
    assert plan.bounds
    assert time.perf_counter() - start < 2
    assert len(plan.roles) == 4
    assert plan.groups("rollout/infer_tp").members_of(99_999) == (99_996, 99_997, 99_998, 99_999)
    assert np.unique(np.concatenate([pool.array for pool in plan.pools.values()])).size == 100_000


def test_the_plan_needs_no_torch() -> None:
    code = "import sys, spmd_rl.topology.plan, spmd_rl.topology.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_header_says_how_each_role_is_held_and_names_pools_where_there_are_several() -> None:
    alone = header_lines(plan_of(counts=[2]))
    assert alone == {"actor": "fsdp  fsdp=2  |  dp=2 · sp=1", "rollout": "transformers  dp=2 · infer_tp=1 · infer_pp=1"}
    several = plan_of(
        "+pools.rollout.n_gpus_per_node=1", "rollout.pool=rollout", "trainer.schedule=one_step_off",
        "+pools.judges.n_gpus_per_node=1", "reward.model.pool=judges", "reward.model.enable=true",
        "reward.model.path=some/judge", "algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "teacher.enable=true",
        "teacher.path=some/teacher",
        counts=[4],
    )  # fmt: skip
    lines = header_lines(several)
    pools = "global 0-1: actor · ref · critic · teacher  |  rollout 3: rollout  |  judges 2: reward"
    assert lines.pop("pools") == f"{pools}  ·  schedule one_step_off"
    assert lines == {
        "actor": "fsdp  fsdp=2  |  dp=2 · sp=1",
        "rollout": "transformers  dp=1 · infer_tp=1 · infer_pp=1",
        "ref": "fsdp  fsdp=2  |  dp=2 · sp=1",
        "critic": "fsdp  fsdp=2  |  dp=2 · sp=1",
        "reward model": "fsdp  fsdp=1  |  dp=1 · sp=1  |  some/judge",
        "teacher": "fsdp  fsdp=2  |  dp=2 · sp=1  |  some/teacher",
    }
