"""The FSDP estimate against torch's MemTracker, which counts every storage of a real step in a fake CPU world."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config

from spmd_rl.config.roles import EngineConfig, FsdpConfig
from spmd_rl.models.attention import NAME, register
from spmd_rl.models.packing import Packing
from spmd_rl.models.policy import Policy, decoder_layers
from spmd_rl.topology.fold import fsdp_layout
from spmd_rl.topology.fsdp_memory import FsdpMemory
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.topology.shape import ModelShape

ROW, VOCAB, CHUNK = 64, 2048, 128


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def sharded(config: Qwen3Config, layout: RoleLayout, recompute: bool) -> Policy:
    """The engine's own sharding: a layer a group, the rest in the root group."""
    register()
    config._attn_implementation = NAME
    model = Policy(AutoModelForCausalLM.from_config(config))
    if recompute:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", layout.mesh.sizes, mesh_dim_names=layout.mesh.names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model.train()


def step(model: Policy, optimizer: torch.optim.Optimizer, rows: int, micro_batches: int, tracker: Any = None) -> None:
    tokens = rows * ROW
    for _ in range(micro_batches):
        if tracker is not None:
            tracker.reset_mod_stats()
        stats = model(
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            position_ids=torch.arange(ROW).repeat(rows),
            packing=Packing.pack([ROW] * rows),
            positions=torch.arange(0, tokens, 2),
            targets=torch.zeros(tokens // 2, dtype=torch.int64),
            entropy=True,
            chunk=CHUNK,
        )
        stats["log_probs"].sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("fake_world", "recompute", "rows", "micro_batches", "tied", "fsdp_size"),
    [(1, True, 8, 1, True, -1), (4, False, 4, 2, False, -1), (4, True, 4, 2, False, 2)],
    ids=["recompute", "two-micro-batches", "hybrid"],
    indirect=["fake_world"],
)
def test_peak_of_a_training_step(
    fake_world: int, recompute: bool, rows: int, micro_batches: int, tied: bool, fsdp_size: int
) -> None:
    config = Qwen3Config(
        num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        vocab_size=VOCAB, intermediate_size=384, tie_word_embeddings=tied,
    )  # fmt: skip
    engine = EngineConfig(gradient_checkpointing=recompute, logprob_chunk_tokens=CHUNK, fsdp=FsdpConfig(fsdp_size))
    layout = fsdp_layout("actor", "global", fake_world, engine.fsdp)
    model = sharded(config, layout, recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    step(model, optimizer, rows, micro_batches)  # makes the moments
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step(model, optimizer, rows, micro_batches, tracker)
    (found,) = tracker.get_tracker_snapshot("peak").values()
    shape = ModelShape.from_hf(config.to_dict())
    estimator = FsdpMemory(shape, layout, engine, rows * ROW, rows * ROW // 2, micro_batches, cuda=False)
    moment, items = estimator.train()
    estimate = sum(estimator.held(trained=True).values()) + sum(items.values())
    assert 0.95 < estimate / found["Total"] < 1.10, (moment, estimate, found["Total"], items)
