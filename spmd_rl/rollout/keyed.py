"""Sampling inside a foreign engine's loop: which rows are in the batch, at which position of their reply, and where the
log-probs of the drawn tokens are kept on the device.

Shapes: R replies of a call, B rows of the engine's batch, M tokens of a reply at most, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.rollout.sampling import SamplingParams, sample


class KeyedDraws:
    """One generate call's draws. The engine names its requests; everything else is a tensor on the device."""

    def __init__(self, params: SamplingParams, keys_R: Tensor, prompt_lengths_R: Tensor, device: torch.device) -> None:
        """`prompt_lengths_R`: tokens before the reply's position 0."""
        self.params = params
        self.keys_R, self.origins_R = keys_R.to(device), prompt_lengths_R.to(device)
        width = params.max_tokens + 1  # the last column takes what belongs to no position
        self.log_probs_RM = torch.zeros(len(keys_R), width, device=device)
        self.row_of: dict[str, int] = {}
        self._names: list[str] = []
        self._rows_B = torch.zeros(0, dtype=torch.int64, device=device)

    def draw(self, logits_BV: Tensor, names: Sequence[str], lengths_B: Tensor) -> Tensor:
        """The next token of each row, int64 [B]; `lengths_B` counts the tokens of each row so far.

        A row whose prompt is not done yet, or that the engine runs past its end, draws a token that nobody keeps.
        """
        if self._names != names:
            self._names = list(names)
            rows = torch.tensor([self.row_of[name] for name in names], dtype=torch.int64)
            self._rows_B = rows.to(logits_BV.device, non_blocking=True)
        rows_B = self._rows_B
        positions_B = lengths_B[: len(names)] - self.origins_R[rows_B]
        tokens_B, log_probs_B = sample(logits_BV, self.params, self.keys_R[rows_B], positions_B)
        limit = self.params.max_tokens
        places_B = torch.where((positions_B < 0) | (positions_B > limit), limit, positions_B)
        self.log_probs_RM[rows_B, places_B] = log_probs_B
        return tokens_B
