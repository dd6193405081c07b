"""Launching: `launch/` is imported as a wheel has it, spmd_rl._launch."""

from spmd_rl.cli import available

assert "launch" in available(), "this makes launch/ importable as spmd_rl._launch"
