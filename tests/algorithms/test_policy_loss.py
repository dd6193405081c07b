import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.algorithms import POLICY_LOSSES, BatchTotals, PolicyLoss, Statistics, TokenBatch, policy_loss
from spmd_rl.algorithms.covariance_losses import token_hash
from spmd_rl.config import ConfigError

from .fixtures import DTYPES, cases, close, settings_of, take, tensor, tensors, totals_of

COLUMNS = ("old_log_prob", "log_prob", "advantages", "rollout_is_weights")
PLAIN = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "cispo", "gpg", "dro", "kl_cov", "bypass_mode")


def load_batch(case: dict[str, Any], dtype: torch.dtype) -> tuple[TokenBatch, Tensor]:
    """The packed batch and the padded leaf that its log_prob comes from."""
    columns = tensors(case["inputs"], COLUMNS, dtype)
    leaf = columns["log_prob"].requires_grad_()
    return TokenBatch.from_padded(response_mask=tensor(case["inputs"]["response_mask"], dtype), **columns), leaf


def with_statistics(loss: PolicyLoss, batch: TokenBatch, settings: dict[str, Any]) -> tuple[TokenBatch, Statistics]:
    if not loss.needs_statistics(**settings):
        return batch, Statistics({}, {})
    found = loss.statistics(batch, **settings)
    return batch.with_columns(**found.columns), found


def agrees(case: dict[str, Any], key: str, loss: PolicyLoss, selected: Tensor | None = None) -> None:
    """Loss, gradient and metrics are the reference's, which multiplies by dp_size what is to be averaged over ranks."""
    dtype, expected, params, settings = DTYPES[key], case[key], case["params"], settings_of(case["params"])
    batch, leaf = load_batch(case, dtype)
    batch, found = with_statistics(loss, batch, settings)
    if selected is not None:
        batch = batch.with_columns(selected=selected.flatten())
    given = params.get("global_batch_info") or {}
    totals = BatchTotals(given["batch_num_tokens"], given["global_batch_size"]) if given else totals_of(batch)
    mode = params.get("loss_agg_mode", "token-mean")
    scale = leaf.shape[1]
    value, metrics = loss.share(batch, totals=totals, mode=mode, loss_scale_factor=scale, **settings)
    value = value * given.get("dp_size", 1)
    value.backward()
    close(value, expected["loss"], dtype)
    assert leaf.grad is not None
    close(leaf.grad, expected["grad_log_prob"], dtype)
    for name, (total, weight) in metrics.items():
        close(total / weight, expected["metrics"][name], dtype)
    for name, number in found.metrics.items():
        close(number, expected["metrics"][name], dtype)
    if found.metrics or not any(name.startswith("rollout_corr") for name in expected["metrics"]):
        assert set(metrics) | set(found.metrics) == set(expected["metrics"])


@pytest.mark.parametrize(("case", "key"), cases(*(f"policy_loss_{name}" for name in PLAIN)))
def test_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    loss = POLICY_LOSSES[case["params"]["loss_mode"]]
    if "raises" in case[key]:
        with pytest.raises(ValueError, match="positive"):
            loss(load_batch(case, DTYPES[key])[0], **settings_of(case["params"]))
        return
    agrees(case, key, loss)


@pytest.mark.parametrize(("case", "key"), cases("policy_loss_gspo_v091"))
def test_gspo_of_release_091_is_gspo_with_a_free_aggregation(case: dict[str, Any], key: str) -> None:
    agrees(case, key, replace(POLICY_LOSSES["gspo"], agg_mode=None))


@pytest.mark.parametrize(("case", "key"), cases("policy_loss_geo_mean"))
def test_geo_mean_counts_rows_with_tokens_where_the_reference_counts_empty_rows(case: dict[str, Any], key: str) -> None:
    """Equal to the reference with its number of rows; with ours, larger by rows / rows with tokens, whatever the
    layout.
    """
    dtype, loss, settings = DTYPES[key], POLICY_LOSSES["geo_mean"], settings_of(case["params"])
    batch, leaf = load_batch(case, dtype)
    ours, theirs = totals_of(batch), BatchTotals(totals_of(batch).tokens, batch.rows)
    value, metrics = loss.share(batch, totals=theirs, **settings)
    value.backward()
    close(value, case[key]["loss"], dtype)
    assert leaf.grad is not None
    close(leaf.grad, case[key]["grad_log_prob"], dtype)
    for name, expected in case[key]["metrics"].items():
        close(metrics[name][0] / metrics[name][1], expected, dtype)
    assert (ours.sequences, batch.rows) == (11, 12)
    right, _ = loss.share(batch, totals=ours, **settings)
    torch.testing.assert_close(right, value * 12 / 11)


