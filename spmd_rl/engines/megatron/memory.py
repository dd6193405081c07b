"""What an engine holds on its device: what may leave it, and gradient buffers that are there for an update only."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from spmd_rl.engines.host_pool import bytes_of, distinct_storages
from spmd_rl.engines.megatron.optimizer import ShardedAdam


class Memory:
    """Storages are emptied and filled in place, so that views into buffers stay views."""

    def __init__(self, chunks: list[nn.Module], optimizer: ShardedAdam | None) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def resident(self, piece: str) -> list[Tensor]:
        """The tensors of `params`, or of `optimizer` (master weights and moments)."""
        assert piece in ("params", "optimizer"), piece
        return [p.data for p in self._parameters()] if piece == "params" else self._states()

    def gradients(self, wanted: bool) -> None:
        """Have gradient buffers, full of noughts, or none: between updates nobody needs them."""
        if not wanted:
            storages = distinct_storages(self._gradients())
            self._emptied += [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)
            return
        for storage, size in self._emptied:
            storage.resize_(size)
            bytes_of(storage).zero_()
        self._emptied = []

    def _gradients(self) -> Iterable[Tensor]:
        return (p.main_grad for p in self._parameters() if hasattr(p, "main_grad"))  # type: ignore[misc]

    def _parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def _states(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        masters = [s.master for s in self.optimizer.shares if s.master.dtype != s.tensor.dtype]
        return [*masters, *(m for state in self.optimizer.adam.state.values() for m in state.values() if m.ndim)]
