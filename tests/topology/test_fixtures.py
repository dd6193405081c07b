"""Layouts, pools and dispatch against values computed by verl's and megatron-core's own functions."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.roles import FsdpConfig, MegatronConfig, RolloutConfig
from spmd_rl.topology.cluster import Cluster, Node
from spmd_rl.topology.fold import fsdp_layout, megatron_layout, rollout_layout
from spmd_rl.topology.layout import Layout, RoleLayout, split_rows
from spmd_rl.topology.pools import place_pools

FOLDER = Path(__file__).parents[1] / "fixtures"


def cases(name: str, start: str = "") -> list[Any]:
    found = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return [pytest.param(case, id=case["name"]) for case in found if case["name"].startswith(start)]


def agree_on_rows(layout: RoleLayout, outputs: dict[str, Any]) -> None:
    assert layout.dp_ranks.tolist() == outputs["dispatch_dp_rank"]
    assert layout.collect_mask.tolist() == outputs["collect_mask"]
    assert layout.dp_ranks[layout.collectors].tolist() == outputs["collect_order_dp_ranks"]
    assert [layout.collects(r) for r in range(layout.size)] == outputs["collect_mask"]
    assert [layout.dp_rank(r) for r in range(layout.size)] == outputs["dispatch_dp_rank"]


@pytest.mark.parametrize("case", cases("mesh_fsdp_ulysses"))
def test_fsdp_and_ulysses_and_sizes_that_lose_ranks_in_the_reference_are_errors(case: dict[str, Any]) -> None:
    size, outputs = case["inputs"]["world_size"], case["outputs"]
    fsdp = FsdpConfig(case["params"]["fsdp_size"], case["params"]["ulysses_sequence_parallel_size"])
    ranks = outputs["per_rank"]
    if any("raises" in r or r["coord"] is None for r in ranks):
        with pytest.raises(ConfigError, match=f"actor.engine.fsdp.fsdp_size={fsdp.fsdp_size}"):
            fsdp_layout("actor", "global", size, fsdp)
        return
    layout = fsdp_layout("actor", "global", size, fsdp)
    assert layout.dp_size == outputs["dispatch_dp_size"]
    agree_on_rows(layout, outputs)
    for want in ranks:
        rank = want["rank"]
        assert list(layout.mesh.sizes) == want["mesh_shape"]
        assert list(layout.mesh.names) == want["mesh_dim_names"]
        assert list(layout.mesh.coords(rank).values()) == want["coord"]
        for axis, members in want["groups"].items():
            assert list(layout.mesh.group_of(rank, axis)) == members
        assert layout.batch.coords(rank) == {"dp": want["dp_rank"], "sp": want["sp_rank"]}
        assert list(layout.batch.group_of(rank, "sp")) == want["sp_group"]
        assert list(layout.batch.group_of(rank, "dp")) == want["dp_group"]


@pytest.mark.parametrize("case", cases("mesh_megatron"))
def test_megatron(case: dict[str, Any]) -> None:
    p, outputs, size = case["params"], case["outputs"], case["inputs"]["world_size"]
    config = MegatronConfig(
        tp=p["tensor_model_parallel_size"],
        pp=p["pipeline_model_parallel_size"],
        cp=p["context_parallel_size"],
        ep=p["expert_model_parallel_size"],
        etp=p["expert_tensor_parallel_size"],
    )
    if "raises" in outputs:
        with pytest.raises(ConfigError, match=f"does not divide the {size} ranks"):
            megatron_layout("actor", "global", size, config)
        return
    layout = megatron_layout("actor", "global", size, config)
    agree_on_rows(layout, outputs)
    expert = layout.expert
    assert expert is not None
    assert (layout.dp_size, expert.axis_size("edp")) == (outputs["dp_size"], outputs["expert_dp_size"])
    for axes, members in outputs["groups"].items():
        assert layout.mesh.groups(*axes.split("-")).tolist() == members
    for axes, members in outputs["expert_groups"].items():
        ours = [{"tp": "etp", "dp": "edp"}.get(axis, axis) for axis in axes.split("-")]
        assert expert.groups(*ours).tolist() == members
    coords = np.stack([layout.mesh.coordinate(axis) for axis in ("tp", "cp", "dp", "pp")], axis=1)
    assert coords.tolist() == outputs["coords_tp_cp_dp_pp"]
    coords = np.stack([expert.coordinate(axis) for axis in ("etp", "ep", "edp")], axis=1)
    assert coords.tolist() == outputs["coords_etp_ep_edp"]


@pytest.mark.parametrize("case", cases("mesh_rollout"))
def test_rollout_where_the_references_dp_is_a_part_of_our_infer_tp(case: dict[str, Any]) -> None:
    p, outputs, size = case["params"], case["outputs"], case["inputs"]["world_size"]
    config = RolloutConfig(
        infer_tp=p["tensor_model_parallel_size"] * p["data_parallel_size"], infer_pp=p["pipeline_model_parallel_size"]
    )
    if "raises" in outputs:
        with pytest.raises(ConfigError, match=r"rollout: infer_tp·infer_pp = .* does not divide"):
            rollout_layout("global", size, config)
        return
    layout = rollout_layout("global", size, config)
    assert list(layout.mesh.sizes) == outputs["mesh_shape"]
    assert layout.dp_size == outputs["num_replicas"]
    pool = place_pools(Config(), Cluster.from_counts([p["n_gpus_per_node"]] * (size // p["n_gpus_per_node"])))[0][
        "global"
    ]
    replicas = pool.split(outputs["replica_world_size"])
    for want in outputs["per_rank"]:
        rank = want["rank"]
        assert list(layout.mesh.coords(rank).values()) == want["coord_dp_infertp_inferpp"]
        for axis in ("infer_tp", "infer_pp", "dp"):
            assert list(layout.mesh.group_of(rank, axis)) == want[f"{axis}_group"]
        assert layout.dp_rank(rank) == want["replica_rank"]
        assert replicas[want["replica_rank"]].pool_rank(rank) == want["rollout_rank"]
        assert layout.collects(rank) == want["owns_server_handle"]


@pytest.mark.parametrize("case", [c for c in cases("resource_pool_dispatch", "pool/") if "hetero" not in c.id])
def test_pool_ranks_follow_hosts_and_local_ranks(case: dict[str, Any]) -> None:
    inputs, outputs, split = case["inputs"], case["outputs"], case["params"]["split_size"]
    cluster = Cluster.from_hosts(dict(zip(inputs["node_ips_in_ray_order"], inputs["process_on_nodes"], strict=True)))
    pool = place_pools(Config(), cluster)[0]["global"]
    parts, wanted = (pool.split(split), outputs) if split else ((pool,), [outputs])
    assert len(parts) == len(wanted)
    for part, want in zip(parts, wanted, strict=True):
        assert part.size == want["world_size"]
        for worker in want["workers"]:
            job_rank = part.ranks[worker["rank"]]
            assert cluster.nodes[cluster.node_of[job_rank]].address == worker["node_ip"]
            assert cluster.local_ranks[job_rank] == worker["bundle/local_rank"]


@pytest.mark.parametrize("case", [c for c in cases("resource_pool_dispatch", "pool/") if "hetero" in c.id])
def test_hosts_of_different_sizes_keep_all_their_ranks_where_the_reference_loses_some(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    counts = inputs["process_on_nodes"]
    assert len(case["outputs"]["workers"]) < sum(counts)
    cluster = Cluster.from_hosts(dict(zip(inputs["node_ips_in_ray_order"], counts, strict=True)))
    pool = place_pools(Config(), cluster)[0]["global"]
    assert pool.ranks == tuple(range(sum(counts)))
    assert cluster.node_of.tolist() == [i for i, node in enumerate(cluster.nodes) for _ in range(node.ranks)]


def test_hosts_are_in_numeric_order_where_the_reference_sorts_text() -> None:
    cluster = Cluster.from_hosts({"10.0.0.10": 4, "10.0.0.9": 2, "node10": 1, "node2": 1, "fe80::2": 1})
    assert cluster.nodes == (
        Node("10.0.0.9", 2),
        Node("10.0.0.10", 4),
        Node("fe80::2", 1),
        Node("node2", 1),
        Node("node10", 1),
    )


@pytest.mark.parametrize("case", cases("resource_pool_dispatch", "dispatch_collect/"))
def test_dispatch_and_collect(case: dict[str, Any]) -> None:
    rows, mapping, mask = (case["inputs"][k] for k in ("rows", "dp_rank_mapping", "collect_mask"))
    offsets = split_rows(len(rows), case["params"]["dp_size"])
    chunks = [rows[offsets[dp] : offsets[dp + 1]] for dp in mapping]
    assert chunks == case["outputs"]["rows_per_rank"]
    ranks = sorted(np.flatnonzero(mask).tolist(), key=lambda rank: mapping[rank])
    assert [chunks[rank] for rank in ranks] == case["outputs"]["collected"]
    if case["params"]["dp_size"] == 2:  # tp2·pp2·dp2 is a layout of ours
        layout = megatron_layout("actor", "global", 8, MegatronConfig(tp=2, pp=2))
        assert layout.dp_ranks.tolist() == mapping
        assert layout.collect_mask.astype(int).tolist() == mask


def test_uneven_chunks_differ_by_one_row_and_keep_the_order() -> None:
    assert split_rows(11, 4).tolist() == [0, 3, 6, 9, 11]
    assert split_rows(2, 4).tolist() == [0, 1, 2, 2, 2]
    assert split_rows(0, 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("sizes", [(2, 3, 4), (5,), (1, 7, 1), (3, 2, 2, 2)])
def test_every_axis_and_pair_partitions_the_ranks(sizes: tuple[int, ...]) -> None:
    layout = Layout(tuple("abcd"[: len(sizes)]), sizes)
    for axes in [(a,) for a in layout.names] + [(a, b) for a in layout.names for b in layout.names if a != b]:
        groups = layout.groups(*axes)
        assert sorted(groups.reshape(-1).tolist()) == list(range(layout.size))
        for group in groups.tolist():
            assert all(layout.group_of(rank, *axes) == tuple(group) for rank in group)
            fixed = [tuple(v for k, v in layout.coords(rank).items() if k not in axes) for rank in group]
            assert len(set(fixed)) == 1
