"""The process groups of a run, in the order in which every rank registers them.

Groups are symbolic (pool, layout, axes): the members of 100,000 ranks' groups are only written out when asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.topology.cluster import Cluster, Pool
from spmd_rl.topology.layout import Layout, RoleLayout

MEGATRON_JOINT = (("dp", "cp"), ("tp", "pp"), ("tp", "dp", "cp"), ("tp", "dp"), ("tp", "cp"))
EXPERT_JOINT = (("etp", "ep"), ("etp", "ep", "pp"))


@dataclass(frozen=True)
class ProcessGroups:
    """All process groups along one axis (or joint axes) of one layout.

    `name` is `<role>/<axes>`, `pool/<name>`, `bridge/<pool>-<pool>` or `control`; `aliases` are the names of other axes
    whose groups have the very same members, so that no group is made twice.
    """

    name: str
    kind: str
    """axis | pool | bridge | control"""
    pools: tuple[Pool, ...]
    """The pool it is in; both pools of a bridge; every pool for control."""
    layout: Layout
    axes: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        """Members of each group."""
        return self.layout.axis_size(*self.axes)

    @property
    def count(self) -> int:
        """How many groups there are."""
        return self.layout.size // self.group_size

    def members(self) -> np.ndarray:
        """Job ranks of each group, int64 [count, group_size]."""
        return self._array[self.layout.groups(*self.axes)]

    def members_of(self, job_rank: int) -> tuple[int, ...]:
        """Job ranks of the one group that holds `job_rank`; empty if none does."""
        place = np.flatnonzero(self._array == job_rank)
        if not len(place):
            return ()
        return tuple(self._array[list(self.layout.group_of(int(place[0]), *self.axes))].tolist())

    def nodes_a_group(self, cluster: Cluster) -> int:
        """The most hosts that one group spans."""
        nodes = np.sort(cluster.node_of[self.members()], axis=1)
        return int((np.diff(nodes, axis=1) != 0).sum(axis=1).max(initial=0)) + 1

    @property
    def _array(self) -> np.ndarray:
        if len(self.pools) == 1:
            return self.pools[0].array
        return np.sort(np.concatenate([pool.array for pool in self.pools]))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal members: the pools and the (stride, size) steps of a group, neighbouring steps merged.

        Control and bridges stay apart from the pools' own groups: they are other worlds, with other backends.
        """
        steps: list[tuple[int, int]] = []
        for axis in sorted(self.axes, key=self.layout.stride):
            stride, size = self.layout.stride(axis), self.layout.axis_size(axis)
            if size == 1:
                continue
            if steps and steps[-1][0] * steps[-1][1] == stride:
                steps[-1] = (steps[-1][0], steps[-1][1] * size)
            else:
                steps.append((stride, size))
        kind = self.kind if self.kind in ("control", "bridge") else "pool"
        return (kind, tuple(pool.name for pool in self.pools), tuple(steps))


def process_groups(pools: dict[str, Pool], roles: dict[str, RoleLayout]) -> dict[str, ProcessGroups]:
    """Every set of process groups of the run by name, in registration order; sets with equal members are one entry."""
    merged: dict[tuple[object, ...], ProcessGroups] = {}
    for groups in _all_groups(pools, roles):
        first = merged.get(groups.key)
        merged[groups.key] = groups if first is None else replace(first, aliases=(*first.aliases, groups.name))
    return {groups.name: groups for groups in merged.values()}


def _all_groups(pools: dict[str, Pool], roles: dict[str, RoleLayout]) -> Iterable[ProcessGroups]:
    everyone = tuple(pools.values())
    yield _whole("control", "control", everyone)
    for pool in everyone:
        yield _whole(f"pool/{pool.name}", "pool", (pool,))
    for role in roles.values():
        for layout, axes in role_axes(role):
            yield ProcessGroups(f"{role.role}/{'-'.join(axes)}", "axis", (pools[role.pool],), layout, axes)
    for one, other in bridges(roles):
        yield _whole(f"bridge/{one}-{other}", "bridge", (pools[one], pools[other]))


def role_axes(role: RoleLayout) -> Iterable[tuple[Layout, tuple[str, ...]]]:
    """The axes along which a role communicates, with the layout that each belongs to."""
    for layout in role.folds.values():
        for axis in layout.names:
            if not (layout is role.expert and axis == "pp"):
                yield layout, (axis,)
    if role.expert is not None:
        yield from ((role.mesh, axes) for axes in MEGATRON_JOINT)
        yield from ((role.expert, axes) for axes in EXPERT_JOINT)
    if role.role == "rollout":
        yield role.mesh, ("infer_tp", "infer_pp")


def bridges(roles: dict[str, RoleLayout]) -> list[tuple[str, str]]:
    """Pairs of pools between which batches or weights move, each pair once: those of the actor, which is the batch's
    home, and of every other role; but replies are scored where they are sampled, so a reward model meets the rollout.
    """
    pairs: dict[frozenset[str], tuple[str, str]] = {}
    for role in roles.values():
        meets = roles["rollout" if role.role == "reward" else "actor"].pool
        if role.pool != meets:
            pairs.setdefault(frozenset((meets, role.pool)), (meets, role.pool))
    return list(pairs.values())


def _whole(name: str, kind: str, pools: tuple[Pool, ...]) -> ProcessGroups:
    return ProcessGroups(name, kind, pools, Layout(("rank",), (sum(pool.size for pool in pools),)), ("rank",))
