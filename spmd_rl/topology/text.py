"""The plan as text for a terminal: the whole of it, or one rank's story. Plain strings, no colours, 120 columns."""

from collections.abc import Sequence

from spmd_rl.topology.document import ranges
from spmd_rl.topology.hardware import GIB, hardware
from spmd_rl.topology.layout import Layout
from spmd_rl.topology.memory import card_bytes
from spmd_rl.topology.phases import samples_a_prompt
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.roles import role_specs

SHOWN = 16
"""Ranks listed one by one; of larger jobs the first and last few."""


def plan_text(plan: Plan) -> str:
    """Pools, layouts, ranks, phases with memory, the rollout engine, process groups, traffic."""
    sections = (_head, _pools, _layouts, _ranks, _phases, _vllm, _pool_times, _groups, _traffic)
    parts = [section(plan) for section in sections]
    return "\n\n".join(part for part in parts if part) + "\n"


def rank_text(plan: Plan, job_rank: int) -> str:
    """One rank's story: where it is, its place in every layout with the formula, its groups, rows, shards and memory.

    Raises KeyError for a rank outside the job.
    """
    pool = plan.pool_of(job_rank)
    r, node = pool.pool_rank(job_rank), plan.cluster.nodes[plan.cluster.node_of[job_rank]]
    local = int(plan.cluster.local_ranks[job_rank])
    device = local // plan.config.cluster.ranks_per_gpu
    where = f"rank {job_rank}: {node.address}, local rank {local} (GPU {device})"
    lines = [f"{where}; in pool {pool.name!r} it is r = {r} of {pool.size}"]
    for role in (plan.roles[name] for name in plan.roles_on(pool.name)):
        lines.append(f"\n{role.role} ({role.engine})")
        lines += [f"  {kind:<7} {_place(layout, r)}" for kind, layout in role.folds.items()]
        collects = "collects its results" if role.collects(r) else "leaves the results to its collecting rank"
        lines.append(f"  rows    part {role.dp_rank(r)} of {role.dp_size}; {collects}")
        for name, groups in plan.process_groups.items():
            names = [n for n in (name, *groups.aliases) if n.startswith(f"{role.role}/")]
            if names and groups.group_size > 1:
                lines.append(f"  group   {', '.join(names)}: {_run(groups.members_of(job_rank))}")
    return "\n".join([*lines, *_moves(plan, job_rank), *_memory_lines(plan, job_rank)]) + "\n"


def header_lines(plan: Plan) -> dict[str, str]:
    """For a run's header: its pools, when there are several, with the schedule; and how each role is held."""
    lines = {}
    if len(plan.pools) > 1:
        pools = (f"{p.name} {_run(p.ranks)}: {' · '.join(plan.roles_on(p.name))}" for p in plan.pools.values())
        lines["pools"] = f"{'  |  '.join(pools)}  ·  schedule {plan.config.trainer.schedule}"
    for role, spec in role_specs(plan.config).items():
        held = plan.roles[role]
        words = [f"{held.engine}  {held.mesh}", str(held.batch) if spec.engine is not None else "", spec.path or ""]
        lines["reward model" if role == "reward" else role] = "  |  ".join(filter(None, words))
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Columns wide enough for their cells; `right` ones are right-aligned."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def gib(size: float) -> str:
    """Bytes as `12.3 GiB`, small ones in MiB, `-` for nothing."""
    if size <= 0:
        return "-"
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def seconds(time: float) -> str:
    """`1.2 s`, `3.4 ms`, or `-` for nothing."""
    if time <= 0:
        return "-"
    return f"{time:.1f} s" if time >= 1 else f"{time * 1e3:.1f} ms" if time >= 1e-3 else f"{time * 1e6:.0f} µs"


