"""PPO's critic: the clipped value loss and how well the values explain the returns.

Shapes: T packed tokens; values and returns in the unit of the reward.
"""

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import masked_mean, masked_sum
from spmd_rl.algorithms.token_batch import Metrics


def value_loss(
    vpreds: Tensor, values: Tensor, returns: Tensor, response_mask: Tensor, *, cliprange_value: float = 0.5
) -> tuple[Tensor, Metrics]:
    """l = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 of each token [T], and `critic/vf_clipfrac`.

    `vpreds` v carries the gradient, `values` v_old are those the advantages were made with. To be aggregated like a
    policy loss (`aggregate`). The clip is not in a paper's equation: see Huang et al., The 37 Implementation Details
    of PPO, 2022.
    """
    keep = response_mask > 0
    vpreds, values, returns = (torch.where(keep, x, torch.zeros_like(x)) for x in (vpreds, values, returns))
    held = torch.maximum(torch.minimum(vpreds, values + cliprange_value), values - cliprange_value)
    plain, clipped = (vpreds - returns).square(), (held - returns).square()
    was_clipped = (clipped > plain).to(plain.dtype).detach()
    weight = response_mask.sum().to(plain.dtype)
    metrics = {"critic/vf_clipfrac": (masked_sum(was_clipped, response_mask), weight)}
    return 0.5 * torch.maximum(plain, clipped), metrics


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over counted tokens: 1 perfect, 0 no better than a constant. 0 when the returns are all
    equal.
    """
    difference = returns - values
    spread = masked_mean((returns - masked_mean(returns, response_mask)).square(), response_mask)
    left = masked_mean((difference - masked_mean(difference, response_mask)).square(), response_mask)
    return float(1 - left / spread) if spread > 0 else 0.0
