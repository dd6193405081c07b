"""Run in a process of its own with TRITON_INTERPRET=1: the Triton kernels on a CPU, against torch. Prints `good`."""

import torch

from spmd_rl.rollout import sample_kernels
from spmd_rl.rollout.sampling import SamplingParams, row_keys, sample
from spmd_rl.weights.copies import checksum
from spmd_rl.weights.copy_kernels import CopyTable


def copies() -> None:
    """Whole, strided, long, transposed and empty slices; the interpreter rounds to bfloat16 its own way: float16."""
    pairs = [
        (torch.zeros(3, 4000, dtype=torch.float16), torch.randn(3, 4000)),
        (torch.zeros(40, 600)[:, 100:500], torch.randn(40, 400)),
        (torch.zeros(20000), torch.randn(20000)),
        (torch.zeros(40, 6), torch.randn(6, 40).t()),
        (torch.zeros(3, 40, 64)[:, 5:20], torch.randn(3, 15, 64)),
        (torch.zeros(5), torch.randn(5)),
    ]
    table = CopyTable([target for target, _ in pairs], [source for _, source in pairs])
    assert table.odd == [3], "only the transposed slice has no runs"
    sums = table.run()
    for target, source in pairs:
        assert torch.equal(target, source.to(target.dtype)), tuple(target.shape)
    assert torch.equal(sums, table.sums())
    assert torch.equal(sums, torch.stack([checksum(target) for target, _ in pairs]))
    pairs[1][0][7, 3] += 1
    assert (table.sums() != sums).tolist() == [False, True, False, False, False, False]


def draws() -> None:
    rows, vocab = 5, 5003
    logits = torch.randn(rows, vocab + 13)[:, :vocab]
    keys = row_keys(0, 1, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    for temperature in (1.0, 0.7, 0.0):
        tokens, log_probs = sample_kernels.draw(logits, temperature, keys, torch.arange(rows) * 7)
        wanted = sample(logits, SamplingParams(temperature=temperature), keys, torch.arange(rows) * 7, rows_at_once=8)
        assert tokens.tolist() == wanted[0].tolist(), temperature
        assert torch.allclose(log_probs, wanted[1], atol=1e-5), temperature


if __name__ == "__main__":
    torch.manual_seed(0)
    copies()
    draws()
    print("good")
