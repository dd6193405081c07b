"""The Megatron engine against FSDP: GRPO steps, tokens a second, MFU, and memory against the plan.

    python -m benchmarks.megatron_gpu [--steps 20] [--rollout vllm] [--only tp2,ep2] [--out FILE]
    python -m benchmarks.megatron_gpu --device cpu --steps 2

Two ranks for each case, one after the other, each a whole training run: FSDP 2, TP 2, PP 2, PP 2 · VPP 2, CP 2 on a
dense model, FSDP 2 and EP 2 on a small mixture of experts. On the CPU the models are tiny and the figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from spmd_rl.config import Config
from spmd_rl.config.load import compose
from spmd_rl.models.flops import peak_flops, train_flops
from spmd_rl.models.loading import load_hf_config, resolve
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan

OUT = Path("benchmarks/results/megatron.json")
RANKS, GIB = 2, 2**30
DENSE = ["model.path=qwen3-0.6b", "model.shape=qwen3-0.6b", "model.random_init=true"]
GPU = [
    *("model.tokenizer=smollm2-135m-instruct", "reward.functions=[benchmarks/text_reward.py:compute_score]"),
    *("data.max_prompt_length=256", "data.max_response_length=768", "data.train_batch_size=32", "rollout.n=8"),
    *("rollout.ignore_eos=true", "actor.ppo_mini_batch_size=32", "actor.engine.max_tokens_per_micro_batch=16384"),
    *("actor.engine.gradient_checkpointing=true", "actor.engine.fsdp.param_dtype=bfloat16", "cluster.gpu=h200"),
    *("actor.optim.lr=1e-6", "actor.optim.warmup_steps=0"),
]
CPU = ["trainer.device=cpu", "actor.engine.max_tokens_per_micro_batch=512"]
MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "initializer_range": 0.02, "rope_theta": 1000000.0,
}  # fmt: skip
"""Half a billion parameters, a sixth of them a token: what fits beside its optimizer on one card."""


@dataclass
class Case:
    """One layout of one model."""

    name: str
    sizes: Sequence[str] = ()
    mixture: bool = False

    @property
    def engine(self) -> list[str]:
        if not self.sizes:
            return ["engine=fsdp"]
        return ["engine=megatron", *(f"actor.engine.megatron.{size}" for size in self.sizes)]


CASES = [
    Case("fsdp2"),
    Case("tp2", ["tp=2"]),
    Case("pp2", ["pp=2"]),
    Case("pp2_vpp2", ["pp=2", "vpp=2"]),
    Case("cp2", ["cp=2"]),
    Case("moe_fsdp2", mixture=True),
    Case("moe_ep2", ["ep=2"], mixture=True),
    Case("moe_tp2_ep2", ["tp=2", "ep=2", "etp=1"], mixture=True),
]


def overrides(case: Case, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The run of a case as the command line would say it."""
    ends = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume=never"]
    ends += [f"trainer.total_training_steps={arguments.steps}", f"rollout.name={arguments.rollout}"]
    if arguments.device == "cpu":
        name = "tiny-moe" if case.mixture else "tiny-digits"
        model = [f"model.path={name}", f"model.shape={resolve(name)}"]
        return ["experiment=tiny", *model, *CPU, *case.engine, *ends]
    model = DENSE
    if case.mixture:
        (folder / "config.json").write_text(json.dumps(MIXTURE))
        model = [f"model.path={folder}", f"model.shape={folder}", "model.random_init=true"]
    return ["experiment=quickstart", *model, *GPU, *case.engine, *ends]


def run(case: Case, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train; the metrics of each step, boiled down. Raises CalledProcessError for a run that failed."""
    words = overrides(case, arguments, folder)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m", "spmd_rl.train"]
    out = [f"trainer.output_dir={folder / 'run'}", "observe.trackers=[jsonl]"]
    subprocess.run([sys.executable, *start, *words, *out], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return summary(compose(words), [line for line in lines if "timing_s/update_actor" in line]) | {
        "command": " ".join(words)
    }


def summary(config: Config, steps: list[dict[str, float]]) -> dict[str, Any]:
    """Median step after the first: tokens a second and rank of update and step, MFU of the update; peak and plan."""
    later = steps[1:] or steps
    seconds = median(step["timing_s/update_actor"] for step in later)
    tokens = median(step["perf/total_num_tokens"] for step in later)
    flops = median(_update_flops(config, step) for step in later)
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    plan = Plan.from_config(config, Cluster.from_counts([RANKS]))
    estimates = [phase.peak for phase in plan.memory if phase.phase == "update"]
    measured = max(step.get("perf/max_memory_allocated_gb/update_actor", 0.0) for step in steps)  # of the fullest rank
    return {
        "update_seconds": seconds,
        "update_tokens_per_s_and_rank": tokens / seconds / RANKS,
        "step_tokens_per_s_and_rank": median(step["perf/throughput"] for step in later),
        "mfu": flops / seconds / RANKS / peak if peak else None,
        "memory_gib": {"measured": measured, "planned": max(estimates, default=0) / GIB},
        "scores": [step["critic/score/mean"] for step in steps],
        "losses": [step["actor/pg_loss"] for step in steps],
        "grad_norms": [step["actor/grad_norm"] for step in steps],
        "rollout_log_prob_diff": [step.get("training/rollout_log_prob_diff") for step in steps],
        "moe_load_max": [step.get("actor/moe_load_max") for step in steps],
        "generate_seconds": median(step["timing_s/generate"] for step in later),
    }


def _update_flops(config: Config, step: dict[str, float]) -> float:
    """Of all rows of a step, as if each were of the mean length (recomputation does not count)."""
    rows = config.data.train_batch_size * config.rollout.n
    length = step["prompt_length/mean"] + step["response_length/mean"]
    hf_config = load_hf_config(config.model)
    return train_flops(hf_config, [round(length)] * rows, round(rows * step["response_length/mean"]))


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a case."""
    lines = [
        f"{'case':<12} {'update s':>9} {'tok/s/rank':>11} {'of FSDP':>8} {'MFU':>6} {'GiB':>7} {'plan':>7} {'ratio':>6}"
    ]
    for name, found in results.items():
        base = results.get("moe_fsdp2" if name.startswith("moe") else "fsdp2", found)
        rate, memory = found["update_tokens_per_s_and_rank"], found["memory_gib"]
        compared = base["update_tokens_per_s_and_rank"]
        ratio = memory["planned"] / memory["measured"] if memory["measured"] else 0.0
        lines.append(
            f"{name:<12} {found['update_seconds']:9.3f} {rate:11.0f} {rate / compared:8.2f} "
            f"{found['mfu'] or 0:6.3f} {memory['measured']:7.2f} {memory['planned']:7.2f} {ratio:6.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rollout", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else [c.name for c in CASES if c.name != "moe_tp2_ep2"]
    if arguments.device == "cpu":  # two layers make no four chunks
        wanted = [name for name in wanted if name != "pp2_vpp2"]
    unknown = set(wanted) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"no case {sorted(unknown)}; there are {[case.name for case in CASES]}")
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = {"hardware": hardware, "torch": torch.__version__, "transformers": transformers.__version__}
    results: dict[str, dict[str, Any]] = {}
    for case in (case for case in CASES if case.name in wanted):
        with tempfile.TemporaryDirectory() as folder:
            results[case.name] = run(case, arguments, Path(folder))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(facts | {"cases": results}, indent=1))  # each time: what is done is kept
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
