"""Any split of a mini-batch into ranks and micro-batches gives the same loss, gradient and metrics: 1e-9 in float64."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms import AGGREGATIONS, POLICY_LOSSES, BatchTotals, TokenBatch, aggregate

from .fixtures import DTYPES, cases, close, load, settings_of, take, tensor, tensors, totals_of

SETTINGS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -10.0, "clip_cov_ub": 10.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
    "bypass_mode": {
        "loss_type": "reinforce",
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.2_5.0",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.3_3.0,2.0",
    },
}
Layout = list[list[list[int]]]


def summed(
    name: str, batch: TokenBatch, layout: Layout, mode: str, given_settings: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """As an engine does it: statistics of the whole, totals of all parts, then the shares of ranks and
    micro-batches.
    """
    loss = POLICY_LOSSES[name]
    leaf = batch.log_prob.detach().clone().requires_grad_()
    batch = batch.with_columns(log_prob=leaf)
    if loss.needs_statistics(**given_settings):
        rows = [r for rank in layout for micro in rank for r in micro]
        whole = take(batch, rows)  # gathered over ranks: not in the order of the batch
        back = take(whole.with_columns(**loss.statistics(whole, **given_settings).columns), inverse(rows))
        batch = back.with_columns(log_prob=leaf)
    parts = [take(batch, micro) for rank in layout for micro in rank]
    totals = BatchTotals(0, 0)
    for part in parts:
        totals = totals + totals_of(part)
    value, metrics = torch.zeros((), dtype=torch.float64), defaultdict(lambda: [0.0, 0.0])
    for part in parts:
        share, found = loss.share(part, totals=totals, mode=mode, loss_scale_factor=7, **given_settings)
        value = value + share
        for key, (total, weight) in found.items():
            metrics[key][0] += float(total)
            metrics[key][1] += float(weight)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad, {k: t / max(w, 1) for k, (t, w) in metrics.items()}


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def same(name: str, batch: TokenBatch, layout: Layout, mode: str, given_settings: dict[str, Any]) -> None:
    whole = summed(name, batch, [[list(range(batch.rows))]], mode, given_settings)
    split = summed(name, batch, layout, mode, given_settings)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-9, atol=1e-9)
    assert split[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-9)


def layout_batch(case: dict[str, Any]) -> TokenBatch:
    columns = tensors(case["inputs"], ("old_log_prob", "log_prob", "advantages"), torch.float64)
    return TokenBatch.from_padded(**columns, response_mask=tensor(case["inputs"]["response_mask"], torch.float64))


def layouts() -> list[Layout]:
    found = {str(c["inputs"]["layout_rank_micro_rows"]): c for c in load("policy_loss_layout")}
    return [c["inputs"]["layout_rank_micro_rows"] for c in found.values()]


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in load("policy_loss_layout")])
def test_layout_cases_agree_or_are_the_whole_batchs_value_where_the_reference_depends_on_the_layout(
    case: dict[str, Any],
) -> None:
    name, layout = case["params"]["loss_mode"], case["inputs"]["layout_rank_micro_rows"]
    mode, chosen = case["params"]["loss_agg_mode"], settings_of(case["params"])
    batch = layout_batch(case)
    value, gradient, _ = summed(name, batch, layout, mode, chosen)
    depends = name in ("geo_mean", "kl_cov", "clip_cov") and len(layout) > 1
    if not depends:
        close(value, case["outputs"]["total_loss_f64"], torch.float64, rtol=1e-8)
        close(gradient.view(12, -1), case["outputs"]["total_grad_f64"], torch.float64, rtol=1e-8)
    else:
        assert abs(float(value) - case["outputs"]["total_loss_f64"]) > 1e-3, "no longer a fault of the reference"
    same(name, batch, layout, mode, chosen)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_and_aggregation_on_the_reference_layouts(name: str, mode: str) -> None:
    batch = layout_batch(load("policy_loss_layout")[0])
    for layout in layouts():
        same(name, batch, layout, mode, SETTINGS.get(name, {}))


@st.composite
def split_batches(draw: st.DrawFn) -> tuple[TokenBatch, Layout]:
    """Ragged rows with holes in their masks, empty rows and rows without a counted token, dealt out in any order."""
    lengths = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=1, max_size=8)))
    rows, tokens = len(lengths), int(lengths.sum())
    torch.manual_seed(draw(st.integers(0, 999)))
    row = torch.arange(rows).repeat_interleave(lengths)
    old = -torch.rand(tokens, dtype=torch.float64) * 3
    coarse = draw(st.booleans())  # few distinct values: ties
    moved = torch.randn(tokens, dtype=torch.float64) * draw(st.sampled_from([0.0, 0.3, 3.0]))
    advantages = torch.randn(rows, dtype=torch.float64)[row] * draw(st.sampled_from([0.0, 1.0]))
    mask = (torch.rand(tokens) > draw(st.sampled_from([0.0, 0.3]))).double()
    batch = TokenBatch(
        log_prob=(old + moved).round(decimals=0) if coarse else old + moved,
        old_log_prob=old,
        advantages=advantages,
        response_mask=mask,
        row=row,
        rows=rows,
        uid=torch.arange(rows) // 2,
        sample=torch.arange(rows) % 2,
        rollout_is_weights=torch.rand(tokens, dtype=torch.float64) if draw(st.booleans()) else None,
    )
    order = draw(st.permutations(range(rows)))
    ranks = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    micros = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    layout: Layout = [[[] for _ in range(3)] for _ in range(4)]
    for r in order:
        layout[ranks[r]][micros[r]].append(r)
    return batch, layout


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=25, deadline=None)
@given(drawn=split_batches(), mode=st.sampled_from(AGGREGATIONS))
def test_every_loss_is_the_same_for_any_split(name: str, drawn: tuple[TokenBatch, Layout], mode: str) -> None:
    batch, layout = drawn
    chosen = dict(SETTINGS.get(name, {}))
    if not batch.response_mask.sum():
        chosen = {k: v for k, v in chosen.items() if not k.startswith("rollout_")}
    same(name, batch, layout, mode, chosen)


@pytest.mark.parametrize(("case", "key"), cases("agg_loss"))
def test_aggregation_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    params, dtype = case["params"], DTYPES[key]
    loss, mask = tensor(case["inputs"]["loss_mat"], dtype).requires_grad_(), tensor(case["inputs"]["loss_mask"], dtype)
    n, length = mask.shape
    row = torch.arange(n).repeat_interleave(length)
    counted = BatchTotals.of(mask.flatten(), row, n)
    if "raises" in case[key]:
        assert params["dp_size"] > 1, "the reference must be given the global count; here it is not optional"
        return
    totals = BatchTotals(
        params.get("batch_num_tokens") or counted.tokens, params.get("global_batch_size") or counted.sequences
    )
    factor = params.get("loss_scale_factor") or length
    value = params.get("dp_size", 1) * aggregate(
        loss.flatten(), mask.flatten(), row, n, params["loss_agg_mode"], totals, loss_scale_factor=factor
    )
    value.backward()
    close(value, case[key]["loss"], dtype)
    assert loss.grad is not None
    close(loss.grad, case[key]["grad"], dtype)


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in load("agg_loss_dp_invariance")])
def test_aggregation_is_invariant_and_agrees(case: dict[str, Any]) -> None:
    mode, inputs = case["params"]["loss_agg_mode"], case["inputs"]
    loss, mask = tensor(inputs["loss_mat"], torch.float64), tensor(inputs["loss_mask"], torch.float64)
    length = mask.shape[1]
    totals = BatchTotals.of(mask.flatten(), torch.arange(12).repeat_interleave(length), 12)
    assert totals.tokens == case["params"]["batch_num_tokens"]
    # Where one row is empty the reference still divides by all 12; the caller of `aggregate` decides what it counts.
    totals = BatchTotals(totals.tokens, case["params"]["global_batch_size"])
    ranks = case["params"]["dp_size"]
    shares = [
        [
            ranks
            * aggregate(
                loss[micro].flatten(),
                mask[micro].flatten(),
                torch.arange(len(micro)).repeat_interleave(length),
                len(micro),
                mode,
                totals,
                loss_scale_factor=length,
            )
            for micro in rank
        ]
        for rank in inputs["layout_rank_micro_rows"]
    ]
    for ours, theirs in zip(shares, case["outputs"]["per_rank_per_micro_f64"], strict=True):
        close(torch.stack(ours), theirs, torch.float64)
    total = torch.stack([torch.stack(rank).sum() for rank in shares]).mean()
    close(total, case["outputs"]["mean_over_dp"], torch.float64, rtol=1e-9)


def test_totals_leave_out_empty_and_rejected_rows_and_add_up() -> None:
    mask, row = torch.tensor([1.0, 1, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 3])
    totals = BatchTotals.of(mask, row, 4)
    assert totals == BatchTotals(tokens=3, sequences=2)
    assert BatchTotals(*(totals + totals).tensor().tolist()) == BatchTotals(6, 4)


def test_aggregation_errors() -> None:
    one, row = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="token-sum"):
        aggregate(one, one, row, 1, "mean", BatchTotals(1, 1))
    with pytest.raises(ValueError, match="loss_scale_factor"):
        aggregate(one, one, row, 1, "seq-mean-token-sum-norm", BatchTotals(1, 1))
