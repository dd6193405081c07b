"""The one attention function of every transformers model here: causal inside packed rows, with or without Ulysses.

`register()` adds it to transformers under the name "spmd_rl". No mask is registered under that name, so transformers
builds none: the rows come as `packing=` through the model's keyword arguments, and so reach a recomputed layer too.

Shapes: T packed tokens, S = T/sp tokens of this rank, H query heads, K key-value heads, D head size, P = sp ranks.
"""

import inspect
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from spmd_rl.config import ConfigError
from spmd_rl.models.packing import Packing

NAME = "spmd_rl"
_SAYS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 shares key-value heads unasked


def register() -> None:
    """Make `attn_implementation="spmd_rl"` known to transformers. May be called any number of times."""
    AttentionInterface.register(NAME, packed_attention)


def check_attention(hf_config: PretrainedConfig, sp_size: int = 1) -> None:
    """Raise ConfigError when this model's attention cannot be computed here, or not by sp_size ranks together."""
    if getattr(hf_config, "attn_logit_softcapping", None):
        raise ConfigError(
            f"{hf_config.model_type}: attention with soft-capped scores "
            f"(attn_logit_softcapping={hf_config.attn_logit_softcapping}) is not supported; choose a model without it"
        )
    if getattr(hf_config, "attention_dropout", 0.0):
        raise ConfigError(
            f"{hf_config.model_type}: attention_dropout={hf_config.attention_dropout} is not supported; "
            "set it to 0 in the model's config.json"
        )
    heads = hf_config.num_attention_heads
    if heads % sp_size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"ulysses_size={sp_size} does not divide the {heads} attention heads of {hf_config.model_type}; "
            f"use one of {fits}"
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' calling convention: query [1, H, S, D], key and value [1, K, S, D] -> [1, S, H, D].

    Every token sees itself and the tokens before it in its own row (at most `sliding_window` of them).
    Raises ValueError when the model was called without `packing`, ConfigError for variants that are not computed here.
    """
    if packing is None:
        raise ValueError('attention "spmd_rl" needs packing=Packing.pack(lengths) in the model\'s keyword arguments')
    if dropout or softcap or kwargs.get("s_aux") is not None or attention_mask is not None:
        raise ConfigError(
            f"attention of {type(module).__name__} is not supported: dropout={dropout}, softcap={softcap}, "
            f"sinks={kwargs.get('s_aux') is not None}, mask={attention_mask is not None}; all must be off"
        )
    if query.shape[0] != 1 or query.shape[2] * packing.sp_size != packing.total:
        raise ValueError(
            f"attention: got a batch of {query.shape[0]} rows of {query.shape[2]} tokens, but the packing has "
            f"1 row of {packing.total} tokens over {packing.sp_size} ranks"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = sliding_window if sliding_window is not None and sliding_window < packing.max_seqlen else None
    if packing.sp_size == 1:
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
        out_THD = attend(q_THD, k_TKD, v_TKD, Spans.rows(packing), scale, window)
        return out_THD[None], None
    return _ulysses(query[0], key[0], value[0], packing, scale, window)[None], None


@dataclass(frozen=True)
class Spans:
    """Queries laid end to end, and the keys that each run of them sees: its own and, when it has more keys than
    queries, those before. Counts are tokens."""

    queries: list[int]
    keys: list[int]
    cu_queries: Tensor
    """Starts and the end: int32, on the device of the model."""
    cu_keys: Tensor

    @classmethod
    def of(cls, queries: list[int], keys: list[int], device: torch.device) -> "Spans":
        """Runs of `queries` queries over `keys` keys each; the last query of a run is at its last key."""
        starts = [
            torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32) for counts in (queries, keys)
        ]
        return cls(queries, keys, *(s.to(device) for s in starts))

    @classmethod
    def rows(cls, packing: Packing) -> "Spans":
        """Whole rows: every token a query and a key."""
        return cls(packing.lengths, packing.lengths, packing.cu_seqlens, packing.cu_seqlens)


def attend(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
    """Causal attention inside each run: q [T, H, D], k and v [U, K, D] -> [T, H, D]."""
    if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_THD, k_UKD, v_UKD, spans, scale, window)
    return _row_by_row(q_THD, k_UKD, v_UKD, spans, scale, window)


def _varlen(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
    """One flash-attention kernel over all runs."""
    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1 if window is not None else -1, 0)}
    if _SAYS_GQA:
        options["enable_gqa"] = True
    longest = max(spans.queries), max(spans.keys)
    out = varlen_attn(q_THD, k_UKD, v_UKD, spans.cu_queries, spans.cu_keys, *longest, **options)
    assert isinstance(out, Tensor), "varlen_attn returns more than a tensor only when asked for return_aux"
    return out


@torch.compiler.disable  # the loop runs over data-dependent lengths: a graph of it would be rebuilt for each batch
def _row_by_row(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
    """Exact attention for float32, float64 and the CPU: one call for each number of runs that are equally long."""
    share = q_THD.shape[1] // k_UKD.shape[1]
    if share > 1:  # the fused CPU kernel wants as many key-value heads as query heads
        k_UKD, v_UKD = k_UKD.repeat_interleave(share, 1), v_UKD.repeat_interleave(share, 1)
    equal = _equal_runs(list(zip(spans.queries, spans.keys, strict=True)))
    q_sizes, k_sizes = [n * q for n, (q, _) in equal], [n * k for n, (_, k) in equal]
    outs = []
    for q, k, v, (runs, (queries, keys)) in zip(
        q_THD.split(q_sizes), k_UKD.split(k_sizes), v_UKD.split(k_sizes), equal, strict=True
    ):
        q, k, v = (x.unflatten(0, (runs, -1)).transpose(1, 2) for x in (q, k, v))
        mask = _mask(queries, keys, window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _equal_runs(lengths: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """Neighbouring runs of one length together: [a, a, b] -> [(2, a), (1, b)]."""
    runs: list[tuple[int, tuple[int, int]]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query (row) sees a key (column): bool [queries, keys]; None for the plain causal square."""
    before = keys - queries
    hides = window is not None and window < keys
    if before == 0 and not hides:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return mask.triu(before + 1 - window) if window is not None and hides else mask


