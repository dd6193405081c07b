"""Random weights that depend on the seed and the parameter's name only, never on the number of ranks.

A tensor is drawn in blocks of rows, each from a generator of its own, so that a rank draws just the rows it holds.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from spmd_rl.models.names import exports

BLOCK = 1 << 18
"""Numbers (about) in one block. A part of the definition: another value gives other weights."""


def random_region(name: str, shape: Sequence[int], region: Sequence[slice], seed: int, std: float) -> Tensor:
    """The region of a parameter's random start, float32.

    Norms start at 1, biases and an adapter's B at 0, an adapter's A uniform in ±1/sqrt(in), the rest normal with `std`.
    """
    sizes = [len(range(*r.indices(n))) for r, n in zip(region, shape, strict=True)]
    if name.endswith("bias") or ".lora_B." in name:
        return torch.zeros(sizes)
    if len(shape) < 2:
        return torch.ones(sizes)
    start, stop, _ = region[0].indices(shape[0])
    rows = max(1, BLOCK // math.prod(shape[1:]))
    blocks = [_block(name, i, [rows, *shape[1:]], seed, std) for i in range(start // rows, -(-stop // rows))]
    if not blocks:
        return torch.empty(sizes)
    first = start // rows * rows
    return torch.cat(blocks)[(slice(start - first, stop - first), *region[1:])]


def _block(name: str, index: int, shape: Sequence[int], seed: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if ".lora_A." in name:
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(*shape).uniform_(-bound, bound, generator=generator)
    return torch.empty(*shape).normal_(0.0, std, generator=generator)


def random_tensors(hf_config: PretrainedConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a random checkpoint, by checkpoint name."""
    from spmd_rl.models.loading import build_meta

    model = build_meta(hf_config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for export in exports(model):
        sources = [
            random_region(s, shapes[s], [slice(0, n) for n in shapes[s]], seed, hf_config.initializer_range)
            for s in export.sources
        ]
        yield export.name, export.make(sources)
