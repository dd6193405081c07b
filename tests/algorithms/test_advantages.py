import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms import ADVANTAGES, Estimator, advantage_estimator, group_index, masked_whiten
from spmd_rl.config import ConfigError

from .fixtures import DTYPES, cases, close, load, tensor, tensors

COLUMNS = ("values", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "reward_baselines")


def call(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = case["inputs"]
    columns = tensors(inputs, COLUMNS, dtype)
    settings_ = {k: v for k, v in case["params"].items() if k not in ("adv_estimator", "rollout_is_weights")}
    if keys := settings_.pop("gdpo_reward_keys", None):
        columns["rewards"] = torch.stack([tensor(inputs[k], dtype) for k in keys], 1)
        settings_["weights"] = settings_.pop("gdpo_reward_weights", None)
    uid = inputs.get("uid") or [key.split("_")[0] for key in inputs["batch_keys"]]
    if keys := inputs.get("batch_keys"):
        sessions = [key.rsplit("_", 1)[0] for key in keys]
        columns["trajectory"] = torch.tensor([sessions.index(s) for s in sessions])
        columns["turn"] = torch.tensor([int(key.rsplit("_", 1)[1]) for key in keys])
    return ADVANTAGES[case["params"].get("adv_estimator", "grpo_multi_trajectory")](
        token_level_rewards=tensor(inputs["token_level_rewards"], dtype),
        response_mask=tensor(inputs["response_mask"], dtype),
        group=torch.tensor([uid.index(u) for u in uid]),
        **columns,
        **settings_,
    )


@pytest.mark.parametrize(("case", "key"), cases("adv_group", "adv_gae", "adv_reinforce", "adv_otb"))
def test_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    dtype, expected = DTYPES[key], case[key]
    if "raises" in expected:
        with pytest.raises(ValueError, match="at least 2"):
            call(case, dtype)
        return
    rtol = 1e-5 if dtype == torch.float32 else 1e-6
    if case["params"].get("adv_estimator") == "grpo_vectorized":
        rtol = 2e-5
    advantages, returns = call(case, dtype)
    assert advantages.dtype == dtype
    close(advantages, expected["advantages"], dtype, rtol)
    if "returns" in expected:
        close(returns, expected["returns"], dtype, rtol)


def test_every_estimator_says_what_it_needs() -> None:
    needs = {name: e.needs for name, e in ADVANTAGES.items() if e.needs}
    assert needs == {
        "grpo_multi_trajectory": ("trajectory", "turn"),
        "reinforce_plus_plus_baseline": ("lengths",),
        "remax": ("reward_baselines",),
        "opo": ("lengths",),
        "gdpo": ("lengths",),
        "gae": ("values",),
        "optimal_token_baseline": ("old_log_probs", "sum_pi_squared"),
        "tir_optimal_token_baseline": ("old_log_probs", "sum_pi_squared"),
    }
    assert ADVANTAGES["gdpo"].may_use == ("rewards",)
    assert ADVANTAGES["optimal_token_baseline"].may_use == ("rollout_is_weights",)
    per_token = {name for name, e in ADVANTAGES.items() if not e.scalar}
    tokens = {"gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}
    assert per_token == tokens


def test_equal_scores_have_no_advantage_and_one_reply_keeps_its_score() -> None:
    scores, group = torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([0, 0, 0, 1])
    for name in ("grpo", "rloo", "grpo_vectorized"):
        got = ADVANTAGES[name].per_row(scores=scores, group=group)
        assert got[:3].abs().max() < 1e-9
        torch.testing.assert_close(got[3], torch.tensor(0.7), rtol=3e-6, atol=0)
    assert ADVANTAGES["rloo_vectorized"].per_row(scores=scores, group=group)[3] == 0


def test_whitening_one_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        masked_whiten(torch.ones(2, 3), torch.tensor([[1.0, 0, 0], [0, 0, 0]]))


def test_gdpo_takes_weights_as_list_or_tensor_and_none_means_ones() -> None:
    torch.manual_seed(0)
    given = {
        "scores": torch.zeros(6),
        "group": torch.arange(6) // 3,
        "lengths": torch.ones(6),
        "rewards": torch.rand(6, 2),
    }
    weighted = ADVANTAGES["gdpo"].per_row(**given, weights=[2.0, 1.0])
    assert torch.equal(weighted, ADVANTAGES["gdpo"].per_row(**given, weights=torch.tensor([2.0, 1.0])))
    assert not torch.allclose(weighted, ADVANTAGES["gdpo"].per_row(**given))
    assert torch.equal(ADVANTAGES["gdpo"].per_row(**given), ADVANTAGES["gdpo"].per_row(**given, weights=[]))


def test_gdpo_wants_one_weight_a_function() -> None:
    with pytest.raises(ValueError, match="3 weights for 2"):
        ADVANTAGES["gdpo"].per_row(
            scores=torch.ones(2),
            group=torch.zeros(2, dtype=torch.int64),
            lengths=torch.ones(2) * 3,
            rewards=torch.ones(2, 2),
            weights=[1.0, 1.0, 1.0],
        )


def test_gae_steps_over_tool_tokens() -> None:
    """With tokens of mask 0 taken out, the same rewards and values give the same advantages."""
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 0, 1]], dtype=torch.float64)
    group = torch.zeros(2, dtype=torch.int64)
    own = mask > 0
    with_tools, _ = ADVANTAGES["gae"](
        token_level_rewards=rewards, response_mask=mask, group=group, values=values, gamma=0.9, lam=0.8
    )
    without, _ = ADVANTAGES["gae"](
        token_level_rewards=rewards[own].view(2, 4),
        response_mask=torch.ones(2, 4, dtype=torch.float64),
        group=group,
        values=values[own].view(2, 4),
        gamma=0.9,
        lam=0.8,
    )
    torch.testing.assert_close(with_tools[own].view(2, 4), without, rtol=1e-12, atol=1e-12)


