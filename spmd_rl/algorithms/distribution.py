"""Log-probs, entropy and sum of squares of a categorical distribution given by logits: the plain reference forms.

Shapes: logits [..., V], labels int64 [...]; results [...]. Nats. Engines compute the same in chunks.
"""

import torch
from torch import Tensor


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[label] = logits[label] - logsumexp(logits)."""
    return logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = logsumexp(z) - sum_v p_v z_v."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """sum_v p_v^2 = exp(logsumexp(2 z) - 2 logsumexp(z)), for the optimal token baselines."""
    return torch.exp(torch.logsumexp(2 * logits, -1) - 2 * logits.logsumexp(-1))
