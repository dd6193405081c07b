"""The only code that creates process groups: the pool's default group, then one group an axis, in plan order.

A pool is its ranks' whole world (law 4 of the design): `init_process_group` runs over the pool alone, on a store
that all ranks of the job share under the pool's prefix, so FSDP, DCP and vLLM work inside it unmodified.
Groups that reach beyond a pool (bridges, control) stand beside torch's world: it does not know them, so whoever takes
the pool's world down (vLLM does, at its end) leaves them standing.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.topology.layout import Layout


def job_store(timeout_s: float) -> Store:
    """Where all ranks of the job can leave words for each other, before there are groups."""
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    return store


def start_pool(store: Store, pool: str, pool_rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Make the pool's default group: gloo for CPU tensors, NCCL for CUDA ones."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"pool/{pool}", store),
        rank=pool_rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def join(
    store: Store, name: str, rank: int, size: int, device: torch.device, timeout_s: float, *, nccl: bool
) -> ProcessGroup:
    """A group across pools, in which this rank is `rank`: gloo for CPU tensors and, with `nccl`, NCCL for CUDA ones.

    Use `group_src`, `group_dst` and the group's own `rank()` and `size()` with it: it has no global ranks.
    """
    prefix, timeout = dist.PrefixStore(f"{name}/", store), timedelta(seconds=timeout_s)
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(prefix, rank, size)
    group._set_default_backend(kinds.NCCL if nccl else kinds.GLOO)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", prefix), rank, size, timeout)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_group_name(name)  # type: ignore[arg-type]
    if nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", prefix), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, backend)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # connect: later calls are made by some ranks only
    return group


class ProcessGroups:
    """The process groups of one pool, each set of ranks made once, in the order in which they are registered.

    Every rank of the pool must register the same layouts in the same order (it does: they come from the plan).
    """

    def __init__(self, pool_rank: int, size: int, device_type: str) -> None:
        self.pool_rank = pool_rank
        self.size = size
        self.device_type = device_type
        self._by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
        self._alone: ProcessGroup | None = None
        self._meshes: dict[Layout, DeviceMesh] = {}
        self.register(Layout(("pool",), (size,)), "pool")

    def register(self, layout: Layout, *axes: str) -> None:
        """Make the groups along `axes` (jointly), all of them, on every rank."""
        for ranks in layout.groups(*axes).tolist():
            self._make(tuple(ranks))

    def _make(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._by_ranks:
            return
        whole = ranks == tuple(range(self.size))
        group = dist.group.WORLD if whole else dist.new_group(list(ranks))
        assert group is not None
        self._by_ranks[ranks] = group

    def along(self, layout: Layout, *axes: str) -> ProcessGroup:
        """This rank's group along `axes`; registered before, unless it is the rank alone (an axis of size 1)."""
        ranks = layout.group_of(self.pool_rank, *axes)
        return self.alone() if ranks == (self.pool_rank,) and self.size > 1 else self._by_ranks[ranks]

    def alone(self) -> ProcessGroup:
        """A group of this rank only. Nobody else takes part in making it."""
        if self._alone is None:
            group = dist.new_group([self.pool_rank], use_local_synchronization=True)
            assert isinstance(group, ProcessGroup)
            self._alone = group
        return self._alone

    def control(self) -> ProcessGroup:
        """A gloo group over the pool, beside its default one."""
        group = dist.new_group(list(range(self.size)), backend="gloo")
        assert isinstance(group, ProcessGroup)
        return group

    def mesh(self, layout: Layout) -> DeviceMesh:
        """The layout as a DeviceMesh over the registered groups of its axes."""
        if layout not in self._meshes:
            groups = [self.along(layout, name) for name in layout.names]
            ranks = torch.arange(layout.size).reshape(layout.sizes)
            self._meshes[layout] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                self.device_type,
                mesh=ranks,
                mesh_dim_names=layout.names,
            )
        return self._meshes[layout]

    def members(self) -> Sequence[tuple[int, ...]]:
        """The rank sets of all groups made, in order (what `spmd-rl plan --verify` compares)."""
        return list(self._by_ranks)
