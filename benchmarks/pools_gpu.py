"""Two pools of one GPU each: what crosses between them, and what one step off is worth. Run on a host with two GPUs:

    OUT=folder python -m benchmarks.pools_gpu                # writes folder/pools_gpu.json
    OUT=folder python -m benchmarks.pools_gpu --device cpu   # the same with tiny models over gloo, to see that it runs

1. GB/s of `exchange` (columns on the device) and of the weight sync from FSDP shards to a rollout's parameters, against
   bare send and receive over the same bridge.
2. Seconds of a step under `one_step_off` and `sequential`, and of its two stages.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.assemble import load_inputs
from spmd_rl.assemble.rl import build_roles
from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.ranked import plan_of
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import read_environment
from spmd_rl.runtime.exchange import exchange
from spmd_rl.runtime.remote import Remote

APART = ["rollout.pool=rollout", "pools.rollout.n_gpus_per_node=1"]
MIB = {"cuda": (16, 256, 2048), "cpu": (1, 4)}
"""Sizes of an exchanged batch."""
MODELS = {"cuda": ("qwen3-0.6b", "qwen3-8b"), "cpu": ("tiny-digits",)}
TEXT = "reward.functions=[benchmarks/text_reward.py:compute_score]"
RUNS = {
    "cuda": [
        "experiment=quickstart", "model.path=qwen3-0.6b", "model.shape=qwen3-0.6b", "model.random_init=true",
        "model.tokenizer=smollm2-135m-instruct", TEXT, "rollout.ignore_eos=true", "data.max_response_length=128",
        "data.train_batch_size=32", "actor.ppo_mini_batch_size=32", "rollout.n=8",
        "actor.engine.max_tokens_per_micro_batch=16384", "actor.engine.fsdp.param_dtype=bfloat16",
        "trainer.total_training_steps=8",
    ],
    "cpu": [
        "experiment=tiny", "trainer.total_training_steps=6", "data.train_batch_size=32", "actor.ppo_mini_batch_size=32",
    ],
}  # fmt: skip
SKIPPED = 2
"""First steps, which compile, connect and fill the queue."""


def config_of(model: str, device: str) -> list[str]:
    """A run of two pools with this model, random weights and the transformers rollout."""
    common = [*APART, "trainer.schedule=sequential", f"trainer.device={device}", "observe.trackers=[]"]
    if device == "cpu":
        return ["experiment=tiny", f"model.path={model}", *common]
    shape = [f"model.path={model}", f"model.shape={model}", "model.random_init=true", TEXT]
    tokenizer = "model.tokenizer=smollm2-135m-instruct"
    return ["experiment=quickstart", *shape, tokenizer, "actor.engine.fsdp.param_dtype=bfloat16", *common]


class Stopwatch:
    """Times a call that both ranks make: from when both begin until both are done."""

    def __init__(self, here: Runtime) -> None:
        self.here = here

    def together(self) -> None:
        if self.here.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.here.job.group)

    def median(self, act: Callable[[], Any], times: int = 10) -> float:
        found = []
        for number in range(times + 2):
            self.together()
            start = time.perf_counter()
            act()
            self.together()
            if number >= 2:
                found.append(time.perf_counter() - start)
        return statistics.median(found)


def bare(here: Runtime, watch: Stopwatch, mib: int) -> float:
    """GB/s of one send and receive."""
    edge = here.edge("rollout", "actor")
    buffer = torch.zeros(mib * 2**20, dtype=torch.uint8, device=here.device)
    peer = 1 - edge.bridge.me

    def act() -> None:
        works = (
            edge.bridge.post([(buffer, peer)], []) if here.plays("rollout") else edge.bridge.post([], [(buffer, peer)])
        )
        for work in works:
            work.wait()

    return buffer.numel() / watch.median(act) / 1e9


def batch_rate(here: Runtime, watch: Stopwatch, mib: int) -> dict[str, float]:
    """GB/s of an exchange of rows whose columns lie on the device."""
    row = 1024
    rows = max(1, mib * 2**20 // (row * 24))
    mine: Batch | Remote = Remote(("rollout",))
    if here.plays("rollout"):
        mine = Batch.empty_like(rows)
        mine["row_id"] = torch.arange(rows)
        lengths = torch.full((rows,), row)
        for name, dtype in (("prompts", torch.int64), ("responses", torch.int64), ("log_probs", torch.float32)):
            mine[name] = Ragged(torch.zeros(rows * row, dtype=dtype, device=here.device), lengths)
        mine["response_mask"] = Ragged(torch.ones(rows * row, device=here.device), lengths)
    edge = here.edge("rollout", "actor")
    seconds = watch.median(lambda: exchange(mine, [list(range(rows))], edge, here.device))
    return {"ms": seconds * 1e3, "GB_per_s": rows * row * 24 / seconds / 1e9}


def sync_rate(here: Runtime, watch: Stopwatch, overrides: list[str]) -> dict[str, float]:
    """GB/s of the weight sync, in the rollout's type."""
    config = compose(overrides)
    inputs = load_inputs(config, here.plan, here.env.rank)
    try:
        roles = build_roles(config, inputs, here)
        assert roles.weight_sync is not None, "two pools"
        size = torch.zeros(1, dtype=torch.int64)
        if isinstance(roles.rollout, Rollout):
            held = roles.rollout.engine.held or []
            size += sum(h.view.numel() * h.view.element_size() for h in held)
        dist.all_reduce(size, group=here.job.group)

        def act() -> None:
            if isinstance(roles.actor, ModelRole):
                roles.actor.engine.version += 1
            roles.weight_sync()  # type: ignore[misc]

        seconds = watch.median(act)
        return {"ms": seconds * 1e3, "GB": size.item() / 1e9, "GB_per_s": size.item() / seconds / 1e9}
    finally:
        inputs.close()


