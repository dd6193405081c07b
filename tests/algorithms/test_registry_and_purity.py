import ast
import inspect
from pathlib import Path

import pytest
import torch

import spmd_rl.algorithms
from spmd_rl.algorithms import ADVANTAGES, POLICY_LOSSES, resolve
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


def test_every_estimator_and_loss_says_where_it_is_from_and_what_it_computes() -> None:
    for name, entry in {**ADVANTAGES, **POLICY_LOSSES}.items():
        text = f"{inspect.getdoc(entry.fn)}\n{inspect.getdoc(inspect.getmodule(entry.fn))}"
        assert "=" in text, name
        assert any(mark in text for mark in ("arXiv", "`grpo`", "`rloo`", "1992", "`vanilla`", "`dppo_tv`")), name


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
