"""Keyed sampling as one Triton pass over the logits, where torch's operations need twenty.

Same draw as `sample` in sampling.py without top-k and top-p, for CUDA logits of 16 or 32 bits.
Shapes: B rows, S parts of the vocabulary that are worked on side by side, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def draw(logits_BV: Tensor, temperature: float, keys_B: Tensor, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B], log-probs float32 [B]) under softmax(logits / temperature); temperature 0 is greedy."""
    rows, vocab = logits_BV.shape
    parts = max(1, min(16, 1024 // max(rows, 1), triton.cdiv(vocab, BLOCK)))
    width = triton.cdiv(triton.cdiv(vocab, parts), BLOCK) * BLOCK
    parts = triton.cdiv(vocab, width)
    floats_4BS = torch.empty(4, rows, parts, device=logits_BV.device, dtype=torch.float32)
    tokens_BS = torch.empty(rows, parts, device=logits_BV.device, dtype=torch.int64)
    scale = 1.0 if temperature == 0 else 1 / temperature
    if rows:
        _draw_kernel[(rows, parts)](
            logits_BV, logits_BV.stride(0), keys_B, positions_B, floats_4BS, tokens_BS, rows * parts, vocab, width,
            scale, temperature != 0, BLOCK, num_warps=8,
        )  # fmt: skip
    best_BS, chosen_BS, top_BS, sum_BS = floats_4BS
    part_B = best_BS.argmax(-1, keepdim=True)
    top_B1 = top_BS.amax(-1, keepdim=True)
    lse_B = top_B1[:, 0] + (sum_BS * (top_BS - top_B1).exp()).sum(-1).log()
    return tokens_BS.gather(1, part_B)[:, 0], chosen_BS.gather(1, part_B)[:, 0] - lse_B


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """As `_mix32` in sampling.py."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits, stride, keys, positions, floats, tokens, cells, vocab, width, scale, NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """One program a row and part of the vocabulary: its best noisy logit, and its part of the logsumexp."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row)
    position = tl.load(positions + row).to(tl.int64)
    low = ((key & 0xFFFFFFFF) ^ ((position * 0x632BE5AB) & 0xFFFFFFFF)).to(tl.uint32)
    high = (((key >> 32) & 0xFFFFFFFF) + (position * 0x85157AF5)).to(tl.uint32)
    best_B = tl.full((BLOCK,), float("-inf"), tl.float32)
    plain_B = tl.full((BLOCK,), float("-inf"), tl.float32)
    which_B = tl.zeros((BLOCK,), tl.int32)
    top_B = tl.full((BLOCK,), -1.0e30, tl.float32)
    sum_B = tl.zeros((BLOCK,), tl.float32)
    for at in range(part * width, tl.minimum((part + 1) * width, vocab), BLOCK):
        v = at + tl.arange(0, BLOCK)
        mask = v < vocab
        z = tl.load(logits + row * stride + v, mask=mask, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(top_B, z)
        sum_B = sum_B * tl.exp(top_B - higher) + tl.where(mask, tl.exp(z - higher), 0.0)
        top_B = higher
        noisy = z
        if NOISE:
            x = _mix((v.to(tl.uint32) * 0x9E3779B9) ^ low)
            x = _mix(x ^ high)
            u = x.to(tl.int32, bitcast=True).to(tl.float32)
            u = (u + 0.5) * 2.3283064365386963e-10
            u = tl.where(u < 0, u + 1.0, u)
            u = tl.minimum(u, 1.0 - 5.9604644775390625e-08)
            series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))  # -log(1 - u) where u is small
            noisy = z - tl.log(tl.where(u < 0.0009765625, series, -tl.log(1.0 - u)))
        better = mask & (noisy > best_B)
        best_B = tl.where(better, noisy, best_B)
        plain_B = tl.where(better, z, plain_B)
        which_B = tl.where(better, v, which_B)
    best, lane = tl.max(best_B, axis=0, return_indices=True)
    mine = tl.arange(0, BLOCK) == lane
    top = tl.max(top_B, axis=0)
    cell = row * tl.num_programs(1) + part
    tl.store(floats + cell, best)
    tl.store(floats + cells + cell, tl.sum(tl.where(mine, plain_B, 0.0), axis=0))
    tl.store(floats + 2 * cells + cell, top)
    tl.store(floats + 3 * cells + cell, tl.sum(sum_B * tl.exp(top_B - top), axis=0))
    tl.store(tokens + cell, tl.sum(tl.where(mine, which_B, 0), axis=0).to(tl.int64))
