from typing import Any

import pytest
import torch

from spmd_rl.algorithms import KL_ALIASES, kl_controller, kl_in_reward, kl_penalty

from .fixtures import DTYPES, cases, close, load, tensor, tensors


@pytest.mark.parametrize(("case", "key"), cases("kl_estimators"))
def test_estimators_agree_with_reference(case: dict[str, Any], key: str) -> None:
    dtype = DTYPES[key]
    log_prob = tensor(case["inputs"]["logprob"], dtype).requires_grad_()
    kl = kl_penalty(log_prob, tensor(case["inputs"]["ref_logprob"], dtype), case["params"]["kl_penalty"])
    kl.sum().backward()
    close(kl, case[key]["kl"], dtype)
    assert log_prob.grad is not None
    close(log_prob.grad, case[key]["grad_logprob"], dtype)


@pytest.mark.parametrize("kind", KL_ALIASES)
def test_aliases_and_straight_through_forms(kind: str) -> None:
    """`+` keeps the value and has the gradient of k2, log pi - log ref."""
    torch.manual_seed(0)
    log_prob, ref = torch.randn(20, dtype=torch.float64).requires_grad_(), torch.randn(20, dtype=torch.float64)
    plain, through = kl_penalty(log_prob, ref, kind), kl_penalty(log_prob, ref, kind + "+")
    torch.testing.assert_close(plain, through)
    torch.testing.assert_close(plain, kl_penalty(log_prob, ref, KL_ALIASES[kind]))
    torch.testing.assert_close(torch.autograd.grad(through.sum(), log_prob)[0], (log_prob - ref).detach())


def test_k3_is_bounded_and_never_negative() -> None:
    log_prob = torch.tensor([-100.0, -1.0, -1.0, 0.0])
    kl = kl_penalty(log_prob, torch.tensor([0.0, -1.0, -1.5, -100.0]), "k3")
    assert kl.tolist() == pytest.approx([10.0, 0.0, float(torch.tensor(-0.5).exp()) - 0.5, 10.0])


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("case", load("kl_controllers"), ids=lambda c: c["name"])
def test_controllers_agree_with_reference(case: dict[str, Any]) -> None:
    controller = kl_controller(**case["params"])
    values = []
    for kl in case["inputs"]["current_kl"]:
        controller.update(kl, case["inputs"]["n_steps"])
        values.append(controller.value)
    assert values == pytest.approx(case["outputs"]["values_after_each_update"], rel=1e-9)


def test_bad_controllers() -> None:
    with pytest.raises(ValueError, match="horizon=0"):
        kl_controller("adaptive", 0.1, 0.1, 0)
    with pytest.raises(ValueError, match="fixed or adaptive"):
        kl_controller("linear", 0.1)


@pytest.mark.parametrize(("case", "key"), cases("kl_in_reward"))
def test_kl_in_reward_agrees_with_reference(case: dict[str, Any], key: str) -> None:
    dtype, params = DTYPES[key], case["params"]
    columns = tensors(case["inputs"], ("token_level_scores", "response_mask", "old_log_probs", "ref_log_prob"), dtype)
    controller = kl_controller(params["ctrl"], params["kl_coef"], params["target_kl"], params["horizon"])
    rewards, kl = kl_in_reward(**columns, kl_coef=controller.value, kind=params["kl_penalty"])
    close(rewards, case[key]["token_level_rewards"], dtype)
    expected = case[key]["metrics"]
    assert controller.value == expected["actor/reward_kl_penalty_coeff"]
    close(kl.mean(), expected["actor/reward_kl_penalty"], dtype)
    controller.update(float(kl.mean()), len(kl))
    assert controller.value == pytest.approx(case[key]["coef_after_update"], rel=1e-6)
