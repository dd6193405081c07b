"""What a rank holds of a model: boxes of checkpoint tensors, each with the view of local memory that it lies in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from spmd_rl.models.names import exports

Index = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a checkpoint tensor: `name`[start : start + size], dim by dim."""

    name: str
    start: Index
    size: Index

    def overlap(self, other: "Box") -> "Box | None":
        """What both cover; None when that is nothing, or they are parts of different tensors."""
        if self.name != other.name:
            return None
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(end - at for at, end in zip(start, ends, strict=True))
        return Box(self.name, start, size) if all(n > 0 for n in size) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The index of this box in a view of `outer`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.size, strict=True))

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True))
        return f"{self.name}[{ranges}]"


@dataclass(frozen=True)
class Held:
    """A box, and the view (of the box's size) that holds it on this rank."""

    box: Box
    view: Tensor

    def part(self, box: Box) -> Tensor:
        """The view of a box inside this one."""
        return self.view[box.within(self.box)]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the checkpoint: its name and whole shape."""

    name: str
    shape: Index


def held_by(model: nn.Module) -> list[Held] | None:
    """The boxes of a plain or FSDP2-sharded model's parameters on this rank; None when a tensor of the checkpoint is
    computed (merged adapters) rather than lying somewhere. No communication.
    """
    parameters = dict(model.named_parameters())
    found: list[Held] = []
    for export in exports(model):
        if export.region is None:
            return None
        found += _held(export.name, parameters[export.sources[0]], export.region)
    return found


def specs_of(model: nn.Module) -> list[TensorSpec]:
    """Every tensor of the checkpoint, with its shape."""
    parameters = dict(model.named_parameters())
    made = (
        (e.name, e.make([torch.empty(parameters[s].shape, device="meta") for s in e.sources])) for e in exports(model)
    )
    return [TensorSpec(name, tuple(tensor.shape)) for name, tensor in made]


def _held(name: str, parameter: Tensor, region: tuple[slice | int, ...]) -> Iterator[Held]:
    """The part of `parameter`[region] that lies on this rank, as a box of the tensor that the region is."""
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    else:
        local, offset = parameter.detach(), (0,) * parameter.ndim
    index: list[slice | int] = []
    start: list[int] = []
    for dim, at in enumerate(offset):
        wanted = region[dim] if dim < len(region) else slice(None)
        have = range(at, at + local.shape[dim])
        if isinstance(wanted, int):
            if wanted not in have:
                return
            index.append(wanted - at)
            continue
        low, high, _ = wanted.indices(parameter.shape[dim])
        first, last = max(low, at), min(high, at + local.shape[dim])
        if first >= last:
            return
        index.append(slice(first - at, last - at))
        start.append(first - low)
    view = local.detach()[tuple(index)]
    yield Held(Box(name, tuple(start), tuple(view.shape)), view)


def covers(parts: Iterable[Box], whole: Sequence[TensorSpec]) -> list[str]:
    """Names of tensors of which some element lies in none of the (disjoint) `parts`."""
    left = {spec.name: torch.Size(spec.shape).numel() for spec in whole}
    for box in parts:
        left[box.name] -= torch.Size(box.size).numel()
    return [name for name, elements in left.items() if elements > 0]
