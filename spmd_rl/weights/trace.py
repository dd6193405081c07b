"""Which slices of which tensors a foreign loader copies where: recorded while it runs, not guessed from names.

The loader is handed tensors without memory (on the meta device) and watched: a copy from a view of one of them into a
parameter is noted, not made. What the loader does besides (padding filled with zeros …) happens. `prove` then lets it
load random values for real and compares, bit by bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_rl.weights.held import Box, Held, TensorSpec

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]
"""Takes (checkpoint name, tensor) pairs into its own parameters."""


class Untraceable(Exception):
    """The loader does something with a tensor that is not a copy of a slice of it."""


def trace(load: Load, specs: Sequence[TensorSpec], parameters: Mapping[str, Tensor]) -> list[Held]:
    """The boxes that `load` puts into `parameters`, in the order of its copies.

    Raises Untraceable where a tensor is transformed on its way, a copy goes elsewhere than into a parameter, or nothing
    goes into one: it would keep what it started with.
    """
    sources = {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}
    watch = _Watch(sources, parameters)
    with torch.no_grad(), watch:
        load(iter(sources.items()))
    filled = {_storage(held.view) for held in watch.found}
    left = [name for name, parameter in parameters.items() if _storage(parameter) not in filled]
    if left:
        raise Untraceable(f"{left[0]}: the loader puts nothing into it")
    return watch.found


_SAME_VALUES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


class _Watch(TorchDispatchMode):
    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {_storage(t): (name, t) for name, t in sources.items()}
        self.homes = {_storage(p) for p in parameters.values()}
        self.found: list[Held] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._ours(args[1]):
            self._note(args[0], args[1])
            return args[0]
        if func in _SAME_VALUES and self._ours(args[0]):
            return args[0].detach()  # another device, dtype or memory: the copy into the parameter does that
        if args and self._ours(args[0]) and func._schema.is_mutable:
            raise Untraceable(f"{self.names[_storage(args[0])][0]}: the loader computes {func} in it")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_meta and not self._ours(out):
            touched = [self.names[_storage(a)][0] for a in args if isinstance(a, Tensor) and self._ours(a)]
            if touched:
                raise Untraceable(f"{touched[0]}: the loader computes {func} of it")
        return out

    def _ours(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_meta and _storage(x) in self.names

    def _note(self, target: Tensor, view: Tensor) -> None:
        name, whole = self.names[_storage(view)]
        if _storage(target) not in self.homes:
            raise Untraceable(f"{name}: the loader copies it into something that is no parameter")
        if target.shape != view.shape:
            raise Untraceable(f"{name}: {tuple(view.shape)} is spread over {tuple(target.shape)}")
        start = _start(view, whole)
        if start is None:
            raise Untraceable(f"{name}: the loader reads it with strides {view.stride()}, not as a slice")
        size = tuple(view.shape)
        if view.ndim != whole.ndim:
            raise Untraceable(f"{name}: {whole.ndim} dims are read as {view.ndim}")
        self.found.append(Held(Box(name, start, size), target.detach()))


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _start(view: Tensor, whole: Tensor) -> tuple[int, ...] | None:
    """Where in `whole` a view of it begins; None when the view is not a box of it."""
    strides = whole.stride()
    if view.ndim == whole.ndim and any(
        a != b for a, b, n in zip(view.stride(), strides, view.shape, strict=True) if n > 1
    ):
        return None
    offset, start = view.storage_offset(), []
    for stride in strides:
        start.append(offset // stride if stride else 0)
        offset -= start[-1] * stride
    return tuple(start)


def prove(load: Load, specs: Sequence[TensorSpec], found: Sequence[Held], seed: int = 0) -> None:
    """Let `load` load random values, one tensor at a time, and compare every traced slice with them, bit by bit.

    Raises Untraceable naming the first slice that differs (or that a later copy overwrote).
    """
    by_name: dict[str, list[Held]] = {}
    for held in found:
        by_name.setdefault(held.box.name, []).append(held)
    generators: dict[torch.device, torch.Generator] = {}

    def drawn() -> Iterator[tuple[str, Tensor]]:
        for spec in specs:
            places = by_name.get(spec.name)
            if not places:
                yield spec.name, torch.zeros(spec.shape)
                continue
            like = places[0].view
            generator = generators.setdefault(like.device, torch.Generator(like.device).manual_seed(seed))
            values = torch.randn(spec.shape, generator=generator, device=like.device).to(like.dtype)
            yield spec.name, values
            for held in places:
                whole = Box(spec.name, (0,) * len(spec.shape), spec.shape)
                if not torch.equal(held.view, values[held.box.within(whole)].to(held.view.dtype)):
                    raise Untraceable(f"{held.box}: the loader put something else there than what was traced")

    with torch.no_grad():
        load(drawn())
