"""The reverse KL to a teacher against its definition, whole and over the teacher's likeliest tokens."""

import pytest
import torch
from torch import Tensor

from spmd_rl.models.distill import likeliest, reverse_kl

T, H, V, K = 7, 5, 11, 4


def parts(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student's hidden states and head, and the teacher's."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*s, generator=g, dtype=torch.float64) for s in ((T, H), (V, H), (T, H), (V, H)))  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_whole_kl_and_its_gradient(chunk: int, temperature: float) -> None:
    hidden, head, theirs, their_head = parts()
    ids, log_probs = likeliest(theirs, their_head, -1, temperature, chunk)
    leaves = [x.clone().requires_grad_() for x in (hidden, head)]
    again = [x.clone().requires_grad_() for x in (hidden, head)]
    found = reverse_kl(leaves[0], leaves[1], ids, log_probs, temperature, chunk)
    p = torch.log_softmax(again[0] @ again[1].T / temperature, -1)
    expected = torch.nn.functional.kl_div(log_probs.double(), p, log_target=True, reduction="none").sum(-1)
    weights = torch.arange(1.0, T + 1, dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(found, expected, atol=1e-6)
    for mine, true in zip(leaves, again, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert torch.allclose(mine.grad, true.grad, atol=1e-6)


def test_the_likeliest_tokens_and_all_others_as_one() -> None:
    hidden, head, theirs, their_head = parts(1)
    ids, log_probs = likeliest(theirs, their_head, K)
    found = reverse_kl(hidden, head, ids, log_probs)
    p, q = (torch.softmax(h @ w.T, -1) for h, w in ((hidden, head), (theirs, their_head)))
    for t in range(T):
        top = q[t].topk(K).indices.tolist()
        assert sorted(top) == sorted(ids[t].tolist())
        pairs = [(float(p[t, v]), float(q[t, v])) for v in top]
        pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
        expected = sum(a * (torch.tensor(a).log() - torch.tensor(b).log()).item() for a, b in pairs)
        assert found[t].item() == pytest.approx(expected, abs=1e-5)
        whole = float((p[t] * (p[t].log() - q[t].log())).sum())
        assert -1e-9 <= found[t].item() <= whole + 1e-6


def test_no_tokens() -> None:
    _, head, _, their_head = parts()
    ids, log_probs = likeliest(torch.empty(0, H, dtype=torch.float64), their_head, K)
    assert ids.shape == log_probs.shape == (0, K)
    assert reverse_kl(torch.empty(0, H, dtype=torch.float64), head, ids, log_probs).shape == (0,)
