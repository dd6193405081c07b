"""A batch from one pool to another, and the meetings of an empty step: this program against Ray, on one host.

    python -m benchmarks.exchange --ray-python RAY_VENV/bin/python

Ray (in an environment of its own, which has torch, tensordict and numpy too): actors hold the batch, `ray.put` it, pass
the reference, and others `ray.get` it: as the batch of torch tensors that it is (pickled), and at Ray's best, as a dict
of numpy arrays, which are copied once into its shared memory and read there by all, by none written. An empty step is a
call of every worker for each of CALLS, with a batch of no rows. Here: `exchange` between 1+1 and 2+2 ranks,
each row to whom it belongs, and every meeting that the step of a separated rollout has, without a row. Writes
benchmarks/results/exchange.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 64, 512)
"""MiB of a batch, over all ranks of the sending pool."""
PAIRS = (1, 2)
"""Ranks of each pool."""
ROW = 1024
"""Response tokens of a row."""
CALLS = ("generate", "log_probs", "update", "sync_weights", "metrics")
"""What a single controller calls its workers for in a step."""
RESULT = Path("benchmarks/results/exchange.json")


def columns(mib: float, first: int) -> dict[str, np.ndarray]:
    """Columns of a rollout of about so many MiB: token ids, log-probs, masks; 24 bytes a response token."""
    rows = max(1, int(mib * 2**20 / ROW / 24))
    rng = np.random.default_rng(first)
    tokens = rows * ROW
    return {
        "row_id": np.arange(first, first + rows),
        "uid": np.arange(first, first + rows),
        "prompts": rng.integers(0, 1000, tokens),
        "responses": rng.integers(0, 1000, tokens),
        "rollout_log_probs": rng.random(tokens, dtype=np.float32),
        "response_mask": np.ones(tokens, dtype=np.float32),
    }


def batch_of(mib: float, first: int) -> Any:
    """The same columns as a Batch."""
    import torch

    from spmd_rl.data.batch import Batch, Ragged

    data = columns(mib, first)
    batch = Batch.empty_like(len(data["row_id"]))
    lengths = torch.full((len(batch),), ROW)
    for name, column in data.items():
        values = torch.from_numpy(column)
        batch[name] = values if name in ("row_id", "uid") else Ragged(values, lengths)
    return batch


def repeated(
    act: Callable[[], Any],
    at_least: int = 5,
    seconds: float = 4.0,
    agreed: Callable[[bool], bool] = lambda more: more,
) -> list[float]:
    """Seconds of each call, after one that does not count. `agreed`: ranks that act together go on together."""
    act()
    found: list[float] = []
    while agreed(len(found) < at_least or (sum(found) < seconds and len(found) < 200)):
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
    return found


def summary(seconds: list[float], mib: float = 0.0) -> dict[str, float]:
    """Median and spread in ms, and the rate."""
    middle = statistics.median(seconds)
    out = {"median_ms": middle * 1e3, "min_ms": min(seconds) * 1e3, "max_ms": max(seconds) * 1e3, "times": len(seconds)}
    return out | ({"GB_per_s": mib * 2**20 / middle / 1e9} if mib else {})


def ours(out: Path) -> None:
    """On one rank of many: half of them are the actor's pool, half the reference's."""
    import torch
    import torch.distributed as dist

    from spmd_rl.config.load import compose
    from spmd_rl.data.batch import Batch
    from spmd_rl.ranked import plan_of
    from spmd_rl.runtime.bootstrap import start, stop
    from spmd_rl.runtime.environment import read_environment
    from spmd_rl.runtime.exchange import exchange
    from spmd_rl.runtime.remote import Remote
    from spmd_rl.trainer.border import together_and_largest
    from spmd_rl.trainer.reshard import Header

    torch.set_num_threads(1)
    env = read_environment()
    pair = env.world_size // 2
    config = compose(["experiment=tiny", "rollout.pool=rollout", f"pools.rollout.n_gpus_per_node={pair}"])
    here = start(config, plan_of(config, env), env)
    edge, results = here.edge("rollout", "actor"), {}

    for mib in SIZES:
        mine: Batch | Remote = (
            batch_of(mib / pair, here.pool_rank * 10**6) if here.plays("rollout") else Remote(("rollout",))
        )
        rows = max(1, int(mib / pair * 2**20 / ROW / 24))
        parts = [[p * 10**6 + i for i in range(rows)] for p in range(pair)]

        def move(mine: Batch | Remote = mine, parts: list[list[int]] = parts) -> None:
            dist.barrier(group=here.job.group)
            exchange(mine, parts, edge)
            dist.barrier(group=here.job.group)

        results[f"{mib} MiB"] = summary(repeated(move, agreed=here.job.any), mib)
    nothing: Batch | Remote = batch_of(1, 0).select([]) if here.plays("rollout") else Remote(("rollout",))

    def empty_step() -> None:
        edge.bridge.all_gather(torch.zeros(1, dtype=torch.uint8))  # which weights the rollout has
        here.job.any(False)  # has the data run out
        Header.of(nothing, "rollout", "actor", here)
        exchange(nothing, [[] for _ in range(pair)], edge)
        here.job.any(False)  # stop
        together_and_largest({"loss": 1.0}, [{"update": 1.0}] * 3, here)

    results["empty step"] = summary(repeated(empty_step, 50, agreed=here.job.any))
    if env.is_first:
        out.write_text(json.dumps(results))
    stop()


def with_ray(out: Path, pair: int) -> None:
    """The same by actors: `pair` of them give, `pair` take."""
    import ray

    ray.init(num_cpus=2 * pair, logging_level="ERROR", object_store_memory=4 << 30)

    @ray.remote(num_cpus=1)
    class Worker:
        def hold(self, mib: float, first: int, kind: str) -> None:
            self.batch = batch_of(mib, first) if kind == "tensors" else columns(mib, first)

        def give(self) -> list[Any]:
            return [ray.put(self.batch)]

        def take(self, refs: list[Any]) -> int:
            return int(ray.get(refs[0])["uid"][-1])

        def call(self, name: str, argument: Any) -> Any:
            return argument

    givers, takers = ([Worker.remote() for _ in range(pair)] for _ in range(2))
    results: dict[str, Any] = {}
    for kind in ("tensors", "numpy"):
        for mib in SIZES:
            ray.get([g.hold.remote(mib / pair, i * 10**6, kind) for i, g in enumerate(givers)])

            def move() -> None:
                ray.get([t.take.remote(g.give.remote()) for g, t in zip(givers, takers, strict=True)])

            results[f"{mib} MiB{', numpy' if kind == 'numpy' else ''}"] = summary(repeated(move), mib)
    workers, nothing = [*givers, *takers], batch_of(1, 0).select([])

    def empty_step() -> None:
        for name in CALLS:
            ray.get([w.call.remote(name, nothing) for w in workers])

    results["empty step"] = summary(repeated(empty_step, 50))
    out.write_text(json.dumps(results))
    ray.shutdown()


def measured(command: list[str]) -> dict[str, Any]:
    """What a run of `command` wrote to the file that is its last word."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
        subprocess.run([*command, str(out)], check=True, env=env, timeout=600)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def main() -> None:
    """Everything, and the factors by which Ray takes longer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray-python", default=sys.executable)
    parser.add_argument("--inside", choices=["ours", "ray1", "ray2"])
    parser.add_argument("out", nargs="?", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.inside:
        ours(options.out) if options.inside == "ours" else with_ray(options.out, int(options.inside[3:]))
        return
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "ray": subprocess.run(
            [options.ray_python, "-c", "import ray; print(ray.__version__)"], capture_output=True, text=True, check=True
        ).stdout.strip(),
    }
    for pair in PAIRS:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={2 * pair}"]
        mine = measured([*torchrun, "-m", "benchmarks.exchange", "--inside", "ours"])
        theirs = measured([options.ray_python, "-m", "benchmarks.exchange", "--inside", f"ray{pair}"])
        factors = {name: it["median_ms"] / mine[name.split(",")[0]]["median_ms"] for name, it in theirs.items()}
        found[f"{pair}+{pair} ranks"] = {"spmd_rl": mine, "ray": theirs, "times as long with ray": factors}
    found["load_after"] = os.getloadavg()[0]
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
