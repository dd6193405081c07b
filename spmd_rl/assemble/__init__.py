"""From a config to what a run is made of. A mode's `load_inputs` finds the user's mistakes before a model is loaded."""

from collections.abc import Callable
from typing import Any, Protocol

from spmd_rl.assemble import rl, sft
from spmd_rl.assemble.model import Model
from spmd_rl.assemble.rl import Inputs, build_roles, load_inputs
from spmd_rl.config import Config
from spmd_rl.data.order import PromptOrder
from spmd_rl.observe.tracking import Trackers
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.loop import Loop

__all__ = ["MODES", "Inputs", "RunInputs", "build_roles", "load_inputs"]


class RunInputs(Protocol):
    """What a mode knows before the runtime starts, and how it makes its loop afterwards."""

    model: Model
    order: PromptOrder[Any]
    total_steps: int

    def facts(self, config: Config, runtime: Runtime) -> dict[str, str]:
        """Lines for the console's header."""
        ...

    def loop(self, config: Config, runtime: Runtime, trackers: Trackers, checkpointer: Checkpointer) -> Loop:
        """Models on their engines, and the loop over them."""
        ...

    def close(self) -> None:
        """End what was started besides this process."""
        ...


MODES: dict[str, Callable[[Config, Plan, int], RunInputs]] = {"rl": rl.load_inputs, "sft": sft.load_inputs}
"""trainer.mode -> (config, plan, rank in the job) -> the run's inputs."""