@pytest.mark.parametrize(("case", "key"), cases("policy_loss_clip_cov"))
def test_clip_cov_cuts_as_many_tokens_of_the_same_candidates_where_the_reference_draws_by_torchs_generator(
    case: dict[str, Any], key: str
) -> None:
    """Its draw is read off its gradient; with it put in, loss, gradient and metrics agree. Ours differs in the draw
    only.
    """
    dtype, settings = DTYPES[key], settings_of(case["params"])
    loss = POLICY_LOSSES["clip_cov"]
    batch, leaf = load_batch(case, dtype)
    ours = with_statistics(loss, batch, settings)[0].selected
    candidates = loss.statistics(batch, **settings | {"clip_cov_ratio": 1.0}).columns["selected"]
    assert ours is not None
    free, _ = loss.share(batch.with_columns(selected=torch.zeros_like(candidates)), totals=totals_of(batch), **settings)
    gradient = torch.autograd.grad(free, leaf)[0].flatten()
    theirs = (gradient != 0) & (tensor(case[key]["grad_log_prob"], dtype).flatten() == 0)
    assert ours.sum() == theirs.sum()
    assert not (theirs & ~candidates).any()
    assert not (ours & ~candidates).any()
    agrees(case, key, loss, selected=theirs)


def some_batch(rows: int = 6, length: int = 5, seed: int = 0) -> TokenBatch:
    torch.manual_seed(seed)
    columns = {n: torch.randn(rows, length, dtype=torch.float64) for n in ("old_log_prob", "log_prob", "advantages")}
    columns["log_prob"], columns["old_log_prob"] = -columns["log_prob"].abs(), -columns["old_log_prob"].abs()
    columns["advantages"] = columns["advantages"][:, :1].expand(rows, length)
    mask = (torch.rand(rows, length) > 0.2).double()
    return TokenBatch.from_padded(
        **columns, response_mask=mask, uid=torch.arange(rows) // 2 + 100, sample=torch.arange(rows) % 2
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_selection_is_of_tokens_not_of_places(name: str) -> None:
    """Rows in another order: the same tokens are selected, of exactly the wanted number."""
    batch, loss = some_batch(), POLICY_LOSSES[name]
    settings = {"clip_cov_ratio": 0.1, "clip_cov_lb": -100.0, "clip_cov_ub": 100.0, "kl_cov_ratio": 0.1}
    order = [3, 0, 5, 1, 4, 2]
    picked = batch.with_columns(**loss.statistics(batch, **settings).columns)
    shuffled = take(batch, order)
    again = loss.statistics(shuffled, **settings).columns["selected"]
    expected = take(picked, order).selected
    assert expected is not None
    assert torch.equal(again, expected)
    assert again.sum() == max(1, int(0.1 * float(batch.response_mask.sum())))


def test_kl_cov_selects_the_wanted_number_among_equal_covariances() -> None:
    ones = torch.ones(4, 5, dtype=torch.float64)
    batch = TokenBatch.from_padded(log_prob=-ones, old_log_prob=-ones, advantages=ones, response_mask=ones)
    assert POLICY_LOSSES["kl_cov"].statistics(batch, kl_cov_ratio=0.25).columns["selected"].sum() == 5


def test_token_hash_is_spread_out() -> None:
    keys = token_hash(some_batch(rows=64, length=64))
    assert len(keys.unique()) == 64 * 64
    assert abs(float(keys.double().mean()) / 2**63 - 0.5) < 0.02


def test_what_stands_under_mask_0_is_never_read() -> None:
    batch = some_batch()
    hidden = batch.response_mask == 0
    poisoned = batch.with_columns(
        log_prob=batch.log_prob.masked_fill(hidden, torch.nan).requires_grad_(),
        old_log_prob=batch.old_log_prob.masked_fill(hidden, -torch.inf),
        advantages=batch.advantages.masked_fill(hidden, torch.inf),
    )
    for name, loss in POLICY_LOSSES.items():
        settings = {"dro_beta": 0.1, "loss_type": "reinforce", "rollout_is": "token"}
        ready, _ = with_statistics(loss, poisoned, settings)
        value, metrics = loss.share(ready, totals=totals_of(ready), **settings)
        (gradient,) = torch.autograd.grad(value, poisoned.log_prob)
        assert value.isfinite(), name
        assert gradient.isfinite().all(), name
        assert all(total.isfinite() for total, _ in metrics.values()), name
        clean, _ = with_statistics(loss, batch, settings)
        torch.testing.assert_close(value, loss.share(clean, totals=totals_of(clean), **settings)[0])


def test_padding_changes_nothing() -> None:
    """The same rows without their masked places: same loss and metrics, same gradient at the tokens that count."""
    batch = some_batch().with_columns(uid=None, sample=None)
    counted = batch.response_mask > 0
    names = ("log_prob", "old_log_prob", "advantages", "response_mask", "row")
    tight = batch.with_columns(**{n: getattr(batch, n)[counted] for n in names})
    for name, loss in POLICY_LOSSES.items():
        settings = {"dro_beta": 0.1, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "kl_cov_ratio": 0.3}
        found = []
        for one in (batch, tight):
            leaf = one.log_prob.clone().requires_grad_()
            ready, _ = with_statistics(loss, one.with_columns(log_prob=leaf), settings)
            value, metrics = loss.share(ready, totals=totals_of(ready), mode="seq-mean-token-mean", **settings)
            found.append((value.detach(), torch.autograd.grad(value, leaf)[0], metrics))
        torch.testing.assert_close(found[0][0], found[1][0], msg=name)
        torch.testing.assert_close(found[0][1][counted], found[1][1], msg=name)
        assert not found[0][1][~counted].any()
        for key, (total, weight) in found[0][2].items():
            torch.testing.assert_close((total, weight), found[1][2][key])


def test_ratios_are_bounded() -> None:
    """Log-ratio 50 and A = -1: the token losses see exp(20), gspo's sequence exp(10), and none overflows."""
    one = torch.ones(1, 2, dtype=torch.float64)
    batch = TokenBatch.from_padded(log_prob=0 * one, old_log_prob=-50 * one, advantages=-one, response_mask=one)
    loose = {"clip_ratio": 1e12, "clip_ratio_c": 1e12, "dro_beta": 0.1}
    assert POLICY_LOSSES["vanilla"](batch, **loose)[0].tolist() == pytest.approx([math.exp(20)] * 2)
    assert POLICY_LOSSES["gspo"](batch, **loose)[0].tolist() == pytest.approx([math.exp(10)] * 2)
    assert POLICY_LOSSES["vanilla"](batch, clip_ratio_c=3.0)[0].tolist() == [3.0, 3.0]


def test_an_empty_micro_batch_adds_nothing_and_still_has_a_gradient() -> None:
    whole = some_batch()
    for name, loss in POLICY_LOSSES.items():
        settings = {"dro_beta": 0.1}
        ready, _ = with_statistics(loss, whole, settings)
        empty = take(ready, [])
        leaf = empty.log_prob.clone().requires_grad_()
        value, metrics = loss.share(empty.with_columns(log_prob=leaf), totals=totals_of(whole), **settings)
        value.backward()
        assert value == 0, name
        assert leaf.grad is not None
        assert all(total == 0 and weight == 0 for total, weight in metrics.values()), name


def test_rejected_rows_leave_the_normaliser() -> None:
    """Bypass mode with a rule that rejects whole sequences gives the loss of the batch without them."""
    batch, loss = some_batch(), POLICY_LOSSES["bypass_mode"]
    settings = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.4"}
    ready, _ = with_statistics(loss, batch, settings)
    kept = [r for r in range(6) if ready.response_mask[ready.row == r].sum() > 0]
    assert 0 < len(kept) < 6
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        value, _ = loss.share(ready, totals=totals_of(ready), mode=mode, **settings)
        without = take(batch, kept)
        expected, _ = loss.share(without, totals=totals_of(without), mode=mode)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_bypass_mode_asks_for_the_extra_forward_only_when_it_must() -> None:
    loss = POLICY_LOSSES["bypass_mode"]
    assert not loss.needs_statistics(loss_type="ppo_clip", rollout_is="token", clip_ratio=0.2)
    assert not loss.needs_statistics(loss_type="reinforce")
    assert loss.needs_statistics(loss_type="reinforce", rollout_is="token")
    assert loss.needs_statistics(rollout_rs="token_k1")
    assert [n for n, one in POLICY_LOSSES.items() if one.needs_statistics()] == ["clip_cov", "kl_cov"]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}, "above 1"),
        ("dro", {}, "dro_beta=None"),
        ("dro", {"dro_beta": -1.0}, "dro_beta=-1.0"),
        ("bypass_mode", {"loss_type": "sft"}, "ppo_clip, reinforce"),
        ("clip_cov", {}, "statistics"),
    ],
)
def test_bad_settings(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        POLICY_LOSSES[name](some_batch(), **settings)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_bad_share_of_tokens(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}_ratio=0"):
        POLICY_LOSSES[name].statistics(some_batch(), clip_cov_ratio=0.0, kl_cov_ratio=0.0)


def test_a_loss_of_the_users(tmp_path: Any) -> None:
    file = tmp_path / "losses.py"
    file.write_text("def plain(batch, *, scale=1.0):\n    return -scale * batch.advantages * batch.log_prob, {}\n")
    batch = some_batch()
    mine, _ = policy_loss(f"{file}:plain").share(batch, totals=totals_of(batch), scale=1.0, clip_ratio=0.3)
    gpg, _ = policy_loss("gpg").share(batch, totals=totals_of(batch))
    assert mine == gpg


def test_unknown_name_shows_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'cispo'.*geo_mean"):
        policy_loss("cispo2")
