"""KL to a reference policy: estimators a token, the penalty in the reward, and its coefficient.

Shapes: any, equal for both log-probs; nats.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algorithms.masked import masked_mean

KL_ALIASES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Estimator names (verl's and Schulman's) -> ours; each also with a trailing `+`."""


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """An estimate of KL(pi || ref) from one sampled token each, with d = log pi - log ref:

    - k1 (kl): d;  abs: |d|;  k2 (mse): d^2 / 2;  k3 (low_var_kl): exp(-d) + d - 1, -d in [-20, 20], the result at most
      10
    - a trailing `+` keeps the value and takes k2's gradient, the only one of these whose expected gradient is the KL's.

    Schulman, Approximating KL Divergence, 2020, joschu.net/blog/kl-approx.html. ValueError for another kind.
    """
    name = KL_ALIASES.get(kind.removesuffix("+"))
    if name is None:
        raise ValueError(f"unknown KL estimator '{kind}'; use one of {', '.join(KL_ALIASES)}, or one with a trailing +")
    value = _estimate(log_prob - ref_log_prob, name)
    if not kind.endswith("+"):
        return value
    k2 = 0.5 * (log_prob - ref_log_prob).square()
    return k2 - k2.detach() + value.detach()


def _estimate(difference: Tensor, name: str) -> Tensor:
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return 0.5 * difference.square()
    bounded = torch.clamp(-difference, min=-20, max=20)
    return torch.clamp(bounded.exp() - bounded - 1, min=-10, max=10)


def kl_in_reward(
    token_level_scores: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    *,
    kl_coef: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """`(token_level_rewards [N, L], kl [N])`: scores minus kl_coef times the token's KL, and each row's mean KL.

    The mean of kl [N] over the global batch is `actor/reward_kl_penalty` and what the coefficient's controller is told.
    Ouyang et al., InstructGPT, arXiv 2203.02155, equation 2.
    """
    kl = kl_penalty(old_log_probs, ref_log_prob, kind)
    kl = torch.where(response_mask > 0, kl, torch.zeros_like(kl)) * response_mask
    return token_level_scores - kl_coef * kl, masked_mean(kl, response_mask, dim=-1)


@dataclass
class KlController:
    """The coefficient of the KL penalty: `value`, moved by `update` when adaptive.

    Ziegler et al., Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, section 2.2.
    """

    value: float
    """The coefficient now. All the state there is, for a checkpoint."""
    target_kl: float | None = None
    """The KL aimed at, nats a token; unset means a fixed coefficient."""
    horizon: float = 10000
    """Samples over which a full error is corrected."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """value *= 1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon; n_steps = samples seen."""
        if self.target_kl is not None:
            error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
            self.value *= 1 + error * n_steps / self.horizon


def kl_controller(type: str, kl_coef: float, target_kl: float = 0.1, horizon: float = 10000) -> KlController:
    """`fixed` or `adaptive`. ValueError for another type, or when the adaptive one's horizon or target is not
    positive.
    """
    if type == "fixed":
        return KlController(kl_coef)
    if type != "adaptive":
        raise ValueError(f"unknown kl_ctrl.type '{type}'; use fixed or adaptive")
    if horizon <= 0 or target_kl <= 0:
        raise ValueError(f"kl_ctrl: horizon={horizon} and target_kl={target_kl} must be above 0")
    return KlController(kl_coef, target_kl, horizon)
