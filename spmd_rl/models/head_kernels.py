"""Triton kernels of the chunked head: one pass over the logits each, where torch's operations need eight.

Same functions as in logprobs.py, for CUDA tensors of 16 or 32 bits; sums are float32.
Shapes: C tokens of a chunk, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def chunk_stats(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, want_entropy: bool, want_squares: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(logsumexp, log-prob of the target, entropy, sum of p^2) under softmax(logits / temperature), [C] each."""
    tokens, vocab = logits_CV.shape
    out_4C = torch.empty(4, tokens, device=logits_CV.device, dtype=torch.float32)
    if tokens:
        _stats_kernel[(tokens,)](
            logits_CV, targets_C, out_4C, tokens, vocab, 1 / temperature, want_entropy, want_squares, BLOCK, num_warps=8
        )
    lse_C, logprobs_C, entropy_C, squares_C = out_4C
    return lse_C, logprobs_C, entropy_C if want_entropy else None, squares_C if want_squares else None


def chunk_gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    lse_C: Tensor,
    of_logprob_C: Tensor | None,
    of_entropy_C: Tensor | None,
    entropy_C: Tensor | None,
    of_squares_C: Tensor | None,
    squares_C: Tensor | None,
) -> Tensor:
    """Gradient with respect to the logits, [C, V], written over them; see logprobs.py for the formulas."""
    tokens, vocab = logits_CV.shape
    given = [None if x is None else x.contiguous() for x in (of_logprob_C, of_entropy_C, of_squares_C)]
    if tokens:
        _gradient_kernel[(tokens, triton.cdiv(vocab, BLOCK))](
            logits_CV, targets_C, lse_C, entropy_C, squares_C, *given, vocab, 1 / temperature,
            *(x is not None for x in given), BLOCK, num_warps=8,
        )  # fmt: skip
    return logits_CV


@triton.jit
def _stats_kernel(  # type: ignore[no-untyped-def]
    logits, targets, out, tokens, vocab, scale, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr
) -> Any:
    """One program a token: a running maximum, and sums relative to it of e^z, of e^z z and of e^2z."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab
    top = -1.0e30
    total = 0.0
    weighted = 0.0
    squared = 0.0
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        z = tl.load(start + column, mask=inside, other=0.0).to(tl.float32) * scale
        z = tl.where(inside, z, -1.0e30)
        new_top = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - new_top)
        e = tl.exp(z - new_top)
        if ENTROPY:
            weighted = shrink * (weighted + total * (top - new_top)) + tl.sum(e * tl.where(inside, z - new_top, 0.0), 0)
        if SQUARES:
            squared = shrink * shrink * squared + tl.sum(e * e, 0)
        total = shrink * total + tl.sum(e, 0)
        top = new_top
    lse = top + tl.log(total)
    target = tl.load(start + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(out + row, lse)
    tl.store(out + tokens + row, target - lse)
    if ENTROPY:
        tl.store(out + 2 * tokens + row, tl.log(total) - weighted / total)
    if SQUARES:
        tl.store(out + 3 * tokens + row, squared / (total * total))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, targets, lse, entropy, squares, of_logprob, of_entropy, of_squares, vocab, scale,
    LOGPROB: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """One program a token and block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    place = logits + row * vocab + column
    logp = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(lse + row)
    p = tl.exp(logp)
    factor = tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        factor -= tl.load(of_entropy + row) * (logp + tl.load(entropy + row))
    if SQUARES:
        factor += 2 * tl.load(of_squares + row) * (p - tl.load(squares + row))
    if LOGPROB:
        factor -= tl.load(of_logprob + row)
    d = p * factor
    if LOGPROB:
        d += tl.where(column == tl.load(targets + row), tl.load(of_logprob + row), 0.0)
    tl.store(place, (d * scale).to(logits.dtype.element_ty), mask=inside)
