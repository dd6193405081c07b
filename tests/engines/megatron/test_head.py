"""Log-probs over a vocabulary cut over ranks, against float64: values, gradients, in float32 and bfloat16."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.world import Worlds

T, H, V, TEMPERATURE = 11, 16, 24, 0.7


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, H, generator=generator), torch.randn(V, H, generator=generator)
    return hidden, weight, torch.randint(0, V, (T,), generator=generator), torch.randn(3, T, generator=generator)


def on_ranks(dtype: str, chunk: int) -> dict[str, Any]:
    """Columns and gradients by this world of ranks, each with its part of the vocabulary."""
    from spmd_rl.engines.megatron.head import parallel_logprobs

    dist.init_process_group("gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        hidden, weight, targets, wanted = inputs()
        hidden, part = (
            hidden.to(getattr(torch, dtype)),
            weight.chunk(group.size())[group.rank()].to(getattr(torch, dtype)),
        )
        hidden, part = hidden.requires_grad_(), part.clone().requires_grad_()
        options = {"chunk": chunk, "entropy": True, "sum_pi_squared": True}
        stats = parallel_logprobs(hidden, part, targets, group, TEMPERATURE, **options)
        columns = torch.stack([x for x in stats if x is not None])
        (columns * wanted).sum().backward()
        assert hidden.grad is not None
        share = hidden.grad.float()
        dist.all_reduce(share, group=group)
        return {"columns": columns.detach(), "hidden": share, "weight": part.grad}
    finally:
        dist.destroy_process_group()


def exact() -> dict[str, Tensor]:
    hidden, weight, targets, wanted = (x.double() if x.is_floating_point() else x for x in inputs())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    every = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    p = every.exp()
    columns = torch.stack([every.gather(1, targets[:, None])[:, 0], -(p * every).sum(-1), p.square().sum(-1)])
    (columns * wanted).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"columns": columns.detach(), "hidden": hidden.grad, "weight": weight.grad}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_equals_the_whole_vocabulary(worlds: Worlds, dtype: str, tolerance: float, chunk: int) -> None:
    """megatron-core's fused cross entropy has gradients of bfloat16's precision for float32 inputs, and its plain one
    overwrites them; this one has neither fault."""
    true = exact()
    ranks = worlds[2].run(on_ranks, dtype, chunk)
    weight = torch.cat([rank["weight"] for rank in ranks])
    for rank in ranks:
        for name, got in (("columns", rank["columns"]), ("hidden", rank["hidden"]), ("weight", weight)):
            assert (got.double() - true[name]).norm() <= tolerance * true[name].norm(), name
        assert torch.equal(rank["columns"], ranks[0]["columns"])
