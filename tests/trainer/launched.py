"""Runs of the whole program for tests of stopping and resuming: on a world of ranks, or by torchrun with a rank that
ends by `kill -9` at a chosen place: `torchrun … launched.py PLACE key=value …`.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl import ranked, train
from spmd_rl.observe.jsonl import read_metrics
from spmd_rl.observe.metrics import deterministic

REWARD = Path(__file__).with_name("reward.py")
STEPS = 5
RUN = [
    "experiment=tiny",
    f"reward.functions=['{REWARD}:digits']",
    "observe.trackers=[jsonl,tensorboard]",
    "data.train.size=13",
    "data.val.size=6",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "rollout.stop_token_ids=[10,20,30,40,50,60,70,80]",
    "actor.ppo_mini_batch_size=2",
    "actor.shuffle=true",
    "actor.optim.schedule=cosine",
    "actor.optim.warmup_steps=3",
    "actor.optim.eps=1e-5",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=1",
    "trainer.save_freq=2",
    "trainer.checkpoint.keep=0",
]
"""Five steps over more than one epoch, with everything in play that a checkpoint has to bring back."""
MARK = "SPMD_RL_TEST_RUN"


def run(overrides: list[str], patch: Callable[[], Any] | None = None) -> tuple[int, str]:
    """`spmd-rl train` on this world of ranks: exit status and what it printed as an error."""
    ranked.LINGER_S = 0.0
    undo = patch() if patch else None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            status = train.main([*RUN, *overrides])
    finally:
        if undo:
            undo()
    return status, said.getvalue()


def shown(overrides: list[str]) -> tuple[int, str, str]:
    """`spmd-rl train` on this world of ranks: exit status, what it printed, and what of it as an error."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status, said = run(overrides)
    return status, out.getvalue(), said


def train_quietly(overrides: list[str]) -> int:
    """`spmd-rl train` with these settings alone; its exit status."""
    return train.main(overrides)


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decided."""
    return [deterministic(row) for row in read_metrics(folder / "metrics.jsonl")]


def torchrun(ranks: int, *arguments: str, mark: str = "") -> subprocess.Popen[str]:
    """Start ranks under torchrun; every process of it carries `mark` in its environment."""
    env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def new_mark() -> str:
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not is_zombie and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def is_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_step() -> None:
    """Rank 1, in the update of step 4."""
    from spmd_rl.engines.fsdp import FsdpEngine

    update = FsdpEngine.train

    def dying(self: FsdpEngine, *args: Any) -> Any:
        if is_rank(1) and self.version == 3 * 2:  # two updates a step: three steps are done
            _die()
        return update(self, *args)

    FsdpEngine.train = dying  # type: ignore[method-assign]


def _die_in_write() -> None:
    """Rank 1, when it should write its shards of step 4."""
    from torch.distributed.checkpoint import FileSystemWriter

    write = FileSystemWriter.write_data

    def dying(self: FileSystemWriter, *args: Any) -> Any:
        if is_rank(1) and "step_000004" in str(self.path):
            _die()
        return write(self, *args)

    FileSystemWriter.write_data = dying  # type: ignore[method-assign]


def _die_in_commit() -> None:
    """Rank 0, when all of step 4 is written and only the rename is missing."""
    from spmd_rl.trainer.checkpoint import Checkpointer

    commit = Checkpointer._commit

    def dying(self: Checkpointer, partial: Path, final: Path) -> None:
        if is_rank(0) and final.name == "step_000004":
            _die()
        commit(self, partial, final)

    Checkpointer._commit = dying  # type: ignore[method-assign]


PLACES: dict[str, Callable[[], None]] = {
    "step": _die_in_step,
    "write": _die_in_write,
    "commit": _die_in_commit,
    "nowhere": lambda: None,
}

if __name__ == "__main__":
    PLACES[sys.argv[1]]()
    sys.exit(train.main([*RUN, *sys.argv[2:]]))
