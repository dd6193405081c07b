"""`spmd-rl plan --verify`: build the process groups under torch's fake backend and compare their members with the plan.

Three builders are compared: our own registration (what a run does), torch's DeviceMesh, and megatron-core's
RankGenerator where it is installed. Run as `python -m spmd_rl.runtime.verify < config.yaml`; exit code 1 when they
differ.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmd_rl.config.load import build
from spmd_rl.runtime.process_groups import ProcessGroups
from spmd_rl.topology.cluster import Cluster, Pool
from spmd_rl.topology.layout import Layout, RoleLayout
from spmd_rl.topology.plan import Plan

LOOKED_FROM = 3
"""Ranks of each pool whose own groups are really built; a process can only be one rank at a time."""


def verify(plan: Plan) -> list[str]:
    """Every difference between what was built and the plan, one sentence each."""
    return [difference for pool in plan.pools.values() for difference in _verify_pool(plan, pool)]


def _verify_pool(plan: Plan, pool: Pool) -> Iterator[str]:
    for rank in sorted({0, pool.size // 2, pool.size - 1})[:LOOKED_FROM]:
        dist.init_process_group("fake", rank=rank, world_size=pool.size, store=FakeStore())
        try:
            yield from _registered(plan, pool, rank)
            for role in plan.roles_on(pool.name):
                yield from _meshes(plan.roles[role], rank)
        finally:
            dist.destroy_process_group()
    for role in plan.roles_on(pool.name):
        if plan.roles[role].expert is not None:
            yield from _megatron(plan.roles[role])


def _registered(plan: Plan, pool: Pool, rank: int) -> Iterator[str]:
    """Our own groups: all of them are registered by every rank, and the rank's own have the planned members."""
    built = ProcessGroups(rank, pool.size, "cpu")
    planned = [g for g in plan.process_groups.values() if g.kind in ("axis", "pool") and g.pools == (pool,)]
    for groups in planned:
        built.register(groups.layout, *groups.axes)
    made = set(built.members())
    for groups in planned:
        wanted = groups.layout.groups(*groups.axes)
        missing = {tuple(members) for members in wanted.tolist()} - made
        if missing:
            yield f"{groups.name}: {len(missing)} groups were not built, the first {min(missing)}"
        found = dist.get_process_group_ranks(built.along(groups.layout, *groups.axes))
        yield from _compare(f"{groups.name} of pool rank {rank}", found, groups.layout.group_of(rank, *groups.axes))


def _meshes(role: RoleLayout, rank: int) -> Iterator[str]:
    """torch's DeviceMesh over the same names and sizes folds the ranks by itself."""
    for fold, layout in role.folds.items():
        mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.names)
        for axis in layout.names:
            found = dist.get_process_group_ranks(mesh.get_group(axis))
            yield from _compare(f"{role.role} {fold} {axis} of pool rank {rank}", found, layout.group_of(rank, axis))


def _megatron(role: RoleLayout) -> Iterator[str]:
    """megatron-core's own enumeration of all groups, dense and expert."""
    try:
        from spmd_rl.runtime.mcore import RankGenerator
    except ImportError:
        print(f"{role.role}: megatron-core is not installed, its RankGenerator was not compared", file=sys.stderr)
        return
    expert = role.expert
    assert expert is not None, "called for megatron roles only"
    sizes = {axis: role.mesh.axis_size(axis) for axis in ("tp", "cp", "dp", "pp")}
    dense = RankGenerator(ep=1, order="tp-cp-ep-dp-pp", **sizes)
    etp, ep, edp, pp = (expert.axis_size(axis) for axis in ("etp", "ep", "edp", "pp"))
    experts = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for names in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp", "tp-dp"):
        yield from _compare_all(f"{role.role}/{names}", dense.get_ranks(names), role.mesh, names.split("-"))
    for names in ("tp", "ep", "dp", "tp-ep", "tp-ep-pp"):
        ours = [{"tp": "etp", "dp": "edp"}.get(name, name) for name in names.split("-")]
        yield from _compare_all(f"{role.role}/{'-'.join(ours)}", experts.get_ranks(names), expert, ours)


def _compare(what: str, found: list[int], planned: tuple[int, ...]) -> Iterator[str]:
    if tuple(found) != planned:
        yield f"{what}: built {found}, planned {list(planned)}"


def _compare_all(what: str, found: list[list[int]], layout: Layout, axes: list[str]) -> Iterator[str]:
    planned = layout.groups(*axes).tolist()
    if sorted(map(sorted, found)) != planned:
        yield f"{what}: megatron-core makes {found[:2]} …, planned {planned[:2]} …"


def main() -> int:
    """Read a config from stdin, plan it, verify it."""
    config = build(yaml.safe_load(sys.stdin) or {})
    plan = Plan.from_config(config, Cluster.from_config(config))
    torch.set_num_threads(1)
    differences = verify(plan)
    for difference in differences:
        print(difference)
    sets = len(plan.process_groups)
    print(f"{plan.world_size} ranks, {sets} sets of process groups: {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
