"""Parameters and optimizer leave the device and come back in place: views into the buffers stay what they are."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from spmd_rl.engines.megatron.optimizer import ShardedAdam

Storage = torch.UntypedStorage


class Memory:
    """What an engine holds on its device, and where it is now."""

    def __init__(self, chunks: list[nn.Module], optimizer: ShardedAdam | None) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self._away: dict[int, tuple[Storage, Storage | None, int]] = {}

    def move(self, piece: str, to_host: bool) -> int:
        """Move `params`, or `optimizer` (master weights, moments and gradients); bytes moved.

        Gradients are let go and come back as noughts: an update starts from those.
        """
        if piece == "params":
            kept, dropped = [p.data for p in self._parameters()], list[Tensor]()
        else:
            assert piece == "optimizer", piece
            kept, dropped = self._states(), self._gradients()
        if to_host:
            return sum(self._leave(s, keep=True) for s in _distinct(kept)) + sum(
                self._leave(s, keep=False) for s in _distinct(dropped)
            )
        return sum(self._come_back(s) for s in [*_distinct(kept), *_distinct(dropped)])

    def _leave(self, storage: Storage, keep: bool) -> int:
        size = storage.nbytes()
        if id_of(storage) in self._away or not size:
            return 0
        copy = None
        if keep:
            copy = Storage(size).pin_memory() if storage.device.type == "cuda" else Storage(size)
            copy.copy_(storage)
        self._away[id_of(storage)] = (storage, copy, size)
        storage.resize_(0)
        return size

    def _come_back(self, storage: Storage) -> int:
        if id_of(storage) not in self._away:
            return 0
        _, copy, size = self._away.pop(id_of(storage))
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
        moments = [m for state in self.optimizer.adam.state.values() for m in state.values() if m.ndim]
        return [*masters, *moments]

    def _gradients(self) -> list[Tensor]:
        return [p.main_grad for p in self._parameters() if hasattr(p, "main_grad")]  # type: ignore[misc]


def id_of(storage: Storage) -> int:
    """One number for a storage, however many objects stand for it."""
    return int(storage._cdata)


def _distinct(tensors: Iterable[Tensor]) -> list[Storage]:
    return list({id_of(s): s for s in (t.untyped_storage() for t in tensors)}.values())
