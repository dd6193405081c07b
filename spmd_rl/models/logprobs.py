"""The head: log-probs and entropy of given tokens from hidden states, a chunk of tokens at a time.

Logits exist for one chunk only and are computed again in the backward: memory does not grow with tokens x vocabulary.

Shapes: T tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
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
        lse_T, logprobs_T = (hidden_TH.new_empty(tokens, dtype=dtype) for _ in range(2))
        entropy_T = hidden_TH.new_empty(tokens, dtype=dtype) if want_entropy else None
        squares_T = hidden_TH.new_empty(tokens, dtype=dtype) if want_squares else None
        for part in _chunks(tokens, chunk):
            z_CV = _scaled_logits(hidden_TH[part], weight_VH, temperature)
            lse_T[part] = z_CV.logsumexp(-1)
            logprobs_T[part] = z_CV.gather(-1, targets_T[part, None])[:, 0] - lse_T[part]
            if entropy_T is not None or squares_T is not None:
                logp_CV = z_CV.sub_(lse_T[part, None])
                p_CV = logp_CV.exp()
                if squares_T is not None:
                    squares_T[part] = torch.linalg.vecdot(p_CV, p_CV)
                if entropy_T is not None:
                    entropy_T[part] = -torch.linalg.vecdot(p_CV, logp_CV)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, lse_T, entropy_T, squares_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T, squares_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, lse_T, entropy_T, squares_T = ctx.saved_tensors
        of_logprob_T, of_entropy_T, of_squares_T = grads
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        d_hidden_TH = torch.zeros_like(hidden_TH) if want_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH, dtype=_wide(weight_VH.dtype)) if want_weight else None
        for part in _chunks(len(hidden_TH), ctx.chunk):
            z_CV = _scaled_logits(hidden_TH[part], weight_VH, ctx.temperature)
            d_CV = _logit_gradient(
                z_CV.sub_(lse_T[part, None]),
                targets_T[part],
                _cut(of_logprob_T, part),
                *(_cut(x, part) for x in (of_entropy_T, entropy_T, of_squares_T, squares_T)),
            )
            d_CV = d_CV.div_(ctx.temperature).to(hidden_TH.dtype)
            if d_hidden_TH is not None:
                d_hidden_TH[part] = d_CV @ weight_VH
            if d_weight_VH is not None:
                _add_product(d_weight_VH, d_CV.T, hidden_TH[part])
        d_weight = None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype)
        return d_hidden_TH, d_weight, None, None, None, None, None


def _logit_gradient(
    logp_CV: Tensor,
    targets_C: Tensor,
    of_logprob_C: Tensor | None,
    of_entropy_C: Tensor | None,
    entropy_C: Tensor | None,
    of_squares_C: Tensor | None,
    squares_C: Tensor | None,
) -> Tensor:
    """Gradient with respect to the scaled logits, [C, V]; overwrites logp.

    d logp(t)/dz = onehot(t) - p;  dH/dz = -p (log p + H);  d(sum p^2)/dz = 2 p (p - sum p^2).
    """
    p_CV = logp_CV.exp()
    if of_entropy_C is not None and entropy_C is not None:
        factor_CV = logp_CV.add_(entropy_C[:, None]).mul_(-of_entropy_C[:, None])
    else:
        factor_CV = logp_CV.zero_()
    if of_logprob_C is not None:
        factor_CV.sub_(of_logprob_C[:, None])
    if of_squares_C is not None and squares_C is not None:
        factor_CV.add_((p_CV - squares_C[:, None]).mul_(2 * of_squares_C[:, None]))
    d_CV = p_CV.mul_(factor_CV)
    if of_logprob_C is not None:
        d_CV.scatter_add_(1, targets_C[:, None], of_logprob_C[:, None])
    return d_CV


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """Fresh logits / temperature, [C, V] float32 (float64)."""
    z_CV = (hidden_CH @ weight_VH.T).to(_wide(hidden_CH.dtype))
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


def _cut(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]