def _head(plan: Plan) -> str:
    nodes, shape = plan.cluster.nodes, plan.shape
    model = f"{shape.name}, {shape.params / 1e9:.2f} B parameters" if shape else "shape unknown: no memory estimate"
    n = samples_a_prompt(plan.config)
    return (
        f"{plan.world_size} ranks on {len(nodes)} node(s) of {hardware(plan.config).name}; {model}\n"
        f"a step: {plan.config.data.train_batch_size} prompts × {n} = {plan.config.data.train_batch_size * n} rows, "
        f"schedule {plan.config.trainer.schedule}"
    )


def _pools(plan: Plan) -> str:
    rows = [
        [pool.name, pool.size, _run(pool.ranks), len(pool.counts), ", ".join(plan.roles_on(pool.name))]
        for pool in plan.pools.values()
    ]
    return "POOLS\n" + table(["pool", "ranks", "which", "hosts", "roles"], rows, right=(1, 3))


def _pool_times(plan: Plan) -> str:
    """Who idles; nothing to tell of one pool."""
    if len(plan.pools) == 1 or not plan.pool_times:
        return ""
    rows = []
    for time in plan.pool_times:
        share = time.idle / (time.busy + time.idle) if time.idle else 0.0
        rows.append([time.pool, seconds(time.busy), seconds(time.idle), f"{share:.0%}"])
    note = "Made of the phases' lower bounds; a run measures trainer/idle_s/<pool>."
    return "POOLS IN A STEP\n" + table(["pool", "busy", "waits", "of the step"], rows, right=(1, 2, 3)) + "\n" + note


def _layouts(plan: Plan) -> str:
    rows = []
    for role in plan.roles.values():
        for kind, layout in role.folds.items():
            formulas = ", ".join(f"{name} = {layout.formula(name)}" for name in layout.names)
            rows.append([role.role, role.engine, kind, str(layout), formulas])
    return "LAYOUTS (r is the rank in its pool)\n" + table(["role", "engine", "for", "axes", "formula"], rows)


