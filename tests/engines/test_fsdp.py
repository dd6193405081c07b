"""The engine against plain transformers, one row at a time, in float64: whatever the layout and the micro-batches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.config.run import ModelConfig
from spmd_rl.models.loading import resolve
from tests.engines.ranks import TEMPERATURE, after_updates, batch, one_update
from tests.world import Worlds

ALL = [[0, 1, 2, 3, 4, 5, 6]]
PAIRS = [[6, 0], [2], [], [1, 5], [3, 4]]
F = "actor.engine.fsdp"
RUNS: dict[str, tuple[int, list[str], list[list[int]]]] = {
    "one micro-batch": (1, [], ALL),
    "micro-batches": (1, [], PAIRS),
    "small head chunks": (1, ["actor.engine.logprob_chunk_tokens=3"], PAIRS),
    "recomputation": (1, ["actor.engine.gradient_checkpointing=true"], PAIRS),
    "fsdp 2": (2, [], ALL),
    "fsdp 2, micro-batches": (2, [], PAIRS),
    "fsdp 2, kept after forward": (2, [f"{F}.reshard_after_forward=false"], PAIRS),
    "fsdp 2, recomputation": (2, ["actor.engine.gradient_checkpointing=true"], PAIRS),
    "fsdp 2, offload policy": (2, [f"{F}.offload_policy=true"], PAIRS),
    "ddp 2": (2, [f"{F}.fsdp_size=1"], PAIRS),
    "ulysses 2": (2, [f"{F}.ulysses_size=2"], ALL),
    "ulysses 2, micro-batches": (2, [f"{F}.ulysses_size=2", "actor.engine.gradient_checkpointing=true"], PAIRS),
    "ddp 2 x fsdp 2, ulysses 2": (4, [f"{F}.fsdp_size=2", f"{F}.ulysses_size=2"], PAIRS),
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Loss, gradients and log-probs a row, by transformers alone."""
    folder = resolve(ModelConfig(path="tiny-digits").path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    rows = batch()
    columns = zip(rows["prompts"].rows(), rows["responses"].rows(), rows["weights"].rows(), strict=True)
    found: dict[str, Any] = {"log_probs": [], "losses": [], "gradients": []}
    for prompt, response, weights in columns:
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        every = logits.log_softmax(-1)
        chosen = every.gather(1, response[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        loss = (weights * chosen).sum() + 0.1 * entropy.square().sum()
        model.zero_grad()
        loss.backward()
        found["log_probs"].append(chosen.detach())
        found["losses"].append(loss.item())
        found["gradients"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def summed(plain: dict[str, Any], rows: list[int]) -> dict[str, Tensor]:
    return {name: sum(plain["gradients"][i][name] for i in rows) for name in plain["gradients"][0]}  # type: ignore[misc]


def check(got: list[dict[str, Any]], plain: dict[str, Any], rows: list[int], tolerance: float) -> None:
    expected = summed(plain, rows)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
    for rank in got:
        assert rank["loss"] == pytest.approx(sum(plain["losses"][i] for i in rows), rel=tolerance)
        assert rank["gradient"].keys() == expected.keys()
        assert all(torch.allclose(g, rank["gradient"][n].double(), atol=tolerance) for n, g in expected.items())
        assert rank["grad_norm"] == pytest.approx(norm, rel=max(tolerance, 1e-6))
        for row, log_probs in zip(rank["row_id"], rank["log_probs"], strict=False):
            if row in rows:  # a column is float32 whatever the model is
                assert torch.allclose(log_probs.double(), plain["log_probs"][row], atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_gradient_equals_plain_transformers(worlds: Worlds, plain: dict[str, Any], run: str) -> None:
    size, overrides, plan = RUNS[run]
    got = worlds[size].run(one_update, overrides, plan, "float64")
    check(got, plain, list(range(7)), 1e-9)


def test_in_float32(worlds: Worlds, plain: dict[str, Any]) -> None:
    for size, overrides in ((1, []), (2, [f"{F}.ulysses_size=2"])):
        got = worlds[size].run(one_update, overrides, PAIRS)
        expected = summed(plain, list(range(7)))
        norm = torch.cat([g.flatten() for g in expected.values()]).norm()
        apart = torch.cat([(g - got[0]["gradient"][n]).flatten() for n, g in expected.items()]).norm()
        assert apart <= 1e-5 * norm


def test_bfloat16_computes_roughly_the_same_over_float32_weights(worlds: Worlds, plain: dict[str, Any]) -> None:
    (got,) = worlds[1].run(one_update, [f"{F}.param_dtype=bfloat16"], PAIRS)
    expected = summed(plain, list(range(7)))
    assert all(g.dtype == torch.float32 for g in [*got["gradient"].values(), *got["after"].values()])
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    apart = torch.cat([(g - got["gradient"][n]).flatten() for n, g in expected.items()]).norm()
    assert 1e-5 * norm < apart < 0.05 * norm
    for mine, true in zip(got["log_probs"], plain["log_probs"], strict=True):
        assert torch.allclose(mine.double(), true, atol=0.1)


def test_clipping_scales_the_gradient_and_reports_what_it_was(worlds: Worlds) -> None:
    whole = worlds[1].run(one_update, [], PAIRS)[0]
    for size in (1, 2):
        for got in worlds[size].run(one_update, [], PAIRS, "float32", {"clip_grad": 0.5}):
            assert got["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
            scale = 0.5 / whole["grad_norm"]
            assert scale < 0.5
            for name, clipped in got["gradient"].items():
                assert torch.allclose(clipped, whole["gradient"][name] * scale, rtol=1e-4, atol=1e-7)
    loose = worlds[1].run(one_update, [], PAIRS, "float32", {"clip_grad": 1e9})[0]
    assert all(torch.allclose(g, whole["gradient"][n]) for n, g in loose["gradient"].items())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_that_is_not_finite_skips_the_update_on_every_rank(worlds: Worlds, rank: int) -> None:
    for seen in worlds[2].run(after_updates, PAIRS, [1], rank):
        first, skipped, third = seen
        assert [s["result"].skipped for s in seen] == [False, True, False]
        assert not math.isfinite(skipped["result"].grad_norm)
        assert all(torch.equal(p, skipped["parameters"][n]) for n, p in first["parameters"].items())
        assert any(not torch.equal(p, third["parameters"][n]) for n, p in first["parameters"].items())
        assert all(torch.isfinite(p).all() for p in third["parameters"].values())
        assert [s["gradients left"] for s in seen] == [[], [], []]


def test_the_learning_rate_follows_the_schedule(worlds: Worlds) -> None:
    optim = {"lr": 1e-2, "warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.0}
    (seen,) = worlds[1].run(after_updates, ALL, [0], 1, optim)
    rates = [s["result"].lr for s in seen]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    start = worlds[1].run(after_updates, ALL, [0, 1, 2], 0, optim)[0][0]["parameters"]  # skips all: as it began
    moved = max((p - start[n]).abs().max().item() for n, p in seen[0]["parameters"].items())
    assert moved == pytest.approx(rates[0], rel=1e-3)  # Adam's first step is the rate itself


@pytest.mark.slow
def test_compiled_layers(worlds: Worlds, plain: dict[str, Any]) -> None:
    (got,) = worlds[1].run(one_update, ["actor.engine.compile=true"], ALL, timeout_s=300.0)
    expected = summed(plain, list(range(7)))
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert torch.cat([(g - got["gradient"][n]).flatten() for n, g in expected.items()]).norm() <= 1e-5 * norm
