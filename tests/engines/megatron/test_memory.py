"""Pieces leave the device and come back in place; between updates there are no gradients; what is held lies there."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from spmd_rl.engines.host_pool import Swap
from tests.engines.megatron.conftest import Families
from tests.engines.megatron.ranks import M, actor, mine, objective, whole
from tests.world import Worlds


def moved(folder: Path) -> dict[str, Any]:
    """An update, everything out and in again, another update; beside one that never moved. bfloat16, so that there are
    master weights of their own."""
    seen: dict[str, Any] = {}
    for moves in (False, True):
        with actor(folder, ["engine=megatron", f"{M}.param_dtype=bfloat16"]) as (engine, _):
            rows, micro = mine(engine)
            engine.train(rows, micro, objective)
            gradients = {p.main_grad.untyped_storage().nbytes() for p in engine.model.chunks[0].parameters()}
            held = engine.held()
            if moves:
                swaps = [
                    Swap(piece, partial(engine.resident, piece), engine.device) for piece in ("params", "optimizer")
                ]
                for swap in swaps:
                    swap.leave()
                    swap.free()
                seen["held while away"] = engine.held()
                for swap in swaps:
                    swap.come()
                    swap.settle()
                both = [swap.take() for swap in swaps]
                seen["bytes"] = [went.bytes for went, _ in both]
                assert [came.bytes for _, came in both] == seen["bytes"]
            engine.train(rows, micro, objective)
            seen[f"weights, moved {moves}"] = whole(engine)
            seen["parameters"] = sum(p.numel() for p in engine.model.chunks[0].parameters())
            seen["gradients left"] = gradients
            seen["same list"] = seen.get("same list") or engine.held() is held
            seen["held"] = {h.box.name: h.view.clone() for h in engine.held()}
    return seen


def test_what_leaves_comes_back(worlds: Worlds, families: Families) -> None:
    (seen,) = worlds[1].run(moved, families.folder("llama"))
    stayed, went = seen["weights, moved False"], seen["weights, moved True"]
    assert all(torch.equal(w, went[name]) for name, w in stayed.items())
    params, optimizer = seen["bytes"]
    assert seen["held while away"] is None
    assert seen["gradients left"] == {0}
    assert 2 * seen["parameters"] <= params <= 2.2 * seen["parameters"]  # bfloat16, and the buffer's padding
    assert optimizer == 3 * 4 * seen["parameters"]
    assert seen["same list"], "the list is the same one as long as nothing has moved"
    whole_ones = {
        name: view for name, view in seen["held"].items() if name.endswith(("norm.weight", "embed_tokens.weight"))
    }
    assert len(whole_ones) == 2 * 4 + 2
    assert all(torch.equal(view, went[name]) for name, view in whole_ones.items())
