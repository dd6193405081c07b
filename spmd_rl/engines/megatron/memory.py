"""Parameters, optimizer and gradients leave the device and come back in place: views into buffers stay views."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from spmd_rl.engines.megatron.optimizer import ShardedAdam

Storage = torch.UntypedStorage


class Memory:
    """What an engine holds on its device, and where it is now."""

    def __init__(self, chunks: list[nn.Module], optimizer: ShardedAdam | None) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self._away: dict[int, tuple[Storage | None, int]] = {}

    def move(self, piece: str, to_host: bool) -> int:
        """Move `params`, or `optimizer` (master weights and moments); bytes moved."""
        assert piece in ("params", "optimizer"), piece
        moving = _distinct([p.data for p in self._parameters()] if piece == "params" else self._states())
        return sum(self._leave(s, keep=True) if to_host else self._come_back(s) for s in moving)

    def gradients(self, wanted: bool) -> None:
        """Have gradient buffers, full of noughts, or none: between updates nobody needs them."""
        for storage in _distinct(p.main_grad for p in self._parameters() if hasattr(p, "main_grad")):  # type: ignore[misc]
            if wanted:
                self._come_back(storage)
            else:
                self._leave(storage, keep=False)

    def _leave(self, storage: Storage, keep: bool) -> int:
        size = storage.nbytes()
        if not size:
            return 0
        copy = None
        if keep:
            copy = Storage(size).pin_memory() if storage.device.type == "cuda" else Storage(size)
            copy.copy_(storage)
        self._away[storage._cdata] = (copy, size)
        storage.resize_(0)
        return size

    def _come_back(self, storage: Storage) -> int:
        if storage._cdata not in self._away:
            return 0
        copy, size = self._away.pop(storage._cdata)
        storage.resize_(size)
        if copy is None:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        else:
            storage.copy_(copy)
        return size

    def _parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def _states(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        masters = [s.master for s in self.optimizer.shares if s.master.dtype != s.tensor.dtype]
        return [*masters, *(m for state in self.optimizer.adam.state.values() for m in state.values() if m.ndim)]


def _distinct(tensors: Iterable[Tensor]) -> list[Storage]:
    return list({s._cdata: s for s in (t.untyped_storage() for t in tensors)}.values())
