"""Peak memory of the FSDP engine on GPUs against the plan's estimate:

    python -m benchmarks.fsdp_memory [--points a,b,c] [--out FILE]
    torchrun --nproc-per-node 2 -m benchmarks.fsdp_memory

Takes the points that suit the number of ranks. Each is a whole engine with random weights: log-probs of full
micro-batches, an update, log-probs, an update. Results are added to those in FILE.
"""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd_rl.config import Config
from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.engines.base import Outputs
from spmd_rl.engines.fsdp import FsdpEngine
from spmd_rl.engines.host_pool import Swap
from spmd_rl.models.loading import allocate, build_meta, load_hf_config
from spmd_rl.models.policy import Policy, decoder_layers
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import read_environment
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.fsdp_memory import FsdpMemory
from spmd_rl.topology.memory import engine_memory
from spmd_rl.topology.phases import load
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.roles import role_specs

OUT = Path("benchmarks/results/fsdp_memory.json")
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """One configuration of the engine; rows are as long as allowed, a micro-batch is as full as they permit."""

    name: str
    shape: str
    ranks: int = 1
    fsdp_size: int = -1
    ulysses_size: int = 1
    budget: int = 16384
    prompt: int = 512
    response: int = 1536
    micro_batches: int = 1
    gradient_checkpointing: bool = True
    offload_optimizer: bool = False

    def config(self) -> Config:
        """As the command line would say it; a step is one optimizer step."""
        rows = self.budget // (self.prompt + self.response) * self.micro_batches * self.ranks // self.ulysses_size
        settings = {
            "model.shape": self.shape,
            "model.random_init": True,
            "trainer.mode": "sft",
            "trainer.timeout_s": 60,
            "cluster.gpu": "h200",
            "data.max_prompt_length": self.prompt,
            "data.max_response_length": self.response,
            "data.train_batch_size": rows,
            "actor.ppo_mini_batch_size": rows,
            "actor.engine.max_tokens_per_micro_batch": self.budget,
            "actor.engine.gradient_checkpointing": self.gradient_checkpointing,
            "actor.engine.offload_optimizer": self.offload_optimizer,
            "actor.engine.fsdp.fsdp_size": self.fsdp_size,
            "actor.engine.fsdp.ulysses_size": self.ulysses_size,
        }
        return compose([f"{name}={value}" for name, value in settings.items()])


POINTS = [
    Point("135m", "smollm2-135m", budget=32768),
    Point("0.6b", "qwen3-0.6b"),
    Point("0.6b-kept", "qwen3-0.6b", gradient_checkpointing=False),
    Point("0.6b-offload-2", "qwen3-0.6b", micro_batches=2, offload_optimizer=True),
    Point("1.7b", "qwen3-1.7b", budget=32768),
    Point("1.7b-kept", "qwen3-1.7b", budget=8192, gradient_checkpointing=False),
    Point("4b", "qwen3-4b"),
    Point("0.6b-fsdp2", "qwen3-0.6b", ranks=2),
    Point("0.6b-ddp2", "qwen3-0.6b", ranks=2, fsdp_size=1),
    Point("0.6b-sp2", "qwen3-0.6b", ranks=2, ulysses_size=2, budget=32768, response=7680),
    Point("1.7b-fsdp2-kept", "qwen3-1.7b", ranks=2, gradient_checkpointing=False),
    Point("1.7b-ddp2-2", "qwen3-1.7b", ranks=2, fsdp_size=1, micro_batches=2, offload_optimizer=True),
    Point("4b-fsdp2-offload-2", "qwen3-4b", ranks=2, micro_batches=2, offload_optimizer=True),
    Point("8b-fsdp2", "qwen3-8b", ranks=2),
    Point("smoke", "smollm2-135m", budget=64, prompt=16, response=16),
    Point("smoke-2", "smollm2-135m", ranks=2, budget=64, prompt=16, response=16),
]


class RandomEngine(FsdpEngine):
    """Weights are drawn on the device: quick, and their values do not matter here."""

    def _fill(self, folder: Path | None, seed: int, fresh: Sequence[str], ignore: Sequence[str]) -> None:
        allocate(self.model, self._home())
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.normal_(0.0, 0.02) if parameter.ndim > 1 else local.fill_(1.0)