def _ranks(plan: Plan) -> str:
    size = plan.world_size
    shown = list(range(size)) if size <= SHOWN else [*range(SHOWN // 2), *range(size - SHOWN // 2, size)]
    lines = ["RANKS" + ("" if size <= SHOWN else f" (the first and last {SHOWN // 2} of {size}; --rank N tells any)")]
    for job_rank in shown:
        pool = plan.pool_of(job_rank)
        r, hats = pool.pool_rank(job_rank), []
        for name in plan.roles_on(pool.name):
            layouts = plan.roles[name].folds.values()
            places = {
                axis: c for layout in layouts for axis, c in layout.coords(r).items() if layout.axis_size(axis) > 1
            }
            hats.append(f"{name} " + " ".join(f"{axis}={c}" for axis, c in places.items()))
        lines.append(f"  rank {job_rank}: " + " | ".join(hat.strip() for hat in hats))
    return "\n".join(lines)


def _phases(plan: Plan) -> str:
    bounds = {bound.phase: bound.seconds for bound in plan.bounds}
    rows = []
    for phase in plan.phases:
        if phase.why_skipped:
            rows.append([phase.name, "-", "-", "-", "-", "-", f"skipped: {phase.why_skipped}"])
            continue
        found = [m for m in plan.memory if m.phase == phase.name]
        worst = max(found, key=lambda m: m.peak, default=None)
        largest = ""
        if worst:
            items = sorted(worst.items.items(), key=lambda item: -item[1])[:3]
            largest = ", ".join(f"{what} {gib(size)}" for what, size in items)
        peak = gib(worst.peak) if worst else "-"
        room = gib(card_bytes(plan.config) - worst.peak) if worst and worst.peak <= card_bytes(plan.config) else "-"
        bound = seconds(bounds.get(phase.name, 0.0))
        rows.append([phase.name, phase.role or "cpu", phase.pool, peak, room, bound, largest])
    head = ["phase", "role", "pool", "peak", "head-room", "at least", "largest"]
    note = (
        "Peak: bytes of tensors on the fullest rank, every row at full length. At least: a lower bound from peak\n"
        "FLOP/s and bandwidths, not a forecast; a run is slower."
    )
    return "PHASES OF A STEP\n" + table(head, rows, right=(3, 4, 5)) + "\n" + note


def _vllm(plan: Plan) -> str:
    if not plan.vllm_facts:
        return ""
    rows = list(plan.vllm_facts.items())
    return "ROLLOUT ENGINE (vLLM, one rank; an estimate)\n" + table(["what", "how much"], rows)


def _groups(plan: Plan) -> str:
    rows = []
    for groups in plan.process_groups.values():
        hosts = groups.nodes_a_group(plan.cluster)
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        first = _run(tuple(groups.members()[0].tolist())) if groups.group_size > 1 else "each rank alone"
        also = ", ".join(groups.aliases[:4]) + (f" … {len(groups.aliases) - 4} more" if len(groups.aliases) > 4 else "")
        rows.append([groups.name, groups.count, groups.group_size, where, first, also])
    head = ["process groups", "count", "ranks each", "a group is on", "first group", "the same as"]
    return "PROCESS GROUPS (in registration order)\n" + table(head, rows, right=(1, 2))


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    rows = [[t.phase, t.what, t.groups, gib(t.inside), gib(t.between)] for t in plan.traffic]
    head = ["phase", "what", "over", "inside its host", "from other hosts"]
    sync = next((b.seconds for b in plan.bounds if b.phase == "weight sync"), 0.0)
    end = f"\nWeight sync takes at least {seconds(sync)}." if sync else ""
    return "TRAFFIC (what one rank takes in each step)\n" + table(head, rows, right=(3, 4)) + end


def _place(layout: Layout, r: int) -> str:
    coords = layout.coords(r)
    wide = [axis for axis in layout.names if layout.axis_size(axis) > 1] or list(layout.names[:1])
    return "  ".join(f"{axis} = {layout.formula(axis)} = {coords[axis]}" for axis in wide)


def _moves(plan: Plan, job_rank: int) -> list[str]:
    """From whom the rank's rows and weights come."""
    lines, rows = [], plan.config.data.train_batch_size * samples_a_prompt(plan.config)
    for edge in plan.exchanges:
        if job_rank in edge.pools[1]:
            parts = [f"rank {sender} rows {first}..{end - 1}" for sender, first, end in edge.sources(job_rank, rows)]
            shown = ", ".join(parts[:4]) + (f" … {len(parts) - 4} more" if len(parts) > 4 else "")
            lines.append(f"  {edge.what} from {edge.source.role}: {shown}")
    sync = plan.weight_sync
    if sync is not None and job_rank in sync.pools[1]:
        for what, sources in (("", sync.sources(job_rank)), ("routed experts, ", sync.expert_sources(job_rank))):
            if sources:
                holders = _run(tuple(sorted(rank for rank, _ in sources)))
                part = f"{what}{sync.slice_of(job_rank)}"
                lines.append(f"  weight sync: {part}, from ranks {holders} (1/{len(sources)} each)")
    return ["\nmoves", *lines] if lines else []


def _memory_lines(plan: Plan, job_rank: int) -> list[str]:
    found = plan.memory_of(job_rank)
    if not found:
        return []
    lines = [f"\nmemory (usable {gib(card_bytes(plan.config))})"]
    for entry in found:
        items = ", ".join(f"{what} {gib(size)}" for what, size in sorted(entry.items.items(), key=lambda i: -i[1]))
        lines.append(f"  {entry.phase:<18} {gib(entry.peak):>10}  {items}")
    return lines


def _run(ranks: tuple[int, ...], most: int = 4) -> str:
    """`0-7`, `0, 2, 4, 6`, long lists cut."""
    runs = ranges(ranks)
    if len(runs) > 2 and len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:most]) + (f" … {texts[-1]}" if len(texts) > most else "")
