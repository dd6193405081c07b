"""GRPO and kin on GPUs, the runs whose results are committed:

    python -m benchmarks.gpu_runs quickstart       100 steps of the quickstart preset on one GPU
    python -m benchmarks.gpu_runs layouts          Qwen3-0.6B shapes: one GPU, FSDP 2, DDP 2, Ulysses 2, three steps
    python -m benchmarks.gpu_runs algorithms       GRPO, DAPO, GSPO, CISPO, RLOO, PPO, three seeds each

Writes benchmarks/results/<what>.json: hardware, versions, commands, metrics of each step. `python -m benchmarks.curves`
draws them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path("benchmarks/results")
KEPT = (
    "critic/score/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "actor/loss",
    "perf/throughput",
)
ALGORITHMS = {
    "grpo": [],
    "dapo": ["algorithm=dapo", "algorithm.filter_groups.max_num_gen_batches=0"],
    "gspo": ["algorithm=gspo"],
    "cispo": ["algorithm=cispo"],
    "rloo": ["algorithm=rloo"],
    "ppo": ["algorithm=ppo"],
}
QWEN = [
    *("model.path=qwen3-0.6b", "model.shape=qwen3-0.6b", "model.random_init=true"),
    *("model.tokenizer=smollm2-135m-instruct", "reward.functions=[benchmarks/text_reward.py:compute_score]"),
    *("data.max_response_length=64", "rollout.ignore_eos=true", "rollout.dtype=float32"),
    *("actor.engine.fsdp.param_dtype=bfloat16", "actor.engine.max_tokens_per_micro_batch=4096"),
    *("actor.optim.lr=1e-6", "actor.optim.warmup_steps=0"),
    *("trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.test_freq=-1"),
]


@dataclass
class Run:
    """One training run of the quickstart preset with overrides."""

    name: str
    overrides: Sequence[str]
    gpus: str = "0"

    @property
    def command(self) -> list[str]:
        ranks = len(self.gpus.split(","))
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return [*start, "-m", "spmd_rl.train", "experiment=quickstart", *self.overrides, "trainer.save_freq=-1"]


def runs_of(what: str) -> list[list[Run]]:
    """Waves of runs; those of a wave run beside each other."""
    if what == "quickstart":
        return [[Run("quickstart", ["trainer.total_training_steps=100", "trainer.test_freq=10"])]]
    if what == "layouts":
        two = {"fsdp2": "fsdp_size=2", "ddp2": "fsdp_size=1", "ulysses2": "ulysses_size=2"}
        pairs = [Run(name, [*QWEN, f"actor.engine.fsdp.{key}"], "0,1") for name, key in two.items()]
        return [[Run("one", QWEN)], *([run] for run in pairs)]
    steps = ["trainer.total_training_steps=24", "trainer.test_freq=8"]
    count = torch.cuda.device_count()
    return [
        [
            Run(f"{name}/{seed}", [*extra, *steps, f"trainer.seed={seed}", f"data.seed={seed + 1}"], str(i % count))
            for i, (name, extra) in enumerate(ALGORITHMS.items())
        ]
        for seed in range(3)
    ]


def run_wave(wave: Sequence[Run], folder: Path) -> dict[str, Any]:
    """Run and wait; commands and metrics by name. Raises CalledProcessError for a run that failed."""
    started = []
    for run in wave:
        out = folder / run.name
        words = [sys.executable, *run.command, f"trainer.output_dir={out}", "observe.trackers=[jsonl]"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": run.gpus}
        started.append((run, out, subprocess.Popen(words, env=env)))
    found = {}
    for run, out, process in started:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, run.command)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        kept = [
            {k: v for k, v in x.items() if k in KEPT or k.startswith(("step", "val-core", "timing_s"))} for x in lines
        ]
        found[run.name] = {"command": " ".join(run.command), "metrics": kept}
    return found


def main(what: str) -> None:
    """Run all waves of `what` and write its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: run for wave in runs_of(what) for name, run in run_wave(wave, Path(folder)).items()}
    facts = {"hardware": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (RESULTS / f"{what}.json").write_text(json.dumps(facts | versions | {"runs": runs}, indent=0))


if __name__ == "__main__":
    main(sys.argv[1])
