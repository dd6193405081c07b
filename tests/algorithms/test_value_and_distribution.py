from typing import Any

import pytest
import torch

from spmd_rl.algorithms import (
    BatchTotals,
    aggregate,
    entropy_from_logits,
    explained_variance,
    first_nonfinite,
    logprobs_from_logits,
    masked_whiten,
    sum_pi_squared_from_logits,
    value_loss,
)

from .fixtures import DTYPES, cases, close, load, tensor, tensors


@pytest.mark.parametrize(("case", "key"), cases("value_loss"))
def test_value_loss_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    dtype, params = DTYPES[key], case["params"]
    columns = tensors(case["inputs"], ("vpreds", "values", "returns", "response_mask"), dtype)
    leaf, mask = columns["vpreds"].requires_grad_(), columns["response_mask"]
    n, length = mask.shape
    row = torch.arange(n).repeat_interleave(length)
    loss, metrics = value_loss(
        **{k: v.flatten() for k, v in columns.items()}, cliprange_value=params["cliprange_value"]
    )
    counted = BatchTotals.of(mask.flatten(), row, n)
    totals = BatchTotals(
        params.get("batch_num_tokens") or counted.tokens, params.get("global_batch_size") or counted.sequences
    )
    factor = params.get("loss_scale_factor") or length
    value = aggregate(loss, mask.flatten(), row, n, params["loss_agg_mode"], totals, loss_scale_factor=factor)
    value = value * params.get("dp_size", 1)
    value.backward()
    close(value, case[key]["vf_loss"], dtype)
    assert leaf.grad is not None
    close(leaf.grad, case[key]["grad_vpreds"], dtype)
    total, weight = metrics["critic/vf_clipfrac"]
    close(total / weight, case[key]["vf_clipfrac"], dtype)


@pytest.mark.parametrize(("case", "key"), cases("entropy"))
def test_entropy_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    dtype = DTYPES[key]
    logits, mask = tensor(case["inputs"]["logits"], dtype), tensor(case["inputs"]["response_mask"], dtype)
    entropy = entropy_from_logits(logits)
    close(entropy, case[key]["token_entropy"], dtype)
    n, length = mask.shape
    row = torch.arange(n).repeat_interleave(length)
    totals = BatchTotals.of(mask.flatten(), row, n)
    mode = case["params"]["loss_agg_mode"]
    value = aggregate(entropy.flatten(), mask.flatten(), row, n, mode, totals, loss_scale_factor=length)
    close(value, case[key]["entropy_loss"], dtype)


@pytest.mark.parametrize(("case", "key"), cases("logprobs"))
def test_logprobs_agree_with_reference(case: dict[str, Any], key: str) -> None:
    logits, labels = tensor(case["inputs"]["logits"], DTYPES[key]), torch.tensor(case["inputs"]["labels"])
    close(logprobs_from_logits(logits, labels), case[key]["logprobs"], DTYPES[key])


def test_distribution_of_known_probabilities() -> None:
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    logits = p.log() + 7.0
    assert float(entropy_from_logits(logits)) == pytest.approx(1.5 * 0.6931471805599453)
    assert float(sum_pi_squared_from_logits(logits)) == pytest.approx(0.375)
    assert float(logprobs_from_logits(logits, torch.tensor(1)).exp()) == pytest.approx(0.25)


@pytest.mark.parametrize("case", load("masked_ops"), ids=lambda c: c["name"])
def test_masked_whitening_agrees_with_reference(case: dict[str, Any]) -> None:
    values, mask = tensor(case["inputs"]["values"], torch.float32), tensor(case["inputs"]["mask"], torch.float32)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        masked_whiten(values, mask)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4), mask) == 0.0


def test_first_nonfinite_names_the_prompt() -> None:
    uid = torch.tensor([70, 71, 72])
    assert first_nonfinite("score", torch.zeros(3), uid) is None
    says = first_nonfinite("score", torch.tensor([0.0, torch.nan, torch.inf]), uid)
    assert says == "score is nan at uid 71 (row 1); 2 such values in 2 rows"
    padded = torch.zeros(3, 4).index_put((torch.tensor([2]), torch.tensor([3])), torch.tensor(-torch.inf))
    assert first_nonfinite("advantages", padded, uid) == (
        "advantages is -inf at uid 72 (row 2, token 3); 1 such values in 1 rows"
    )
    packed, row = torch.tensor([0.0, 0.0, 0.0, torch.nan]), torch.tensor([0, 0, 2, 2])
    assert first_nonfinite("old_log_probs", packed, uid, row) == (
        "old_log_probs is nan at uid 72 (row 2, token 1); 1 such values in 1 rows"
    )
