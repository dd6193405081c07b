"""Sampling whose noise belongs to the token, not to the rank or the batch.

Gumbel-max: argmax_v(log p_v + g_v) is a draw from p, with g_v = -log(-log u_v) [Gumbel 1954; Maddison et al. 2014,
"A* Sampling", arXiv:1411.0030]. u_v comes from a counter-based hash of (seed, step, uid, sample, position, v), so any
rank, batch or order draws the same token, and a rounding error of the logits flips one only in a near tie.

Shapes: B rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN32 = 0x9E3779B9 - (1 << 32)
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B - (1 << 32)


@dataclass(frozen=True)
class SamplingParams:
    """How to draw. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 keep every token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


def row_keys(seed: int, steps: int | Tensor, uids: Tensor, samples: Tensor) -> Tensor:
    """One 64-bit key a row, int64 [B], from (seed, step, uid, sample); one step for all, or int64 [B]."""
    keys = torch.empty(len(uids), dtype=torch.int64)
    rows = torch.stack([torch.as_tensor(steps).expand_as(uids), uids, samples], dim=1)
    for i, names in enumerate(rows.tolist()):
        word = 0
        for part in (seed, *names):
            word = _splitmix64(word ^ (part & _MASK64))
        keys[i] = word - (1 << 64) if word >= 1 << 63 else word
    return keys


def _splitmix64(x: int) -> int:
    """The output function of SplitMix64 [Steele, Lea, Flood 2014]."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def gumbel(keys_B: Tensor, positions_B: Tensor, vocab: int) -> Tensor:
    """Gumbel noise float32 [B, V] for the token at `positions_B` of the rows with `keys_B`."""
    low = (keys_B & 0xFFFFFFFF) ^ (positions_B * 0x632BE5AB & 0xFFFFFFFF)
    high = (keys_B >> 32 & 0xFFFFFFFF) + positions_B * 0x85157AF5 & 0xFFFFFFFF
    x = torch.arange(vocab, dtype=torch.int32, device=keys_B.device) * _GOLDEN32
    x = x[None] ^ _as_int32(low)[:, None]
    spare = torch.empty_like(x)
    _mix32(x, spare)
    x ^= _as_int32(high)[:, None]
    _mix32(x, spare)
    return _gumbel_of(x)


def _gumbel_of(bits: Tensor) -> Tensor:
    """-log(-log(1 - u)) of 32 uniform bits u, read as unsigned.

    The largest noise, which decides the draw, comes from the smallest u: there float32 keeps all 32 bits. (From u near
    1 it would come in steps of 2^-24, and once in 2^24 draws as infinity: with a vocabulary of 150,000 every 110th
    token would be drawn whatever its probability.)
    """
    u = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)  # in [-1/2, 1/2): the upper half of the range is negative
    u.add_(u < 0).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _as_int32(x: Tensor) -> Tensor:
    """The low 32 bits, reinterpreted as a signed int32."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def _mix32(x: Tensor, spare: Tensor) -> None:
    """A bijective avalanche mix of 32 bits, in place (xorshift-multiply, constants of C. Wellons' hash search)."""
    x ^= _shift(x, 16, spare)
    x *= _MIX_A
    x ^= _shift(x, 15, spare)
    x *= _MIX_B
    x ^= _shift(x, 16, spare)


def _shift(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """x >> bits as if unsigned, into `out`."""
    torch.bitwise_right_shift(x, bits, out=out)
    return out.bitwise_and_((1 << (32 - bits)) - 1)


def sample(
    logits_BV: Tensor, params: SamplingParams, keys_B: Tensor, positions_B: Tensor, rows_at_once: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: (tokens int64 [B], log-probs float32 [B] under the processed distribution).

    `rows_at_once` bounds the noise and the float32 logits that exist at one time; unset: what stays in a CPU's cache,
    or 256 rows on a GPU; there, without top-k and top-p, a kernel needs neither.
    """
    if rows_at_once is None and logits_BV.is_cuda and params.top_p >= 1 and params.top_k <= 0:
        from spmd_rl.rollout.sample_kernels import draw

        return draw(logits_BV, params.temperature, keys_B, positions_B)
    rows_at_once = rows_at_once or (256 if logits_BV.is_cuda else max(4, 200_000 // logits_BV.shape[1]))
    tokens, logprobs = [], []
    for at in range(0, len(logits_BV), rows_at_once):
        part = slice(at, at + rows_at_once)
        scaled = process(logits_BV[part], params)
        if params.temperature == 0:
            token = scaled.argmax(-1)
        else:
            token = (scaled + gumbel(keys_B[part], positions_B[part], scaled.shape[1])).argmax(-1)
        tokens.append(token)
        logprobs.append(scaled.gather(1, token[:, None])[:, 0] - scaled.logsumexp(-1))
    return torch.cat(tokens), torch.cat(logprobs)


def process(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, then top-p: float32 logits [B, V], -inf where a token is cut off.

    Nucleus sampling: Holtzman et al. 2019, arXiv:1904.09751. Greedy decoding keeps the plain logits.
    """
    scaled = logits_BV.float()
    if params.temperature not in (0.0, 1.0):
        scaled = scaled / params.temperature
    if params.top_k > 0 and params.top_k < scaled.shape[1]:
        kth = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    if params.top_p < 1.0:
        ordered, index = scaled.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the likelier tokens
        ordered = ordered.masked_fill(before >= params.top_p, -math.inf)
        scaled = torch.empty_like(scaled).scatter_(1, index, ordered)
    return scaled
