"""Where megatron-core says "cuda" whatever the device: on a rank without CUDA those words mean the CPU.

`on_device()` surrounds every call into megatron-core. With CUDA it does nothing at all; without, it is in force inside
the block only, so that the rest of the process (and its users) see torch as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from spmd_rl.runtime import mcore


def on_device(device: torch.device) -> Any:
    """A context in which megatron-core runs on `device`."""
    return nullcontext() if device.type == "cuda" else _on_cpu()


@contextmanager
def _on_cpu() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_CudaMeansCpu())
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),  # used as `device=` only
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "current_stream", lambda *_: _Stream()),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "stream", lambda *_: nullcontext()),
            (dist, "all_gather", _all_gather),
            (dist, "reduce_scatter", _reduce_scatter),
            (mcore.token_dispatcher, "maybe_move_tensor_to_cpu", _as_is),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` makes a CPU tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


class _Stream:
    """A stream, and an event on it: everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self


def _as_is(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes become numpy only when they come from a GPU, but they must."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


# Experts' tokens differ in number between ranks. NCCL gathers and scatters uneven parts; gloo does not.

_even_all_gather = dist.all_gather


def _all_gather(outputs: list[Tensor], x: Tensor, group: ProcessGroup) -> None:
    rows = [len(out) for out in outputs]
    if len(set(rows)) == 1:
        _even_all_gather(outputs, x, group=group)
        return
    padded = x.new_zeros(max(rows), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in rows]
    _even_all_gather(parts, padded, group=group)
    for out, part in zip(outputs, parts, strict=True):
        out.copy_(part[: len(out)])


def _reduce_scatter(output: Tensor, parts: list[Tensor], group: ProcessGroup) -> None:
    total = torch.cat(parts)
    dist.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in parts])[group.rank()])
