"""Every layout against plain transformers, in float32: columns, loss, gradient, norm; and weights, bit for bit."""

import pytest
import torch

from tests.engines.megatron.conftest import Families
from tests.engines.megatron.ranks import M, one_update
from tests.world import Worlds

EVERYTHING = [[0, 1, 2, 3, 4, 5, 6]]
LAYOUTS: dict[str, tuple[int, str, list[str]]] = {
    "alone, mistral": (1, "mistral", []),
    "alone, rope scaling": (1, "llama", []),
    "dp 2": (2, "qwen3", []),
    "dp 2, whole optimizer": (2, "qwen2", ["distributed_optimizer=false"]),
    "tp 2": (2, "qwen2", ["tp=2"]),
    "tp 2, q and k norms": (2, "qwen3", ["tp=2"]),
    "tp 2, no sequence parallelism": (2, "qwen3", ["tp=2", "sequence_parallel=false"]),
    "pp 2": (2, "llama", ["pp=2"]),
    "pp 2, tied": (2, "llama-tied", ["pp=2"]),
    "pp 2 · vpp 2": (2, "qwen3", ["pp=2", "vpp=2"]),
    "cp 2": (2, "qwen3", ["cp=2"]),
    "cp 2, sliding window": (2, "mistral", ["cp=2"]),
    "ep 2": (2, "qwen3-moe", ["ep=2"]),
    "tp 2 · pp 2": (4, "llama-tied", ["tp=2", "pp=2"]),
    "tp 2 · ep 2": (4, "qwen3-moe", ["tp=2", "ep=2"]),
    "tp 2 · ep 2 · etp 1": (4, "qwen3-moe-mixed", ["tp=2", "ep=2", "etp=1"]),
    "tp 2 · cp 2": (4, "qwen3", ["tp=2", "cp=2"]),
    "tp 2 · pp 2 · vpp 2 · ep 2": (4, "qwen3-moe", ["tp=2", "pp=2", "vpp=2", "ep=2", "etp=1"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_plain_transformers(worlds: Worlds, families: Families, layout: str) -> None:
    size, family, sizes = LAYOUTS[layout]
    plain = families.plain(family)
    overrides = ["engine=megatron", *(f"{M}.{s}" for s in sizes)]
    for rank in worlds[size].run(one_update, families.folder(family), overrides):
        assert rank["loss"] == pytest.approx(plain.loss, rel=1e-6)
        assert rank["grad_norm"] == pytest.approx(plain.norm, rel=1e-5)
        assert rank["gradient"].keys() == plain.gradient.keys()
        for name, true in plain.gradient.items():
            assert (true - rank["gradient"][name]).norm() <= 1e-5 * true.norm(), name
        for name, column in rank["columns"].items():
            for row, values in zip(rank["row_id"], column, strict=True):
                assert torch.allclose(values.double(), plain.columns[name][row], atol=2e-5), name
        assert rank["weights"].keys() == plain.weights.keys()
        assert all(torch.equal(w, rank["weights"][n]) for n, w in plain.weights.items())
        assert not rank["megatron_has_globals"]


@pytest.mark.parametrize("layout", ["cp 2", "pp 2 · vpp 2", "tp 2 · ep 2 · etp 1"])
def test_the_number_of_micro_batches_divides_nothing(worlds: Worlds, families: Families, layout: str) -> None:
    size, family, sizes = LAYOUTS[layout]
    overrides = ["engine=megatron", "actor.engine.gradient_checkpointing=true", *(f"{M}.{s}" for s in sizes)]
    plain = families.plain(family)
    got = worlds[size].run(one_update, families.folder(family), overrides, EVERYTHING)[0]
    for name, true in plain.gradient.items():
        assert (true - got["gradient"][name]).norm() <= 1e-5 * true.norm(), name
    assert got["grad_norm"] == pytest.approx(plain.norm, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe-mixed"])
def test_fsdp_agrees(worlds: Worlds, families: Families, family: str) -> None:
    plain = families.plain(family)
    for rank in worlds[2].run(one_update, families.folder(family), ["engine=fsdp"]):
        assert rank["loss"] == pytest.approx(plain.loss, rel=1e-6)
        for name, true in plain.gradient.items():
            assert (true - rank["gradient"][name]).norm() <= 1e-5 * true.norm(), name


def test_bfloat16_computes_roughly_the_same_over_float32_masters(worlds: Worlds, families: Families) -> None:
    plain = families.plain("qwen3")
    overrides = ["engine=megatron", f"{M}.tp=2", f"{M}.param_dtype=bfloat16"]
    for rank in worlds[2].run(one_update, families.folder("qwen3"), overrides):
        assert all(w.dtype == torch.bfloat16 for w in rank["weights"].values())
        assert rank["grad_norm"] == pytest.approx(plain.norm, rel=0.05)
        assert rank["grad_norm"] != pytest.approx(plain.norm, rel=1e-5)
        for row, values in zip(rank["row_id"], rank["columns"]["log_probs"], strict=True):
            assert torch.allclose(values.double(), plain.columns["log_probs"][row], atol=0.2)