def test_what_stands_under_mask_0_is_never_read() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    values = torch.tensor([[0.1, 0.2, torch.nan], [0.3, torch.nan, torch.nan]])
    advantages, _ = ADVANTAGES["gae"](
        token_level_rewards=rewards, response_mask=mask, group=torch.tensor([0, 0]), values=values
    )
    assert advantages[mask > 0].isfinite().all()


def test_a_function_of_the_users(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def centred(scores, group):\n    return scores - scores.mean()\n")
    estimator = advantage_estimator(f"{file}:centred")
    assert isinstance(estimator, Estimator)
    assert estimator.scalar
    got, _ = estimator(
        token_level_rewards=torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        response_mask=torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        group=torch.tensor([0, 1]),
        gamma=0.5,
    )
    assert got.tolist() == [[-0.5, 0.0], [0.5, 0.5]]


def test_unknown_name_shows_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'grpo'.*reinforce_plus_plus"):
        advantage_estimator("grp")


def test_scalars_of_a_token_estimator_are_refused() -> None:
    with pytest.raises(ValueError, match="gae works on tokens"):
        ADVANTAGES["gae"].per_row(scores=torch.ones(2), group=torch.zeros(2, dtype=torch.int64))


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    n, length = draw(st.integers(2, 9)), draw(st.integers(1, 6))
    bits = st.lists(st.sampled_from([0.0, 1.0]), min_size=length, max_size=length)
    mask = torch.tensor(draw(st.lists(bits, min_size=n, max_size=n)), dtype=torch.float64)
    mask[0, 0] = mask[1, 0] = 1.0
    uid = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    scores = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), min_size=n, max_size=n))
    torch.manual_seed(draw(st.integers(0, 99)))
    rewards = torch.zeros(n, length, dtype=torch.float64)
    rewards[:, -1] = torch.tensor(scores, dtype=torch.float64)
    log_probs = -torch.rand(n, length, dtype=torch.float64)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "group": group_index(uid),
        "values": torch.randn(n, length, dtype=torch.float64),
        "old_log_probs": log_probs,
        "sum_pi_squared": log_probs.exp().square(),
        "reward_baselines": torch.rand(n, dtype=torch.float64),
        "rewards": torch.rand(n, 2, dtype=torch.float64),
        "trajectory": torch.arange(n),
        "turn": torch.zeros(n, dtype=torch.int64),
    }


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([n for n in ADVANTAGES if n != "grpo_passk"]), st.randoms())
def test_finite_masked_and_independent_of_row_order(batch: dict[str, Tensor], name: str, random: Any) -> None:
    """Any mask with two counted tokens, empty replies, groups of one, equal scores; and rows in another order."""
    before = {k: v.clone() for k, v in batch.items()}
    advantages, returns = ADVANTAGES[name](**batch)
    assert advantages.isfinite().all()
    assert returns.isfinite().all()
    assert all(torch.equal(before[k], v) for k, v in batch.items()), "inputs are not touched"
    if name not in ("gae", "remax"):  # theirs stand under mask 0 too, where nothing reads them
        assert (advantages[batch["response_mask"] == 0] == 0).all()
    order = list(range(len(advantages)))
    random.shuffle(order)
    again, _ = ADVANTAGES[name](**{k: v[order] for k, v in batch.items()})
    torch.testing.assert_close(again, advantages[order], rtol=1e-9, atol=1e-9)