class Meter:
    """Notes what is allocated, and the most since the note before."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.notes: list[tuple[str, int, int]] = []

    def note(self, label: str) -> None:
        now = peak = 0
        if self.cuda:
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.notes.append((label, now, peak))

    def during(self, label: str, act: Callable[[], Any]) -> dict[str, Any]:
        """Do `act`; its seconds, its peak, and the notes made meanwhile: (label, allocated, peak)."""
        self.notes = []
        self.note("start")
        began = time.perf_counter()
        act()
        if self.cuda:
            torch.cuda.synchronize()
        self.note("end")
        notes = self.notes[1:]
        seconds = time.perf_counter() - began
        return {"what": label, "seconds": seconds, "peak": max(peak for _, _, peak in notes), "notes": self.notes}

    def watch(self, engine: FsdpEngine) -> None:
        """Note some layers' forwards (recomputed ones too) and backwards, and the optimizer's step."""
        layers = decoder_layers(engine.model)
        for i in sorted({0, 1, len(layers) // 2, len(layers) - 1}):
            layers[i].register_forward_pre_hook(self._layer(f"layer {i}"))
        if engine.optimizer is not None:
            engine.optimizer.register_step_pre_hook(lambda *_: self.note("before the optimizer's step"))
            engine.optimizer.register_step_post_hook(lambda *_: self.note("after the optimizer's step"))

    def _layer(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def entered(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.note(f"{name} enters")
            if args and isinstance(args[0], Tensor) and args[0].requires_grad:
                args[0].register_hook(lambda gradient: self.note(f"{name} went backward"))

        return entered


def make_engine(config: Config, runtime: Runtime) -> RandomEngine:
    """As assemble.model does it."""
    policy = Policy(build_meta(load_hf_config(config.model)))
    if config.actor.engine.gradient_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, optim = config.actor.engine, config.actor.optim
    return RandomEngine(policy, None, runtime.layout("actor"), runtime, engine, optim=optim, total_steps=9)


def full_batch(config: Config, plan: Plan) -> tuple[Batch, list[list[int]]]:
    """This rank's rows of a step, as long as allowed, and its micro-batches."""
    work = load(config, plan.roles["actor"], config.actor.engine, config.actor.ppo_mini_batch_size)
    batch = Batch.empty_like(work.rows)
    for name, length in (("prompts", config.data.max_prompt_length), ("responses", config.data.max_response_length)):
        batch[name] = Ragged.from_rows(list(torch.randint(0, 1000, (work.rows, length))))
    return batch, [part.tolist() for part in torch.arange(work.rows).split(work.rows_a_micro_batch)]


def measure(point: Point, base: Runtime) -> dict[str, Any]:
    """One point, start to end; the largest peaks of all ranks, everything else as on the first."""
    config = point.config()
    plan = Plan.from_config(config, base.plan.cluster)
    for planned in plan.process_groups.values():
        if planned.kind == "axis":
            base.groups.register(planned.layout, *planned.axes)
    meter = Meter(base.device.type == "cuda")
    made: list[RandomEngine] = []
    built = meter.during("build", lambda: made.append(make_engine(config, replace(base, plan=plan))))
    engine = made[0]
    meter.watch(engine)
    batch, micro = full_batch(config, plan)

    def objective(part: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Any]]:
        meter.note("objective")
        return outputs["log_probs"].mean() / len(micro), {}

    swap = Swap("actor.optimizer", lambda: engine.resident("optimizer"), base.device)

    def move(to_host: bool) -> list[dict[str, Any]]:
        if not point.offload_optimizer:
            return []
        what = "optimizer leaves" if to_host else "optimizer returns"
        return [meter.during(what, lambda: move_now(swap, to_host))]

    runs = [built, meter.during("first forward", lambda: engine.forward(batch, micro, ["log_probs"]))]
    runs.append(meter.during("first update", lambda: engine.train(batch, micro, objective)))
    runs += move(to_host=True)
    runs.append(meter.during("forward", lambda: engine.forward(batch, micro, ["log_probs"])))
    runs += move(to_host=False)
    runs.append(meter.during("update", lambda: engine.train(batch, micro, objective)))
    return compare(config, plan, runs, base) | {"runs": runs}


