"""How long a plan takes and how much memory: 16 ranks under 50 ms, 100,000 ranks with four roles under 2 s and 1 GiB.

python benchmarks/plan_speed.py            # prints the table and exits 1 when a limit is broken
"""

import resource
import statistics
import subprocess
import sys
import time

from spmd_rl.config import Config
from spmd_rl.config.run import PoolConfig
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.document import document
from spmd_rl.topology.plan import Plan

LIMITS = {16: (0.05, 1.0), 4096: (0.5, 1.0), 100_000: (2.0, 1.0)}
"""Ranks -> (seconds, GiB of the whole process)."""


def config_of(ranks: int) -> Config:
    """Actor and ref with hybrid shards and Ulysses on `global`, rollout and reward model on pools of their own."""
    config = Config()
    config.model.shape, config.actor.use_kl_loss = "qwen3-8b", True
    config.actor.engine.fsdp.fsdp_size = 8
    config.actor.engine.fsdp.ulysses_size = 2
    config.rollout.name, config.rollout.infer_tp, config.rollout.pool = "vllm", 4, "rollout"
    config.reward.model.enable, config.reward.model.path, config.reward.model.pool = True, "qwen3-8b", "reward"
    nodes = ranks // 8
    a_node = 8 if nodes >= 4 else 4
    config.pools = {"rollout": PoolConfig(max(nodes // 4, 1), a_node), "reward": PoolConfig(1, a_node)}
    config.data.train_batch_size = 32 * max(ranks // 8, 1)
    return config


def measure(ranks: int, repeats: int) -> tuple[float, float, float]:
    """(median seconds of the plan with its prices, seconds of its document, peak GiB of this process)."""
    config, times = config_of(ranks), []
    for _ in range(repeats):
        start = time.perf_counter()
        plan = Plan.from_config(config, Cluster.from_counts([8] * (ranks // 8)))
        assert plan.bounds, "priced"
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    document(plan)
    written = time.perf_counter() - start
    return statistics.median(times), written, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    """One process a size, so that each shows its own memory."""
    if len(sys.argv) > 1:
        print(*measure(int(sys.argv[1]), 3 if int(sys.argv[1]) > 10_000 else 9))
        return 0
    broken = False
    print("| ranks | plan | JSON document | peak of the process | limits |")
    print("|---:|---:|---:|---:|---|")
    for ranks, (seconds, gib) in LIMITS.items():
        out = subprocess.run([sys.executable, __file__, str(ranks)], capture_output=True, text=True, check=True).stdout
        plan, written, peak = map(float, out.split())
        broken |= plan > seconds or peak > gib
        row = f"{ranks:,} | {plan * 1e3:.0f} ms | {written * 1e3:.0f} ms | {peak:.2f} GiB"
        print(f"| {row} | {seconds:g} s, {gib:g} GiB |")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
