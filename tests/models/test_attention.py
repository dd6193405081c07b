"""Packed attention equals transformers' padded attention; Ulysses over gloo ranks equals one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from spmd_rl.config import ConfigError
from spmd_rl.models.attention import check_attention, gather_tokens, register
from spmd_rl.models.packing import Packing, response_positions
from spmd_rl.models.policy import Policy
from tests.models.ranks import run_ranks

PROMPTS, RESPONSES = [3, 1, 4, 2], [5, 7, 2, 6]
SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def heads(query: int, kv: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, **heads(4, 2), tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, **heads(4, 1)),
    "qwen3": lambda: Qwen3Config(**SHAPE, **heads(4, 2), head_dim=16),
    "mistral-window": lambda: MistralConfig(**SHAPE, **heads(4, 2), sliding_window=4),
    "qwen2-window": lambda: Qwen2Config(
        **SHAPE, **heads(4, 4), use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
}


def build(name: str, dtype: torch.dtype, attention: str) -> Any:
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention, dtype=dtype)
    for p in model.parameters():  # larger than the usual start, so that attention is far from uniform
        torch.nn.init.normal_(p, std=0.3)
    return model


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def weights_R(dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(RESPONSES), generator=torch.Generator().manual_seed(2)).to(dtype)


def padded(name: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain transformers on left-aligned rows with an attention mask."""
    model = build(name, dtype, "sdpa")
    ids = torch.nn.utils.rnn.pad_sequence(rows(), batch_first=True)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor([len(r) for r in rows()])[:, None]
    logp = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.log_softmax(-1)
    picked = [
        logp[i, p - 1 : p + r - 1].gather(-1, ids[i, p : p + r, None])[:, 0]
        for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]
    out = torch.cat(picked)
    (out * weights_R(dtype)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters()}


def packed(name: str, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy over packed rows, on one rank or on the ranks of a group (gradients summed over them)."""
    policy = Policy(build(name, dtype, "spmd_rl"))
    sp, rank = (1, 0) if group is None else (group.size(), group.rank())
    ids_T = torch.cat(rows())
    packing = Packing.pack([len(r) for r in rows()], sp, rank, group)
    positions_R = response_positions(PROMPTS, RESPONSES)
    places, mine = packing.local_positions(positions_R)
    stats = policy(packing.local(ids_T), packing.position_ids(), packing, places, ids_T[positions_R + 1][mine])
    out = gather_tokens(stats["log_probs"], packing.counts(positions_R), group)
    (out * weights_R(dtype)).sum().backward()
    grads = {n: p.grad for n, p in policy.model.named_parameters()}
    if group is not None:
        for g in grads.values():
            dist.all_reduce(g, group=group)
    return out.detach(), grads


def assert_same(expected: tuple[Tensor, dict[str, Tensor]], got: tuple[Tensor, dict[str, Tensor]], tol: float) -> None:
    assert float((expected[0] - got[0]).abs().max()) <= tol
    assert expected[1].keys() == got[1].keys()
    for name, grad in expected[1].items():
        error = float((grad - got[1][name]).abs().max() / grad.abs().max().clamp(min=1.0))
        assert error <= tol, f"{name}: {error}"


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_padded(name: str) -> None:
    assert_same(padded(name, torch.float64), packed(name, torch.float64), 1e-9)


def assert_close(expected: tuple[Tensor, dict[str, Tensor]], got: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Values, and the gradient as one vector, within 1e-5 in relative norm: what float32 can give."""
    assert float((expected[0] - got[0]).norm() / expected[0].norm()) <= 1e-5
    true, mine = (torch.cat([grads[name].flatten() for name in expected[1]]) for grads in (expected[1], got[1]))
    assert float((true - mine).norm() / true.norm()) <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_padded_in_float32(name: str) -> None:
    assert_close(padded(name, torch.float32), packed(name, torch.float32))


def _ulysses_worker(rank: int, folder: Path) -> dict[tuple[str, int, torch.dtype], Any]:
    groups = {4: dist.group.WORLD}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups[2] = pairs[rank // 2]
    types = (torch.float64, torch.float32)
    return {(name, sp, t): packed(name, t, group) for name in CONFIGS for sp, group in groups.items() for t in types}


def test_ulysses_equals_one_rank(tmp_path: Path) -> None:
    """sp=2 and sp=4, with 4, 2 and 1 key-value heads, windows, and 30 tokens, which 4 does not divide."""
    outs = run_ranks(_ulysses_worker, 4, tmp_path)
    for name in CONFIGS:
        exact, single = packed(name, torch.float64), packed(name, torch.float32)
        for sp in (2, 4):
            for out in outs:
                assert_same(exact, out[name, sp, torch.float64], 1e-9)
                assert_close(single, out[name, sp, torch.float32])


def test_packing_pads_to_a_multiple_of_sp_with_a_row_of_its_own() -> None:
    class Group:
        def size(self) -> int:
            return 4

    packing = Packing.pack([3, 2], 4, 1, Group())  # type: ignore[arg-type]
    assert packing.lengths == [3, 2, 3]
    assert packing.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packing.slice_for(1) == slice(2, 4)
    assert packing.position_ids().tolist() == [2, 0]
    assert packing.local(torch.arange(10, 15)).tolist() == [12, 13]
    positions = response_positions([1, 1], [2, 1])
    assert positions.tolist() == [0, 1, 3]
    assert packing.counts(positions) == [2, 1, 0, 0]
    places, mine = packing.local_positions(positions)
    assert (places.tolist(), mine) == ([1], slice(2, 3))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Packing.pack([3, 0])
    with pytest.raises(ValueError, match="needs a process group of 2"):
        Packing.pack([3], sp_size=2)
    with pytest.raises(ConfigError, match=r"does not divide the 4 attention heads.*1, 2, 4"):
        check_attention(CONFIGS["llama"](), sp_size=3)
    with pytest.raises(ValueError, match="packing="):
        build("llama", torch.float32, "spmd_rl")(input_ids=torch.zeros(1, 3, dtype=torch.int64))