def rates(device: str, out: Path) -> None:
    """On each of the two ranks."""
    found: dict[str, Any] = {"bare": {}, "exchange": {}, "weight sync": {}}
    env = read_environment()
    for model in MODELS[device]:
        overrides = config_of(model, device)
        config = compose(overrides)
        here = start(config, plan_of(config, env), env)
        watch = Stopwatch(here)
        if not found["bare"]:
            for mib in MIB[device]:
                found["bare"][f"{mib} MiB"] = {"GB_per_s": bare(here, watch, mib)}
                found["exchange"][f"{mib} MiB"] = batch_rate(here, watch, mib)
        found["weight sync"][model] = sync_rate(here, watch, overrides)
        stop()
        if device == "cuda":
            torch.cuda.empty_cache()
    best = max(rate["GB_per_s"] for rate in found["bare"].values())
    for kind in ("exchange", "weight sync"):
        for rate in found[kind].values():
            rate["of_bare"] = rate["GB_per_s"] / best
    if env.is_first:
        out.write_text(json.dumps(found))


def steps(device: str, schedule: str, folder: Path) -> dict[str, float]:
    """Medians of a run's steps: the whole, sampling with its weights and rewards, and the rest."""
    overrides = [*RUNS[device], *APART, f"trainer.schedule={schedule}", f"trainer.device={device}"]
    overrides += [
        "observe.trackers=[jsonl]",
        "data.val.task=null",
        "trainer.test_freq=-1",
        f"trainer.output_dir={folder}",
    ]
    torchrun(["-m", "spmd_rl.train", *overrides], device)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][SKIPPED:-1]
    parts = {
        "step": ("step",),
        "rollout": ("generate", "reward", "weight_sync"),
        "train": ("old_log_prob", "adv", "update_actor"),
    }
    found = {
        name: statistics.median(sum(row.get(f"timing_s/{phase}", 0.0) for phase in phases) for row in rows)
        for name, phases in parts.items()
    }
    idle = ("global", "rollout")
    found |= {f"idle {pool}": statistics.median(row[f"trainer/idle_s/{pool}"] for row in rows) for pool in idle}
    return found | {"step / max(rollout, train)": found["step"] / max(found["rollout"], found["train"])}


def torchrun(arguments: list[str], device: str) -> None:
    """Two ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    subprocess.run(command, check=True, env=env)


def main() -> None:
    """All of it into one file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--inside", type=Path)
    options = parser.parse_args()
    if options.inside:
        rates(options.device, options.inside)
        return
    with tempfile.TemporaryDirectory() as scratch:
        inside = Path(scratch) / "rates.json"
        torchrun(["-m", "benchmarks.pools_gpu", "--device", options.device, "--inside", str(inside)], options.device)
        found = {
            "device": torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "rates": json.loads(inside.read_text()),
            "steps": {
                schedule: steps(options.device, schedule, Path(scratch) / schedule)
                for schedule in ("sequential", "one_step_off")
            },
        }
    out = Path(os.environ.get("OUT", "benchmarks/results")) / "pools_gpu.json"
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
