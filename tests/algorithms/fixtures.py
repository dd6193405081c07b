"""Reading the reference values in tests/fixtures/*.json.gz: cases, tensors, and the packed form of a padded batch."""

import gzip
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.algorithms import BatchTotals, TokenBatch

FOLDER = Path(__file__).parents[1] / "fixtures"
DTYPES = {"outputs": torch.float32, "outputs_f64": torch.float64}


def load(*names: str) -> list[dict[str, Any]]:
    return [c for n in names for c in json.loads(gzip.decompress((FOLDER / f"{n}.json.gz").read_bytes()))]


def cases(*names: str) -> list[Any]:
    """One pytest parameter a case and precision: (case, key of its outputs)."""
    found = [(c, key) for c in load(*names) for key in DTYPES if key in c or key == "outputs"]
    return [pytest.param(c, key, id=f"{c['name']}-{'f64' if 'f64' in key else 'f32'}") for c, key in found]


def tensor(values: Any, dtype: torch.dtype) -> Tensor:
    def number(x: Any) -> Any:
        return [number(v) for v in x] if isinstance(x, list) else float(x)

    return torch.tensor(number(values), dtype=dtype)


def tensors(inputs: dict[str, Any], names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: tensor(inputs[n], dtype) for n in names if inputs.get(n) is not None}


def close(actual: Tensor | float, expected: Any, dtype: torch.dtype, rtol: float | None = None) -> None:
    wanted = tensor(expected, torch.float64)
    rtol = rtol if rtol is not None else (1e-5 if dtype == torch.float32 else 1e-8)
    atol = 1e-7 if dtype == torch.float32 else 1e-12
    found = torch.as_tensor(actual, dtype=torch.float64).detach()
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


def totals_of(batch: TokenBatch) -> BatchTotals:
    return BatchTotals.of(batch.response_mask, batch.row, batch.rows)


def take(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    """These rows of a batch, in this order: a micro-batch."""
    at = torch.cat([torch.nonzero(batch.row == r)[:, 0] for r in rows] or [torch.empty(0, dtype=torch.int64)])
    lengths = torch.tensor([int((batch.row == r).sum()) for r in rows], dtype=torch.int64)
    columns: dict[str, Any] = {}
    for field in fields(batch):
        column = getattr(batch, field.name)
        if isinstance(column, Tensor):
            per_row = field.name in ("uid", "sample")
            columns[field.name] = column[torch.tensor(rows, dtype=torch.int64)] if per_row else column[at]
    return replace(batch, **columns | {"row": torch.arange(len(rows)).repeat_interleave(lengths), "rows": len(rows)})


def settings_of(params: dict[str, Any]) -> dict[str, Any]:
    """A loss case's settings, without what is the caller's business."""
    apart = ("policy_loss", "loss_mode", "loss_agg_mode", "global_batch_info", "torch_manual_seed")
    found = {k: v for k, v in params.items() if k not in apart} | params.get("policy_loss", {})
    return {k: v for k, v in found.items() if k != "loss_mode"}
