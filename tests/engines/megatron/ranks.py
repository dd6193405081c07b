"""Engines of either kind on this world of ranks, over tiny models of every family, for tests."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from spmd_rl.assemble.model import load_model_facts, make_engine
from spmd_rl.config.load import compose
from spmd_rl.config.roles import OptimConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.routes import COLUMN
from spmd_rl.engines.fsdp import FsdpEngine, full
from spmd_rl.models.checkpoint import save_folder
from spmd_rl.models.names import exports
from spmd_rl.models.random_weights import random_tensors
from spmd_rl.models.tiny import character_tokenizer
from spmd_rl.ranked import plan_of
from spmd_rl.roles.model import sum_over
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import read_environment
from tests.engines import ranks as engines
from tests.engines.ranks import PROMPTS, TEMPERATURE, objective

MICRO = [[6, 0], [2], [], [1, 5], [3, 4]]
M = "actor.engine.megatron"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 6, "head_dim": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "norm_topk_prob": True},
    "qwen3-moe-mixed": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 16, "norm_topk_prob": False, "mlp_only_layers": [1]},
}  # fmt: skip
"""Four layers each, so that two stages of two chunks have one."""


def family_config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(
        **{
            "vocab_size": 104, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "tie_word_embeddings": False, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": None,
            "eos_token_id": 2, **FAMILIES[family],
        }
    )  # fmt: skip


def make_family(folder: Path, family: str) -> Path:
    """A folder of random weights in which norms and biases are not their usual ones and noughts."""
    config = family_config(family)
    generator = torch.Generator().manual_seed(1)

    def shaken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in random_tensors(config, seed=0):
            yield name, tensor + 0.1 * torch.randn(tensor.shape, generator=generator) if tensor.ndim < 2 else tensor

    save_folder(folder, config, shaken(), tokenizer=character_tokenizer(), dtype=None)
    return folder


def batch(moe_layers: int = 0) -> Batch:
    """The rows of the other engine's tests, but some tokens are the padding token: it can be sampled, and transformers
    does not learn from it as an input. With `moe_layers` they say which 2 of 4 experts were chosen: any."""
    made = engines.batch()
    for name in ("prompts", "responses"):
        made[name].values[::5] = 0
    if moe_layers:
        lengths = made["prompts"].lengths + made["responses"].lengths - 1
        random = torch.rand(int(lengths.sum()), moe_layers, 4, generator=torch.Generator().manual_seed(5))
        made[COLUMN] = Ragged(random.topk(2).indices.to(torch.uint8), lengths)
    return made


@contextmanager
def actor(folder: Path, overrides: Sequence[str], optim: dict[str, Any] | None = None) -> Iterator[tuple[Any, Runtime]]:
    """The model of `folder` as the actor of a run with these overrides."""
    config = compose(["experiment=tiny", f"model.path={folder}", *overrides])
    plan = plan_of(config, read_environment())
    model = load_model_facts(config)
    runtime = start(config, plan)
    try:
        chosen = OptimConfig(**{"lr": 1e-3, "clip_grad": 0.0, **(optim or {})})
        yield (
            make_engine(
                "actor",
                config,
                model,
                config.actor.engine,
                runtime,
                folder=model.folder,
                optim=chosen,
                total_steps=10,
                temperature=TEMPERATURE,
            ),
            runtime,
        )
    finally:
        stop()


def mine(engine: Any, plan: list[list[int]] = MICRO, moe_layers: int = 0) -> tuple[Batch, list[list[int]]]:
    """This rank's rows (every dp_size-th) and the micro-batches of them; some of these may be empty."""
    dp, rank = engine.layout.dp_size, engine.layout.dp_rank(torch.distributed.get_rank())
    rows = list(range(rank, len(PROMPTS), dp))
    return batch(moe_layers).select(rows), [[rows.index(i) for i in micro if i in rows] for micro in plan]


def whole(engine: Any) -> dict[str, Tensor]:
    """Every weight by its Hugging Face name."""
    return {name: tensor.clone() for name, tensor in engine.weights()}


def gradient_of(engine: Any) -> dict[str, Tensor]:
    """The summed gradient by Hugging Face name. megatron-core keeps it in flat buffers of which a rank has a part only:
    each part takes the place of the weights for a moment, so that these can be asked for."""
    if isinstance(engine, FsdpEngine):
        gradients = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
        found = {e.name: e.make([full(gradients[s]) for s in e.sources]).clone() for e in exports(engine.model)}
        return found
    masters = [share.master.clone() for share in engine.optimizer.shares]
    for share in engine.optimizer.shares:
        share.master.copy_(share.gradient)
    engine.optimizer.publish()
    found = whole(engine)
    for share, master in zip(engine.optimizer.shares, masters, strict=True):
        share.master.copy_(master)
    engine.optimizer.publish()
    return found


def one_update(
    folder: Path, overrides: Sequence[str], micro: list[list[int]] = MICRO, moe_layers: int = 0
) -> dict[str, Any]:
    """What an optimizer step saw: gradient, the loss of all ranks, log-probs of this rank's rows."""
    with actor(folder, overrides) as (engine, runtime):
        rows, own = mine(engine, micro, moe_layers)
        columns = engine.forward(rows, own, ["log_probs", "entropy", "sum_pi_squared"])
        before = whole(engine)
        seen: dict[str, Any] = {}

        def take(*_: Any) -> None:
            seen["gradient"] = gradient_of(engine)

        engine.optimizer.step = take
        result = engine.train(rows, own, objective)
        group = runtime.groups.along(runtime.layout("actor").batch, "dp")
        loss = sum_over(torch.tensor([result.loss], dtype=torch.float64), group).item()
        return {
            "gradient": seen["gradient"],
            "loss": loss,
            "grad_norm": result.grad_norm,
            "partial": result.partial,
            "row_id": rows["row_id"].tolist(),
            "columns": {name: [r.clone() for r in column.rows()] for name, column in columns.items()},
            "weights": before,
            "megatron_has_globals": "megatron.core" in sys.modules and globals_of_megatron(),
        }


def globals_of_megatron() -> bool:
    """Whether somebody has set megatron-core's global process groups."""
    from spmd_rl.runtime.mcore import parallel_state

    return bool(parallel_state.is_initialized()) or parallel_state._TENSOR_MODEL_PARALLEL_GROUP is not None


def times(use: Callable[[Any], Any], folder: Path, overrides: Sequence[str]) -> Any:
    """use(engine) of an actor."""
    with actor(folder, overrides) as (engine, _):
        return use(engine)
