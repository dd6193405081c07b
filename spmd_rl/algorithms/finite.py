"""Finding nan and inf where they appear."""

import torch
from torch import Tensor


def first_nonfinite(name: str, values: Tensor, uid: Tensor, row: Tensor | None = None) -> str | None:
    """A sentence about the first nan or inf in `values`, None when all are finite.

    `values` [N] with one value a row, [N, L] padded, or [T] packed with `row` int64 [T]; `uid` int64 [N] is the prompt
    of each row. Leave places with mask 0 out (or at 0). The caller adds phase and rank.
    """
    bad = torch.nonzero(~torch.isfinite(values))
    if not len(bad):
        return None
    place = tuple(bad[0].tolist())
    owner = place[0] if row is None else int(row[place[0]])
    token = _token(place, row)
    rows = torch.unique(bad[:, 0] if row is None else row[bad[:, 0]])
    where = f"uid {int(uid[owner])} (row {owner}{'' if token is None else f', token {token}'})"
    return f"{name} is {float(values[place])} at {where}; {len(bad)} such values in {len(rows)} rows"


def _token(place: tuple[int, ...], row: Tensor | None) -> int | None:
    if row is not None:
        return place[0] - int((row < row[place[0]]).sum())
    return place[1] if len(place) > 1 else None
