"""Time and peak memory of the chunked head and of plain log_softmax: python -m benchmarks.head [tokens hidden vocab]"""

import sys
import time

import torch
from torch import Tensor

from spmd_rl.models.logprobs import token_logprobs


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).float().log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def measure(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, entropy: bool) -> None:
    def forward() -> Tensor:
        if chunk == 0:
            return plain(hidden, weight, targets)[0]
        stats = token_logprobs(hidden, weight, targets, chunk=chunk, entropy=entropy)
        return stats.logprobs

    def both() -> None:
        forward().sum().backward()

    cuda = hidden.is_cuda
    line = f"{name:<34}"
    for fn in (forward, both):
        times = []
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            start = time.perf_counter()
            fn()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = f", {torch.cuda.max_memory_allocated() / 2**30:5.1f} GiB" if cuda else ""
        line += f"  {fn.__name__}: {min(times) * 1e3:8.1f} ms{peak}"
    print(line, flush=True)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, width, vocab = map(
        int, sys.argv[1:4] or ((16384, 1024, 151936) if device == "cuda" else (1024, 576, 49152))
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, width, device=device) / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    print(f"{tokens} tokens, hidden {width}, vocabulary {vocab}, {dtype}, {device}")
    measure("plain (with entropy)", hidden, weight, targets, 0, True)
    for chunk in (256, 1024, 4096):
        measure(f"chunk {chunk}", hidden, weight, targets, chunk, False)
        measure(f"chunk {chunk} with entropy", hidden, weight, targets, chunk, True)


if __name__ == "__main__":
    main()
