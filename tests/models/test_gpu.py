"""bfloat16 on a CUDA device: the flash kernel and the head against float64 on the same numbers."""

import pytest
import torch
from torch import Tensor

from spmd_rl.models.attention import packed_attention
from spmd_rl.models.logprobs import token_logprobs
from spmd_rl.models.packing import Packing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (9, 3)])
def test_varlen_attention(heads: int, kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [5, 130, 64, 1, 33]
    packing = Packing.pack(lengths, device="cuda")
    shape = [(1, n, packing.total, 64) for n in (heads, kv_heads, kv_heads)]
    start = [torch.randn(s, device="cuda").bfloat16() for s in shape]
    weight = torch.randn(1, packing.total, heads, 64, device="cuda")
    results = []
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        qkv = [x.to(dtype, copy=True).requires_grad_() for x in start]
        out, _ = packed_attention(torch.nn.Module(), *qkv, None, sliding_window=window, packing=packing)
        (out * weight).sum().backward()
        results.append([out.detach(), *(x.grad for x in qkv)])
    exact, half, single = results
    assert max(relative(h, e) for h, e in zip(half, exact, strict=True)) < 1e-2
    assert max(relative(s, e) for s, e in zip(single, exact, strict=True)) < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_head(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda").to(dtype)
    weight = (torch.randn(1003, 64, device="cuda") * 0.2).to(dtype)
    targets = torch.randint(0, 1003, (300,), device="cuda")
    of = torch.randn(3, 300, device="cuda")
    results = []
    for h, w in ((hidden.double(), weight.double()), (hidden, weight)):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        stats = token_logprobs(h, w, targets, 0.7, chunk=128, entropy=True, sum_pi_squared=True)
        sum((o * s).sum() for o, s in zip(of, stats, strict=True)).backward()
        results.append([*(s.detach() for s in stats), h.grad, w.grad])
    assert max(relative(got, exact) for exact, got in zip(*results, strict=True)) < tolerance
