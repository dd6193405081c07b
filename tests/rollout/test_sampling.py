"""Drawing one token: the noise, and what temperature, top-k and top-p leave of the distribution."""

import math

import pytest
import torch
from torch import Tensor

from spmd_rl.rollout.sampling import SamplingParams, gumbel, process, row_keys, sample

VOCAB = 12


def logits() -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5


def draws(params: SamplingParams, count: int = 20_000) -> tuple[Tensor, Tensor]:
    """`count` tokens from one distribution, each row another sample of one prompt."""
    keys = row_keys(0, 1, torch.zeros(count, dtype=torch.int64), torch.arange(count))
    return sample(logits().expand(count, VOCAB), params, keys, torch.zeros(count, dtype=torch.int64), 4096)


def chi_square(observed: Tensor, expected: Tensor) -> tuple[float, float]:
    """The statistic over what may occur, and a bound that chance passes once in 30,000 times."""
    there = expected > 0
    degrees = int(there.sum()) - 1
    statistic = ((observed - expected).square() / expected)[there].sum().item()
    return statistic, degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson-Hilferty


def expected_probabilities(temperature: float, top_k: int, top_p: float) -> Tensor:
    """By the definition, token by token."""
    p = (logits().double() / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k > 0 else order
    mass, nucleus = 0.0, []
    whole = sum(p[i].item() for i in kept)
    for i in kept:
        if mass / whole < top_p:
            nucleus.append(i)
        mass += p[i].item()
    out = torch.zeros_like(p)
    out[nucleus] = p[nucleus]
    return out / out.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.5, 4, 1.0), (1.0, -1, 0.6), (1.3, 6, 0.8), (1.0, 100, 0.01)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    p = expected_probabilities(temperature, top_k, top_p)
    tokens, log_probs = draws(SamplingParams(temperature, top_p, top_k))
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    assert observed[p == 0].sum() == 0
    if (p > 0).sum() > 1:
        statistic, bound = chi_square(observed, p * len(tokens))
        assert statistic < bound
    assert torch.allclose(log_probs.double(), p.log()[tokens], atol=1e-5)


def test_greedy_is_the_likeliest_token_under_the_plain_distribution() -> None:
    tokens, log_probs = draws(SamplingParams(temperature=0.0), 10)
    assert tokens.tolist() == [int(logits().argmax())] * 10
    assert torch.allclose(log_probs, logits().log_softmax(-1).max().expand(10))


def test_equal_logits_at_the_edge_of_top_k_are_all_kept_or_cut_alike() -> None:
    flat = process(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), SamplingParams(top_k=2))
    assert flat.tolist() == [[2.0, 1.0, 1.0, -math.inf]]


def test_noise_is_gumbel_and_independent_of_its_neighbours() -> None:
    rows, vocab = 400, 1000
    keys = row_keys(3, 7, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    noise = gumbel(keys, torch.zeros(rows, dtype=torch.int64), vocab).double()
    n = noise.numel()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * n)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    uniform = (-(-noise).exp()).exp().flatten().sort().values
    gap = (uniform - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert gap < 2.2 / math.sqrt(n)  # Kolmogorov-Smirnov, once in 8,000 times
    others = {
        "next position": gumbel(keys, torch.ones(rows, dtype=torch.int64), vocab),
        "next prompt": gumbel(keys.roll(1), torch.zeros(rows, dtype=torch.int64), vocab),
        "next sample": gumbel(
            row_keys(3, 7, torch.arange(rows), torch.ones(rows, dtype=torch.int64)), 0 * torch.arange(rows), vocab
        ),
        "next token": noise.roll(1, dims=1),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([noise.flatten(), other.double().flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(n), name


def test_every_part_of_the_key_counts() -> None:
    uid, sample_ = torch.tensor([5]), torch.tensor([2])
    keys = {
        "itself": row_keys(1, 2, uid, sample_),
        "seed": row_keys(2, 2, uid, sample_),
        "step": row_keys(1, 3, uid, sample_),
        "validation": row_keys(1, -1, uid, sample_),
        "uid": row_keys(1, 2, uid + 1, sample_),
        "a far uid": row_keys(1, 2, uid + (1 << 40), sample_),
        "sample": row_keys(1, 2, uid, sample_ + 1),
        "swapped": row_keys(1, 2, sample_, uid),
    }
    assert len({key.item() for key in keys.values()}) == len(keys)
    many = row_keys(0, 0, torch.arange(1000).repeat_interleave(100), torch.arange(100).repeat(1000))
    assert len(many.unique()) == len(many)
    shifted = gumbel(keys["itself"], torch.tensor([1]), 50), gumbel(keys["itself"], torch.tensor([1 << 20]), 50)
    assert not torch.equal(*shifted)


def test_rows_at_once_change_nothing() -> None:
    keys = row_keys(0, 1, torch.arange(50), torch.zeros(50, dtype=torch.int64))
    rows = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(1))
    params, at = SamplingParams(top_p=0.9, top_k=8), torch.arange(50)
    whole = sample(rows, params, keys, at, 50)
    for some in (1, 7, None):
        assert all(torch.equal(a, b) for a, b in zip(whole, sample(rows, params, keys, at, some), strict=True))
