import ast
import inspect
from pathlib import Path

import pytest
import torch

import spmd_rl.algorithms
from spmd_rl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ALIASES,
    POLICY_LOSSES,
    REJECTION_RULES,
    BatchTotals,
    TokenBatch,
    advantage_estimator,
    policy_loss,
    resolve,
)
from spmd_rl.config import ConfigError

FOLDER = Path(spmd_rl.algorithms.__file__).parent


def imports(file: Path) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda f: f.name)
def test_pure_no_distributed_no_config_object_no_global_generator(file: Path) -> None:
    text = file.read_text()
    assert "torch.distributed" not in text.replace("No torch.distributed", "")
    for module, name in imports(file):
        ours = module.startswith("spmd_rl")
        assert (
            not ours or module.startswith("spmd_rl.algorithms") or (module, name) == ("spmd_rl.config", "ConfigError")
        )
    for word in ("torch.rand", "randperm", "multinomial", "manual_seed"):
        assert word not in text


@pytest.mark.parametrize("name", [*ADVANTAGES, *POLICY_LOSSES])
def test_every_estimator_and_loss_says_what_it_computes_and_where_it_is_from(name: str) -> None:
    fn = (ADVANTAGES.get(name) or POLICY_LOSSES[name]).fn
    own, module = (" ".join((inspect.getdoc(it) or "").split()) for it in (fn, inspect.getmodule(fn)))
    assert "=" in own
    kin = any(f"`{other}`" in own for other in (*ADVANTAGES, *POLICY_LOSSES))
    assert kin or any(mark in own + module for mark in ("arXiv 2", "arXiv 1", "Machine Learning 8"))
    assert "Shapes:" in module or "Contract:" in module


def test_the_page_has_every_name() -> None:
    page = (FOLDER.parents[1] / "docs" / "algorithms.md").read_text()
    names = [*ADVANTAGES, *POLICY_LOSSES, *KL_ALIASES, *AGGREGATIONS, *REJECTION_RULES]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_pages_own_functions_run(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "algorithms.md").read_text()
    file = tmp_path / "mine.py"
    file.write_text(page.split("```python\n")[1].split("```")[0])
    advantages, _ = advantage_estimator(f"{file}:centred")(
        token_level_rewards=torch.tensor([[1.0], [0.0]]), response_mask=torch.ones(2, 1), group=torch.tensor([0, 0])
    )
    assert advantages.tolist() == [[0.5], [-0.5]]
    log_prob = torch.full((2, 1), -1.0, requires_grad=True)
    batch = TokenBatch.from_padded(
        log_prob=log_prob, old_log_prob=log_prob.detach(), advantages=advantages, response_mask=torch.ones(2, 1)
    )
    value, metrics = policy_loss(f"{file}:soft").share(batch, totals=BatchTotals(2, 2))
    value.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[-0.25], [0.25]]
    assert metrics["actor/soft_weight"] == (2.0, 2.0)


def test_a_file_is_run_once(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text("from dataclasses import dataclass\n\n@dataclass\nclass A:\n    x: int = 1\n")
    assert resolve(f"{file}:A", {}) is resolve(f"{file}:A", {})


def test_a_function_from_a_module_or_a_file(tmp_path: Path) -> None:
    assert resolve("torch.nn.functional:relu", {}) is torch.nn.functional.relu
    (tmp_path / "a.py").write_text("def f():\n    return 7\n")
    assert resolve(f"{tmp_path / 'a.py'}:f", {})() == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:f", "is not a file"),
        ("no_such_package.losses:f", "cannot be imported"),
        ("math:sine", "has no 'sine'; it has .*sin"),
        ("vanila", "did you mean 'vanilla'"),
    ],
)
def test_a_wrong_place_says_what_is_wrong(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(name, POLICY_LOSSES, "policy loss")