# --- Ulysses (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): tokens scattered <-> heads scattered


@torch.compiler.disable
def _ulysses(q_HSD: Tensor, k_KSD: Tensor, v_KSD: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    """Exchange tokens for heads, attend to whole rows with H/P of the heads, exchange back: [S, H, D]."""
    sp, group = packing.sp_size, packing.sp_group
    assert group is not None, "Packing.pack checks that sp_size > 1 comes with a group"
    heads, kv_heads = q_HSD.shape[0], k_KSD.shape[0]
    if heads % sp:
        raise ConfigError(f"ulysses_size={sp} does not divide the {heads} attention heads")
    copies = sp // math.gcd(sp, kv_heads)  # fewest copies of each key-value head that spread evenly over the ranks
    if copies > 1:
        k_KSD, v_KSD = k_KSD.repeat_interleave(copies, 0), v_KSD.repeat_interleave(copies, 0)
    parts = [x.unflatten(0, (sp, -1)).transpose(1, 2) for x in (q_HSD, k_KSD, v_KSD)]  # [P, S, heads/P, D]
    sizes = [p.shape[2] for p in parts]
    mixed = _AllToAll.apply(torch.cat(parts, 2), group).flatten(0, 1)  # [T, all three, D]
    q_THD, k_TKD, v_TKD = mixed.split(sizes, 1)
    out_THD = attend(q_THD, k_TKD, v_TKD, Spans.rows(packing), scale, window)  # heads/P of all tokens
    out_PSHD = _AllToAll.apply(out_THD.unflatten(0, (sp, -1)), group)  # the P slices of heads of this rank's tokens
    return out_PSHD.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Entry i of dim 0 goes to rank i of the group; what rank i sent comes in as entry i. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def gather_tokens(local: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Join every rank's [counts[r], ...] in rank order, on every rank; differentiable.

    The backward hands each rank its own part of the gradient: the ranks of a sequence-parallel group all compute the
    same loss from the joined tensor, so summing their (equal) gradients would count each token sp times.
    """
    return local if group is None else _Gather.apply(local, counts, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = group.rank()
        ends = list(accumulate(counts))
        ctx.mine = slice(ends[rank] - counts[rank], ends[rank])
        widest = local.new_zeros((max(counts), *local.shape[1:]))
        widest[: counts[rank]] = local
        parts = [torch.empty_like(widest) for _ in counts]
        dist.all_gather(parts, widest, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.mine], None, None
