"""Many slices copied at once, with a checksum of each.

The checksum of a slice of N elements is sum_i (bits_i + 1) · w(i) mod 2^32, w(i) = (i · 2654435761 + 2654435769) | 1:
it depends on every value and on its place, and not on the order of summing, so it is the same on every run. Both ends
compute it from the bits as they lie in the destination's dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MULTIPLIER = 2654435761
INCREMENT = 2654435769
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Copies:
    """A fixed list of (destination, source) views of equal shapes; dtypes may differ."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            assert target.shape == source.shape, f"{tuple(target.shape)} is not {tuple(source.shape)}"
        self.targets = [target for target, _ in pairs]
        self.sources = [source for _, source in pairs]
        self.device = self.targets[0].device if pairs else torch.device("cpu")
        self._kernel = None
        if self.device.type == "cuda":
            from spmd_rl.weights.copy_kernels import CopyTable

            self._kernel = CopyTable(self.targets, self.sources)

    def __len__(self) -> int:
        return len(self.targets)

    def run(self) -> Tensor:
        """Copy everything; the sources' checksums as they arrive in the destinations' dtype, int32 [pairs]."""
        if not self.targets:
            return torch.zeros(0, dtype=torch.int32, device=self.device)
        if self._kernel is not None:
            return self._kernel.run()
        sums = torch.stack([checksum(s.to(t.dtype)) for t, s in zip(self.targets, self.sources, strict=True)])
        torch._foreach_copy_(self.targets, self.sources)
        return sums

    def sums(self) -> Tensor:
        """The checksums of what lies in the destinations now, int32 [pairs]."""
        if not self.targets:
            return torch.zeros(0, dtype=torch.int32, device=self.device)
        if self._kernel is not None:
            return self._kernel.sums()
        return torch.stack([checksum(target) for target in self.targets])


def checksum(x: Tensor) -> Tensor:
    """The checksum of one tensor, as a scalar int32."""
    width = x.element_size()
    bits = x.contiguous().view(_INTEGER[width]).flatten().to(torch.int64) & ((1 << 8 * width) - 1)
    place = torch.arange(bits.numel(), dtype=torch.int64, device=x.device)
    weight = (place * MULTIPLIER + INCREMENT & 0xFFFFFFFF) | 1
    total = ((bits + 1 & 0xFFFFFFFF) * weight & 0xFFFFFFFF).sum() & 0xFFFFFFFF
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
