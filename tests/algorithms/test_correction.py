from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms import REJECTION_RULES, Correction, rollout_correction
from spmd_rl.algorithms.correction import is_band, rejection_bands

from .fixtures import DTYPES, cases, close, tensors


def correct(old: Tensor, sampled: Tensor, mask: Tensor, **settings_: Any) -> Correction:
    """A padded [N, L] batch, packed for the call."""
    n, length = mask.shape
    row = torch.arange(n).repeat_interleave(length)
    return rollout_correction(old.flatten(), sampled.flatten(), mask.flatten(), row, n, **settings_)


@pytest.mark.parametrize(("case", "key"), cases("rollout_correction"))
def test_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    dtype, expected = DTYPES[key], case[key]
    columns = tensors(case["inputs"], ("old_log_prob", "rollout_log_prob", "response_mask"), dtype)
    mask = columns["response_mask"]
    found = correct(columns["old_log_prob"], columns["rollout_log_prob"], mask, **case["params"])
    close(found.response_mask.view_as(mask), expected["response_mask"], dtype)
    if expected["rollout_is_weights"] is None:
        assert found.weights is None
    else:
        assert found.weights is not None
        close(found.weights.view_as(mask), expected["rollout_is_weights"], dtype)
    assert set(found.metrics) == set(expected["metrics"])
    for name, number in expected["metrics"].items():
        assert found.metrics[name] == pytest.approx(number, rel=1e-5, abs=2e-7), name


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_each_rule_takes_out_what_it_says(rule: str) -> None:
    """Row 0 agrees with the sampler; in row 1 one token is far off: token rules reject it alone, sequence rules the
    row.
    """
    sampled = -torch.ones(2, 4, dtype=torch.float64)
    old = sampled.clone()
    old[1, 2] += 3.0
    mask = torch.ones(2, 4, dtype=torch.float64)
    found = correct(old, sampled, mask, rollout_rs=rule, rollout_rs_threshold=1.1 if rule.endswith("k1") else 0.1)
    expected = mask.clone()
    if rule.startswith(("token", "binary")):
        expected[1, 2] = 0
    else:
        expected[1] = 0
    assert torch.equal(found.response_mask.view(2, 4), expected)
    assert found.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_weights_are_truncated_or_zeroed() -> None:
    sampled = torch.full((1, 3), -1.0, dtype=torch.float64)
    old = sampled + torch.tensor([[0.1, 0.5, 2.0]], dtype=torch.float64).log()
    mask = torch.ones(1, 3, dtype=torch.float64)

    def weights(**settings_: Any) -> list[float]:
        found = correct(old, sampled, mask, **settings_).weights
        assert found is not None
        return [round(x, 9) for x in found.tolist()]

    assert weights(rollout_is="token", rollout_is_threshold=1.5) == [0.1, 0.5, 1.5]
    assert weights(rollout_is="token", rollout_is_threshold="0.3_1.5") == [0.0, 0.5, 0.0]
    assert weights(rollout_is="sequence", rollout_is_threshold=2.0) == [0.1, 0.1, 0.1]
    normalized = weights(rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert sum(normalized) == pytest.approx(3.0, rel=1e-7)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.sampled_from(["token", "sequence"]), st.sampled_from(REJECTION_RULES), st.booleans())
def test_same_for_any_row_order_and_finite_with_empty_rows(seed: int, level: str, rule: str, normalize: bool) -> None:
    torch.manual_seed(seed)
    old, sampled = (-torch.rand(5, 4, dtype=torch.float64) * 3 for _ in range(2))
    mask = (torch.rand(5, 4) > 0.4).double()
    mask[0], mask[1, 0] = 0, 1
    chosen = {
        "rollout_is": level,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": rule,
        "rollout_rs_threshold": 1.2,
    }
    found = correct(old, sampled, mask, **chosen)
    assert found.weights is not None
    assert found.weights.isfinite().all()
    assert all(value == value for value in found.metrics.values())
    order = torch.randperm(5)
    again = correct(old[order], sampled[order], mask[order], **chosen)
    assert again.weights is not None
    torch.testing.assert_close(again.weights.view(5, 4), found.weights.view(5, 4)[order])
    assert torch.equal(again.response_mask.view(5, 4), found.response_mask.view(5, 4)[order])
    assert again.metrics == pytest.approx(found.metrics, rel=1e-9, abs=1e-9)


def test_thresholds() -> None:
    assert is_band(2) == (None, 2.0)
    assert is_band("1.2") == (None, 1.2)
    assert is_band("0.5_2.0") == (0.5, 2.0)
    bands = rejection_bands("token_k1,seq_max_k2", "2.0,0.3")
    assert bands["token_k1"] == pytest.approx((-0.6931471805599453, 0.6931471805599453))
    assert bands["seq_max_k2"][1] == 0.3
    assert rejection_bands("token_k2,token_k3", 0.1) == rejection_bands("token_k2,token_k3", "0.1,0.1")


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"rollout_is": "group"}, "token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "lower <= upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "lower <= upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "high"}, "neither a number"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "unknown token_k4"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "1 or 1 thresholds, not 2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "only an upper"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": -1}, "above 0"),
    ],
)
def test_bad_settings(settings_: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        correct(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), **settings_)


def test_an_empty_mask_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token counts"):
        correct(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
