"""The chunked head against plain log_softmax: values and gradients."""

import pytest
import torch
from torch import Tensor

from spmd_rl.models.logprobs import token_logprobs

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    p = logp.exp()
    return logp.gather(-1, targets[:, None])[:, 0], -(p * logp).sum(-1), (p * p).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("outputs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_values_and_gradients_equal_plain(dtype: torch.dtype, chunk: int, outputs: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, dtype=dtype)
    weight = torch.randn(50, 16, dtype=dtype)
    targets = torch.randint(0, 50, (23,))
    weights = torch.randn(3, 23, dtype=dtype)
    results = []
    for fn in (
        lambda h, w: plain(h, w, targets, 0.7),
        lambda h, w: token_logprobs(h, w, targets, 0.7, chunk=chunk, entropy=True, sum_pi_squared=True),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = fn(h, w)
        sum((weights[i] * values[i]).sum() for i in range(3) if outputs[i]).backward()
        results.append([*values, h.grad, w.grad])
    for expected, got in zip(*results, strict=True):
        scale = max(1.0, float(expected.detach().abs().max()))
        assert float((expected - got).detach().abs().max()) <= TOLERANCE[dtype] * scale


def test_optional_outputs_are_left_out() -> None:
    stats = token_logprobs(torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]))
    assert stats.entropy is None
    assert stats.sum_pi_squared is None


def test_no_tokens_still_back_propagate() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    token_logprobs(hidden, weight, torch.empty(0, dtype=torch.int64), entropy=True).logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_gradient_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    targets = torch.randint(0, 11, (256,))
    grads = []
    for chunk in (1, 256):
        w = weight.clone().requires_grad_()
        stats = token_logprobs(hidden, w, targets, chunk=chunk)
        assert stats.logprobs.dtype == torch.float32
        stats.logprobs.sum().backward()
        grads.append(w.grad.float())
    assert torch.allclose(*grads, rtol=0.02, atol=0.2)


@pytest.mark.parametrize(("temperature", "chunk", "tokens"), [(0.0, 8, 3), (1.0, 0, 3), (1.0, 8, 2)])
def test_nonsense_is_refused(temperature: float, chunk: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="token_logprobs"):
        token_logprobs(
            torch.randn(3, 4), torch.randn(5, 4), torch.zeros(tokens, dtype=torch.int64), temperature, chunk=chunk
        )
