"""Routing: how even it is, and choices made elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.megatron.conftest import Families
from tests.engines.megatron.ranks import M, actor, batch, mine, objective
from tests.world import Worlds


def replayed(folder: Path) -> dict[str, Any]:
    """Log-probs of all rows: as routed, with the same choices given, with others given; and the metrics of a step."""
    from spmd_rl.engines.megatron.cpu import on_device
    from spmd_rl.engines.megatron.schedule import Micro, run_schedule

    with actor(folder, ["engine=megatron", "actor.engine.gradient_checkpointing=true"]) as (engine, _):
        model = engine.model

        def log_probs(routes: dict[int, torch.Tensor]) -> torch.Tensor:
            part = Micro.of(batch(), model)
            part.stream.routes = routes
            with on_device(engine.device), torch.no_grad():
                (out,) = run_schedule(model, engine.chunks, [part], lambda p, h: engine.head(p, h, []), train=False)
            return out["log_probs"]

        log_probs({})
        chosen = {layer: routing.chosen.clone() for layer, routing in model.routings().items()}
        metrics = engine.train(*mine(engine), objective).partial
        engine.load_state({"optimizer": {"steps": torch.tensor(1)}}, 1)
        return {
            "chosen": chosen,
            "other": log_probs({layer: (c + 1) % 4 for layer, c in chosen.items()}),
            "again": (log_probs({}), log_probs({k: r.chosen.clone() for k, r in model.routings().items()})),
            "metrics": {name: stat.finish() for name, stat in metrics.items()},
        }


def test_replay_and_metrics(worlds: Worlds, families: Families) -> None:
    (found,) = worlds[1].run(replayed, families.folder("qwen3-moe-mixed"))
    assert sorted(found["chosen"]) == [0, 2, 3]  # layer 1 is dense
    free, same = found["again"]
    assert torch.equal(free, same)
    assert (found["other"] - free).abs().max() > 1e-3
    worst, average = (found["metrics"][f"actor/moe_load_{which}"] for which in ("max", "mean"))
    assert 1 <= average <= worst <= 2  # 4 experts of which each token takes 2: no expert has more than twice its share


def test_load_is_counted_per_choice() -> None:
    from spmd_rl.engines.megatron.experts import Routing

    routing = Routing(3, torch.device("cpu"))
    routing.replay = torch.tensor([[0, 1], [0, 2], [-1, -1], [0, 1]], dtype=torch.int16)
    scores = torch.tensor([[0.5, 0.4, 0.1], [0.1, 0.3, 0.6], [0.1, 0.4, 0.5], [0.4, 0.5, 0.1]])

    def topk(scores: torch.Tensor, k: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.topk(scores, k))  # type: ignore[return-value]

    values, chosen = routing.get_replay_topk(scores, 2, None, None, topk)
    assert chosen.tolist() == [[0, 1], [0, 2], [2, 1], [0, 1]]  # the third chooses by itself
    assert torch.equal(values, scores.gather(1, chosen))
    load, differs = routing.take()
    assert load.tolist() == [3, 3, 2]
    assert differs.tolist() == [1, 6]  # of the second token, 0 for 1
    assert [counts.tolist() for counts in routing.take()] == [[0, 0, 0], [0, 0]]


def test_the_layout_does_not_change_the_metrics(worlds: Worlds, families: Families) -> None:
    folder = families.folder("qwen3-moe")
    alone = worlds[1].run(metrics, folder, [])[0]
    for got in worlds[2].run(metrics, folder, ["ep=2"]):
        assert got == pytest.approx(alone, rel=0.2)  # padding and the split into micro-batches count too


def metrics(folder: Path, sizes: list[str]) -> dict[str, float | None]:
    with actor(folder, ["engine=megatron", *(f"{M}.{s}" for s in sizes)]) as (engine, _):
        partial = engine.train(*mine(engine), objective).partial
        return {name: stat.finish() for name, stat in partial.items() if "moe" in name}
