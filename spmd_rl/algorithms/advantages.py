"""Advantages over the whole global batch: `ADVANTAGES`, and how a caller uses one.

Every rank holds the columns of all N rows (gathered first) and calls the same pure function, so nothing here depends
on how the rows were split. An estimator has one of two shapes, told apart by its parameters:

- **scalar** (it names `scores`): one score a row [N] in, one advantage a row [N] out; only scalars have to be gathered;
- **per token** (it names `token_level_rewards`): right-padded [N, L] in, `(advantages, returns)` [N, L] out.

    estimator = advantage_estimator("grpo")
    estimator.scalar, estimator.needs, estimator.may_use   # False, ("values",), () for gae
    advantages, returns = estimator(token_level_rewards=r_NL, response_mask=m_NL, group=g_N, gamma=1.0, ...)   # [N, L]
    advantages_N = estimator.per_row(scores=s_N, group=g_N, ...)                                              # scalar
    ones only

Columns: `scores` [N] = sum of a row's token rewards; `group` int64 [N], 0..G-1 (see `group_index`); `lengths` [N] = a
row's counted tokens; `rewards` [N, K] = each reward function's own score; `reward_baselines` [N] = the greedy reply's
score; `values`, `old_log_probs`, `sum_pi_squared` (sum over the vocabulary of p^2), `rollout_is_weights` [N, L].
Settings are keyword arguments (`gamma`, `lam`, `epsilon`, `norm_adv_by_std_in_grpo`, `weights`, `handle_zero_tail` …);
the caller may offer all it has, an estimator takes those it names.

Your own is a function in a file, with a signature as below: `algorithm.adv_estimator=my_rl/advantages.py:centred`,
where `def centred(scores, group): ...`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmd_rl.algorithms.group_advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_multi_trajectory,
    grpo_passk,
    grpo_vectorized,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    rloo_vectorized,
)
from spmd_rl.algorithms.registry import resolve
from spmd_rl.algorithms.returns import gae, reinforce_plus_plus, remax
from spmd_rl.algorithms.signature import offered, parameters
from spmd_rl.algorithms.token_baseline import optimal_token_baseline, tir_optimal_token_baseline

COLUMNS = (
    "lengths",
    "rewards",
    "reward_baselines",
    "values",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
    "trajectory",
    "turn",
)
"""What an estimator may name besides scores or token_level_rewards, response_mask and group."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator and what it must be given."""

    fn: Callable[..., Any]
    """The function itself."""
    needs: tuple[str, ...]
    """Columns it cannot do without; all of COLUMNS."""
    may_use: tuple[str, ...]
    """Columns it uses when they are there."""
    scalar: bool
    """True: one score a row in, one advantage a row out."""

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> "Estimator":
        """Read the needs off the parameters of `fn`."""
        named = parameters(fn)
        columns = {name: optional for name, optional in named.items() if name in COLUMNS}
        return cls(
            fn=fn,
            needs=tuple(name for name, optional in columns.items() if not optional),
            may_use=tuple(name for name, optional in columns.items() if optional),
            scalar="token_level_rewards" not in named,
        )

    def per_row(self, **columns_and_settings: Any) -> Tensor:
        """One advantage a row [N], for a scalar estimator. ValueError for the others."""
        if not self.scalar:
            raise ValueError(f"{getattr(self.fn, '__name__', self.fn)} works on tokens, it has no advantage of a row")
        with torch.no_grad():
            result: Tensor = self.fn(**offered(self.fn, columns_and_settings))
        return result

    def __call__(
        self, *, token_level_rewards: Tensor, response_mask: Tensor, group: Tensor, **columns_and_settings: Any
    ) -> tuple[Tensor, Tensor]:
        """`(advantages, returns)`, both [N, L] in the dtype of the rewards. A scalar estimator's are 0 outside the
        mask.
        """
        given = {"group": group, "lengths": response_mask.sum(-1), **columns_and_settings}
        if self.scalar:
            advantages_N = self.per_row(scores=token_level_rewards.sum(-1), **given)
            advantages = spread(advantages_N, response_mask).to(token_level_rewards.dtype)
            return advantages, advantages
        given |= {"token_level_rewards": token_level_rewards, "response_mask": response_mask}
        with torch.no_grad():
            result: tuple[Tensor, Tensor] = self.fn(**offered(self.fn, given))
        return result


def spread(per_row_N: Tensor, response_mask: Tensor) -> Tensor:
    """A row's value at each of its counted tokens, 0 elsewhere: [N, L]."""
    return per_row_N[:, None] * response_mask


ADVANTAGES: dict[str, Estimator] = {
    fn.__name__: Estimator.of(fn)
    for fn in (
        grpo,
        grpo_vectorized,
        grpo_passk,
        grpo_multi_trajectory,
        rloo,
        rloo_vectorized,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        opo,
        gpg,
        gdpo,
        gae,
        optimal_token_baseline,
        tir_optimal_token_baseline,
    )
}


def advantage_estimator(name: str) -> Estimator:
    """The estimator called `name`, or the user's function at `file.py:function`. ConfigError when there is none."""
    found = resolve(name, ADVANTAGES, "advantage estimator")
    return found if isinstance(found, Estimator) else Estimator.of(found)
