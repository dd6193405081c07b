"""Reading and balancing need no torch: `spmd-rl plan` and the reward workers import them."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["rows", "order", "balance", "template", "prompts", "chat", "tasks", "hub"])
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, spmd_rl.data.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_optional_packages_are_imported_by_one_file_only_when_used() -> None:
    code = (
        "import sys, spmd_rl.data.rows, spmd_rl.rewards; "
        "sys.exit(any(m in sys.modules for m in ('datasets', 'reasoning_gym', 'math_verify', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_task_is_read_without_the_pictures_of_another_and_that_one_works_too() -> None:
    code = (
        "import sys; from spmd_rl.data.tasks import make_dataset; "
        "assert make_dataset('lcm', {}, 1, 0)[0]['answer'] and 'matplotlib.pyplot' not in sys.modules; "
        "assert make_dataset('game_of_life', {}, 1, 0)[0]['answer'] and 'cellpylib' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
