"""The batch's column of the experts that the rollout of a MoE model chose, as training takes it.

Shapes: T tokens of some rows laid end to end, L MoE layers of the model (dense ones have no entry), k experts a token.
"""

import torch
from torch import Tensor

from spmd_rl.data.batch import Batch

COLUMN = "routed_experts"
"""Ragged [T_i - 1, L, k]: of a row's prompt and response, without the last token, which no rollout reads."""
NONE = -1
"""Where nothing is given (a row's last token, padding) the router chooses."""


def routes_of(rows: Batch) -> Tensor:
    """What to choose for each token of the rows, prompt and response: int16 [T, L, k]."""
    column, lengths = rows[COLUMN], rows["prompts"].lengths + rows["responses"].lengths
    wrong = (column.lengths != lengths - 1).nonzero()[:, 0].tolist()
    if wrong:
        row, told = wrong[0], column.lengths[wrong[0]]
        raise ValueError(
            f"{COLUMN}: row {row} has choices for {told} tokens, but its prompt + response - 1 = {lengths[row] - 1}"
        )
    read_T = torch.ones(int(lengths.sum()), dtype=torch.bool)
    read_T[lengths.cumsum(0) - 1] = False
    routes = torch.full((len(read_T), *column.values.shape[1:]), NONE, dtype=torch.int16)
    routes[read_T] = column.values.to(torch.int16)
    return routes
