"""The plan as plain data: what `--json` writes and the page reads.

Per-rank columns are written out up to `FULL` ranks; beyond that layouts (names, sizes) and pools stay symbolic, which
says as much: a coordinate is `r // stride % size`.
"""

from typing import Any

from spmd_rl.topology.cluster import Pool
from spmd_rl.topology.groups import ProcessGroups
from spmd_rl.topology.hardware import hardware
from spmd_rl.topology.layout import Layout, RoleLayout
from spmd_rl.topology.memory import RESERVE, card_bytes
from spmd_rl.topology.plan import Plan

FULL = 4096


def document(plan: Plan) -> dict[str, Any]:
    """The whole plan as JSON types."""
    card = hardware(plan.config)
    return {
        "world_size": plan.world_size,
        "model": {"name": plan.shape.name, "parameters": plan.shape.params} if plan.shape else None,
        "experiment": plan.config.trainer.experiment_name,
        "schedule": plan.config.trainer.schedule,
        "card": {"name": card.name, "memory": card.memory, "usable": card_bytes(plan.config), "reserve": RESERVE},
        "ranks_per_gpu": plan.config.cluster.ranks_per_gpu,
        "nodes": [{"address": n.address, "ranks": n.ranks, "tag": n.tag} for n in plan.cluster.nodes],
        "pools": [_pool(plan, pool) for pool in plan.pools.values()],
        "roles": [_role(role, plan.world_size <= FULL) for role in plan.roles.values()],
        "process_groups": [_groups(groups) for groups in plan.process_groups.values()],
        "phases": _phases(plan),
        "memory": [
            {"phase": m.phase, "pool": m.pool, "stage": m.stage, "moment": m.moment, "items": m.items, "peak": m.peak}
            for m in plan.memory
        ],
        "traffic": [
            {"phase": t.phase, "what": t.what, "groups": t.groups, "inside": t.inside, "between": t.between}
            for t in plan.traffic
        ],
        "exchanges": [
            {"what": e.what, "from": e.source.role, "to": e.target.role, "pools": [pool.name for pool in e.pools]}
            for e in plan.exchanges
        ],
        "weight_sync": _sync(plan),
        "vllm": plan.vllm_facts,
    }


def ranges(ranks: tuple[int, ...]) -> list[list[int]]:
    """Ascending ranks as [first, last] runs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def _pool(plan: Plan, pool: Pool) -> dict[str, Any]:
    return {"name": pool.name, "size": pool.size, "ranks": ranges(pool.ranks), "roles": plan.roles_on(pool.name)}


def _layout(layout: Layout) -> dict[str, Any]:
    axes = zip(layout.names, layout.sizes, strict=True)
    return {
        "axes": [
            {"name": name, "size": size, "stride": layout.stride(name), "formula": layout.formula(name)}
            for name, size in axes
        ]
    }


def _role(role: RoleLayout, full: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "role": role.role,
        "pool": role.pool,
        "engine": role.engine,
        "dp_size": role.dp_size,
        "layouts": {name: _layout(layout) for name, layout in role.folds.items()},
        "collects": dict(role.collecting),
    }
    if full:
        found["dp_ranks"] = role.dp_ranks.tolist()
        found["collectors"] = role.collectors.tolist()
    return found


def _groups(groups: ProcessGroups) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": groups.name,
        "aliases": list(groups.aliases),
        "kind": groups.kind,
        "pools": [pool.name for pool in groups.pools],
        "axes": list(groups.axes),
        "count": groups.count,
        "size": groups.group_size,
    }
    if groups.layout.size <= FULL:
        found["members"] = groups.members().tolist()
    return found


def _phases(plan: Plan) -> list[dict[str, Any]]:
    bounds = {bound.phase: bound for bound in plan.bounds}
    found = []
    for phase in plan.phases:
        bound = bounds.get(phase.name)
        entry: dict[str, Any] = {
            "name": phase.name,
            "role": phase.role,
            "pool": phase.pool,
            "skipped": phase.why_skipped,
        }
        if bound:
            entry |= {"bound": bound_dict(bound)}
        found.append(entry)
    return found


def bound_dict(bound: Any) -> dict[str, float]:
    """Seconds by what limits the phase."""
    parts = {name: getattr(bound, name) for name in ("compute", "memory", "inside", "between")}
    return parts | {"seconds": bound.seconds}


def _sync(plan: Plan) -> dict[str, Any] | None:
    edge = plan.weight_sync
    if edge is None:
        return None
    found: dict[str, Any] = {
        "from": edge.source.role,
        "to": edge.target.role,
        "pools": [pool.name for pool in edge.pools],
    }
    bound = next((b for b in plan.bounds if b.phase == "weight sync"), None)
    if bound:
        found["bound"] = bound_dict(bound)
    found["example"] = {"rank": edge.pools[1].ranks[0], "sources": edge.sources(edge.pools[1].ranks[0])[:64]}
    return found