def by_loops(name: str, batch: dict[str, Tensor]) -> list[float]:
    """The row advantages (before whitening) as one would write them with loops."""
    scores, group = batch["token_level_rewards"].sum(-1).tolist(), batch["group"].tolist()
    lengths, found = batch["response_mask"].sum(-1).tolist(), []
    for i, (score, g) in enumerate(zip(scores, group, strict=True)):
        members = [j for j, other in enumerate(group) if other == g]
        own = [scores[j] for j in members]
        alone = len(members) == 1
        mean, std = (0.0, 1.0) if alone else (statistics.mean(own), statistics.stdev(own))
        if name == "grpo":
            found.append((score - mean) / (std + 1e-6))
        elif name == "grpo_passk":
            ranked = sorted(own, reverse=True)
            found.append((ranked[0] - ranked[1]) / (std + 1e-6) if score == ranked[0] else 0.0)
        elif name == "rloo":
            found.append(score - statistics.mean(scores[j] for j in members if j != i) if not alone else score)
        elif name == "opo":
            tokens = sum(lengths[j] for j in members)
            base = sum(lengths[j] * scores[j] for j in members) / tokens if tokens and not alone else 0.0
            found.append(score - base)
        elif name == "gpg":
            found.append((score - mean) * len(scores) / max(sum(s != 0 for s in scores), 1))
        else:
            found.append(score - mean)
    return found


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_group_estimators_are_what_loops_over_groups_give(name: str, batch: dict[str, Tensor]) -> None:
    if name == "grpo_passk" and (torch.bincount(batch["group"]) < 2).any():
        with pytest.raises(ValueError, match="at least 2 replies"):
            ADVANTAGES[name](**batch)
        return
    mask = batch["response_mask"]
    expected = torch.tensor(by_loops(name, batch), dtype=torch.float64)[:, None] * mask
    if name == "reinforce_plus_plus_baseline":
        expected = masked_whiten(expected, mask) * mask
    torch.testing.assert_close(ADVANTAGES[name](**batch)[0], expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([0.5, 1.0]))
def test_reinforce_plus_plus_starts_anew_after_each_masked_token(batch: dict[str, Tensor], gamma: float) -> None:
    rewards, mask = batch["token_level_rewards"].tolist(), batch["response_mask"].tolist()
    _, returns = ADVANTAGES["reinforce_plus_plus"](**batch, gamma=gamma)
    for i, row in enumerate(rewards):
        carried = 0.0
        for t in reversed(range(len(row))):
            carried = row[t] + gamma * carried
            assert float(returns[i, t]) == pytest.approx(carried, abs=1e-12)
            carried *= mask[i][t]


@settings(max_examples=40, deadline=None)
@given(batches())
def test_group_centred_estimators_sum_to_zero_in_a_group(batch: dict[str, Tensor]) -> None:
    scores, group = batch["token_level_rewards"].sum(-1), batch["group"]
    several = torch.bincount(group)[group] > 1
    for name in ("grpo", "grpo_vectorized", "rloo", "gpg"):
        got = ADVANTAGES[name].per_row(scores=scores, group=group)
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, got)
        assert sums[group[several]].abs().max() < 1e-9 if several.any() else True


def test_reference_cases_cover_every_estimator() -> None:
    named = {c["params"].get("adv_estimator", "grpo_multi_trajectory") for c in load("adv_group", "adv_gae")}
    named |= {c["params"]["adv_estimator"] for c in load("adv_reinforce", "adv_otb")}
    assert named == set(ADVANTAGES)
