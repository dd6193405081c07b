"""Experts chosen by the rollout, under every layout of both engines, against plain transformers with forced routers."""

from pathlib import Path

import pytest
import torch

from tests.engines.megatron.conftest import Families
from tests.engines.megatron.plain import Plain, plain_transformers
from tests.engines.megatron.ranks import M, batch, one_update
from tests.world import Worlds

MOE_LAYERS = {"qwen3-moe": 4, "qwen3-moe-mixed": 3}
RECOMPUTE = "actor.engine.gradient_checkpointing=true"
ULYSSES = "actor.engine.fsdp.ulysses_size=2"
LAYOUTS: dict[str, tuple[int, str, list[str]]] = {
    "megatron": (1, "qwen3-moe-mixed", ["engine=megatron"]),
    "tp 2": (2, "qwen3-moe", ["engine=megatron", f"{M}.tp=2", RECOMPUTE]),
    "pp 2": (2, "qwen3-moe-mixed", ["engine=megatron", f"{M}.pp=2"]),
    "pp 2 · vpp 2": (2, "qwen3-moe", ["engine=megatron", f"{M}.pp=2", f"{M}.vpp=2", RECOMPUTE]),
    "cp 2": (2, "qwen3-moe", ["engine=megatron", f"{M}.cp=2"]),
    "ep 2": (2, "qwen3-moe-mixed", ["engine=megatron", f"{M}.ep=2"]),
    "tp 2 · cp 2 · ep 2": (4, "qwen3-moe", ["engine=megatron", f"{M}.tp=2", f"{M}.cp=2", f"{M}.ep=2", RECOMPUTE]),
    "fsdp": (1, "qwen3-moe-mixed", ["engine=fsdp"]),
    "fsdp 2": (2, "qwen3-moe", ["engine=fsdp", RECOMPUTE]),
    "ulysses 2": (2, "qwen3-moe-mixed", ["engine=fsdp", ULYSSES, RECOMPUTE]),
}


@pytest.fixture(scope="module")
def forced(families: Families) -> dict[str, Plain]:
    return {name: plain_transformers(families.folder(name), batch(layers)) for name, layers in MOE_LAYERS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_transformers_with_forced_routers(
    worlds: Worlds, families: Families, forced: dict[str, Plain], layout: str
) -> None:
    size, family, overrides = LAYOUTS[layout]
    plain, moe_layers = forced[family], MOE_LAYERS[family]
    run = [*overrides, "actor.router_replay=rollout"]
    found = worlds[size].run(one_update, families.folder(family), run, [[6, 0], [2], [], [1, 5], [3, 4]], moe_layers)
    for rank in found:
        assert rank["loss"] == pytest.approx(plain.loss, rel=1e-6)
        for name, true in plain.gradient.items():
            assert (true - rank["gradient"][name]).norm() <= 1e-5 * true.norm(), name
        for name, column in rank["columns"].items():
            for row, values in zip(rank["row_id"], column, strict=True):
                assert torch.allclose(values.double(), plain.columns[name][row], atol=2e-5), name
    stats = [rank["partial"]["actor/router_replay_differs"] for rank in found]
    differs = sum(stat.value for stat in stats) / sum(stat.weight for stat in stats)
    assert differs == pytest.approx(plain.differs, rel=1e-6)


def test_the_forced_choices_are_not_the_routers(families: Families, forced: dict[str, Plain]) -> None:
    for family, plain in forced.items():
        free = families.plain(family)
        assert 0.3 < plain.differs < 0.7  # chance is a half
        assert abs(plain.loss - free.loss) > 1e-3
        gates = [name for name in plain.gradient if "mlp.gate.weight" in name]
        assert len(gates) == MOE_LAYERS[family]
        assert all(plain.gradient[name].norm() > 1e-4 for name in gates)


@pytest.mark.parametrize("engine", ["engine=fsdp", "engine=megatron"])
def test_choices_that_do_not_fit_the_rows_are_an_error(worlds: Worlds, families: Families, engine: str) -> None:
    said = worlds[1].run(with_a_row_cut, families.folder("qwen3-moe"), engine)[0]
    assert said == "routed_experts: row 1 has choices for 7 tokens, but its prompt + response - 1 = 8"


def with_a_row_cut(folder: Path, engine: str) -> str:
    from spmd_rl.data.batch import Ragged
    from tests.engines.megatron.ranks import actor

    rows = batch(4)
    pieces = rows["routed_experts"].rows()
    rows["routed_experts"] = Ragged.from_rows([pieces[0], pieces[1][:-1], *pieces[2:]])
    with actor(folder, [engine, "actor.router_replay=rollout"]) as (engine_of, _):
        try:
            engine_of.forward(rows, [list(range(len(rows)))], ["log_probs"])
        except ValueError as error:
            return str(error)
    return ""