def move_now(swap: Swap, to_host: bool) -> None:
    """The whole way out or back."""
    for act in (swap.leave, swap.free) if to_host else (swap.come, swap.settle):
        act()


def compare(config: Config, plan: Plan, runs: list[dict[str, Any]], runtime: Runtime) -> dict[str, Any]:
    """Estimate against measured, in bytes; and the update's time against the plan's bound."""
    everywhere: list[Any] = [None] * runtime.pool.size
    dist.all_gather_object(everywhere, {run["what"]: run["peak"] for run in runs}, group=runtime.control)
    peaks = {what: max(rank[what] for rank in everywhere) for what in everywhere[0]}
    assert plan.shape is not None, "every point names a shape"
    estimator = engine_memory(config, role_specs(config)["actor"], plan.roles["actor"], plan.shape)
    assert isinstance(estimator, FsdpMemory)
    moment, train = estimator.train()
    kept = estimator.held(trained=not config.actor.engine.offload_optimizer)
    estimates = {
        "first forward": estimator.held(trained=False) | estimator.forward(entropy=False),
        "forward": kept | estimator.forward(entropy=False),
        "update": estimator.held(trained=True) | train,
    }
    peaks["update"] = max(peaks["update"], peaks["first update"])
    bound = next((b.seconds for b in plan.bounds if b.phase == "update"), 0.0)
    return {
        "layout": str(plan.roles["actor"].mesh),
        "parameters": plan.shape.params,
        "micro_batch": [estimator.tokens, estimator.logit_tokens],
        "compared": {what: _ratio(peaks[what], items) for what, items in estimates.items()},
        "moment": moment,
        "moments": estimator.moments(),
        "update_seconds": runs[-1]["seconds"],
        "update_bound": bound,
    }


def _ratio(measured: int, items: dict[str, int]) -> dict[str, Any]:
    estimated = sum(items.values())
    ratio = estimated / measured if measured else None
    return {"measured": measured, "estimated": estimated, "ratio": ratio, "items": items}


def clean(cuda: bool) -> int:
    """Let the last point go; bytes that stay allocated."""
    gc.collect()
    if not cuda:
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def attempt(point: Point, runtime: Runtime) -> dict[str, Any]:
    """A point's result, or why there is none."""
    cuda = runtime.device.type == "cuda"
    result: dict[str, Any] = {"point": asdict(point), "before": clean(cuda), "torch": torch.__version__}
    result |= {"transformers": transformers.__version__, "device": "cpu"}
    if cuda:
        result["device"] = torch.cuda.get_device_name()
    began = time.perf_counter()
    try:
        result |= measure(point, runtime)
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
    result["seconds"] = time.perf_counter() - began
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a point, GiB."""
    lines = [
        f"{'point':<20} {'layout':<16} {'forward':>8} {'est.':>8} {'ratio':>6} {'update':>8} {'est.':>8} {'ratio':>6}"
    ]
    lines[0] += "  estimated peak"
    for name, found in results.items():
        if "error" in found:
            lines.append(f"{name:<20} {found['error'].splitlines()[0][:90]}")
            continue
        cells = [f"{name:<20} {found['layout']:<16}"]
        for what in ("forward", "update"):
            c = found["compared"][what]
            cells.append(f"{c['measured'] / GIB:8.2f} {c['estimated'] / GIB:8.2f} {c['ratio'] or 0:6.3f}")
        lines.append(" ".join(cells) + f"  {found['moment']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", help="names, separated by commas; default: all that suit the ranks")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    env = read_environment()
    wanted = arguments.points.split(",") if arguments.points else [p.name for p in POINTS if "smoke" not in p.name]
    points = [p for p in POINTS if p.name in wanted and p.ranks == env.world_size]
    if not points:
        raise SystemExit(f"no point of {wanted} is for {env.world_size} ranks; there are {[p.name for p in POINTS]}")
    config = points[0].config()
    runtime = start(config, Plan.from_config(config, Cluster.from_counts([env.world_size])), env)
    results = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for point in points:
        results[point.name] = attempt(point, runtime)
        if runtime.is_first:  # each time, so that what is done is kept
            print(f"{point.name}: {results[point.name]['seconds']:.1f} s", flush=True)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1))
    if runtime.is_first:
        print(table(results), flush=True)
    stop()


if __name__ == "__main__":
    main()
