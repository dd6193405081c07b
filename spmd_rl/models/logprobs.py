"""The head: log-probs and entropy of given tokens from hidden states, a chunk of tokens at a time.

Logits exist for one chunk only and are computed again in the backward: memory does not grow with tokens x vocabulary.

Shapes: T tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from spmd_rl.config import ConfigError


class TokenStats(NamedTuple):
    """What the head says of each token, under softmax(logits / temperature); float32 (float64 for float64 input)."""

    logprobs: Tensor
    """log p(target): [T]."""
    entropy: Tensor | None = None
    """-sum p log p in nats: [T]."""
    sum_pi_squared: Tensor | None = None
    """sum p^2, for optimal-token baselines: [T]."""


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int = 1024,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenStats:
    """Log-probs (and entropy, sum of squared probabilities) of tokens; differentiable in hidden and weight.

    The product hidden @ weight.T is computed in the input's type, everything after it in float32 or float64.
    `chunk` is the number of tokens whose logits exist at one time. T may be 0.
    Raises ValueError for a temperature or chunk that is not positive, or when T differs between the inputs.
    """
    if temperature <= 0 or chunk < 1 or len(hidden_TH) != len(targets_T):
        raise ValueError(
            f"token_logprobs: temperature={temperature} and chunk={chunk} must be positive, "
            f"and hidden has {len(hidden_TH)} tokens, targets {len(targets_T)}"
        )
    logprobs, entropies, squares = _ChunkedHead.apply(
        hidden_TH, weight_VH, targets_T, float(temperature), chunk, entropy, sum_pi_squared
    )
    return TokenStats(logprobs, entropies if entropy else None, squares if sum_pi_squared else None)


def check_head(head: nn.Module | None, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError when logits are more than hidden @ weight.T in this model."""
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError(f"{hf_config.model_type}: the output head must be a linear layer without bias, it is {head}")
    neutral = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
    for key, value in neutral.items():
        found = getattr(hf_config, key, value)
        if found not in (None, value):
            raise ConfigError(f"{hf_config.model_type}: {key}={found} changes the logits and is not supported")


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        temperature: float,
        chunk: int,
        want_entropy: bool,
        want_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens, dtype = len(hidden_TH), _wide(hidden_TH.dtype)
        stats = _implementation(hidden_TH).chunk_stats
        lse_T, logprobs_T = (hidden_TH.new_empty(tokens, dtype=dtype) for _ in range(2))
        entropy_T = hidden_TH.new_empty(tokens, dtype=dtype) if want_entropy else None
        squares_T = hidden_TH.new_empty(tokens, dtype=dtype) if want_squares else None
        for part in _chunks(tokens, chunk):
            logits_CV = hidden_TH[part] @ weight_VH.T
            found = stats(logits_CV, targets_T[part], temperature, want_entropy, want_squares)
            for column_T, column_C in zip((lse_T, logprobs_T, entropy_T, squares_T), found, strict=True):
                if column_T is not None and column_C is not None:
                    column_T[part] = column_C
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, lse_T, entropy_T, squares_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T, squares_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, lse_T, entropy_T, squares_T = ctx.saved_tensors
        gradient = _implementation(hidden_TH).chunk_gradient
        of_logprob_T, of_entropy_T, of_squares_T = grads
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        d_hidden_TH = torch.zeros_like(hidden_TH) if want_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH, dtype=_wide(weight_VH.dtype)) if want_weight else None
        columns = (lse_T, of_logprob_T, of_entropy_T, entropy_T, of_squares_T, squares_T)
        for part in _chunks(len(hidden_TH), ctx.chunk):
            logits_CV = hidden_TH[part] @ weight_VH.T
            cut = (None if x is None else x[part] for x in columns)
            d_CV = gradient(logits_CV, targets_T[part], ctx.temperature, *cut)
            if d_hidden_TH is not None:
                torch.mm(d_CV, weight_VH, out=d_hidden_TH[part])
            if d_weight_VH is not None:
                _add_product(d_weight_VH, d_CV.T, hidden_TH[part])
        d_weight = None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype)
        return d_hidden_TH, d_weight, None, None, None, None, None


class _Torch:
    """The arithmetic on one chunk's logits by torch operations, few passes and mostly in place."""

    @staticmethod
    def chunk_stats(
        logits_CV: Tensor, targets_C: Tensor, temperature: float, want_entropy: bool, want_squares: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(logsumexp, log-prob of the target, entropy, sum of p^2) under softmax(logits / temperature), [C] each."""
        z_CV = _scaled(logits_CV, temperature)
        lse_C = z_CV.logsumexp(-1)
        logprobs_C = z_CV.gather(-1, targets_C[:, None])[:, 0] - lse_C
        if not (want_entropy or want_squares):
            return lse_C, logprobs_C, None, None
        logp_CV = z_CV.sub_(lse_C[:, None])
        p_CV = logp_CV.exp()
        squares_C = torch.linalg.vecdot(p_CV, p_CV) if want_squares else None
        return lse_C, logprobs_C, -torch.linalg.vecdot(p_CV, logp_CV) if want_entropy else None, squares_C

    @staticmethod
    def chunk_gradient(
        logits_CV: Tensor,
        targets_C: Tensor,
        temperature: float,
        lse_C: Tensor,
        of_logprob_C: Tensor | None,
        of_entropy_C: Tensor | None,
        entropy_C: Tensor | None,
        of_squares_C: Tensor | None,
        squares_C: Tensor | None,
    ) -> Tensor:
        """Gradient with respect to the logits, [C, V] in their type; may overwrite them. With z = logits / temperature:

        d logp(t)/dz = onehot(t) - p;  dH/dz = -p (log p + H);  d(sum p^2)/dz = 2 p (p - sum p^2).
        """
        logp_CV = _scaled(logits_CV, temperature).sub_(lse_C[:, None])
        p_CV = logp_CV.exp()
        if of_entropy_C is not None and entropy_C is not None:
            factor_CV = logp_CV.add_(entropy_C[:, None]).mul_(-of_entropy_C[:, None])
        else:
            factor_CV = logp_CV.zero_()
        if of_squares_C is not None and squares_C is not None:
            factor_CV.add_((p_CV - squares_C[:, None]).mul_(2 * of_squares_C[:, None]))
        if of_logprob_C is not None:
            factor_CV.sub_(of_logprob_C[:, None])
        d_CV = p_CV.mul_(factor_CV)
        if of_logprob_C is not None:
            d_CV.scatter_add_(1, targets_C[:, None], of_logprob_C[:, None])
        return d_CV.div_(temperature).to(logits_CV.dtype)


def _implementation(hidden: Tensor) -> Any:
    """Fused kernels where triton runs, torch's operations elsewhere (and for float64)."""
    if hidden.is_cuda and hidden.dtype != torch.float64 and find_spec("triton"):
        from spmd_rl.models import head_kernels

        return head_kernels
    return _Torch


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32 (float64); may overwrite them."""
    z_CV = logits_CV.to(_wide(logits_CV.dtype))
    return z_CV if temperature == 1.0 else z_CV.div_(temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's type, so that many chunks in bfloat16 do not round the sum each time."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))
