"""The Triton kernels of weight sync and sampling, by Triton's interpreter; benchmarks check them on a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_agree_with_torch() -> None:
    command = [sys.executable, "-m", "tests.weights.kernels"]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.stdout == "good\n", ran.stderr[-3000:]
