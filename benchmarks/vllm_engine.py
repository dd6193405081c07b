"""vLLM inside the rank, against limits measured in the same run; every rank runs this:

    torchrun --nproc-per-node N -m benchmarks.vllm_engine OUT.json WHAT[,WHAT…] [overrides of experiment=quickstart]

WHAT is `sync` (a weight sync against copies of the same bytes, or against the all-gather rate), `rollout` (tokens/s of
our loop against `LLM.generate` on the same engine), `sampler` (the keyed draw against torch's) or `swap` (sleep and
wake). `trainer.device=cpu` and a tiny model prove it without a GPU.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.assemble.model import load_model_facts, make_engine, make_rollout_engine
from spmd_rl.config import Config
from spmd_rl.config.load import parse_arguments
from spmd_rl.models import random_weights
from spmd_rl.ranked import plan_of
from spmd_rl.roles.rollout import Rollout
from spmd_rl.rollout.base import Request
from spmd_rl.rollout.sampling import SamplingParams, row_keys, sample
from spmd_rl.rollout.vllm import VllmRollout
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import read_environment

PROMPTS, SAMPLES, PROMPT, ROUNDS = 64, 8, 128, 4


def timed(f: Callable[[], Any], runtime: Runtime, repeats: int = 10) -> dict[str, float]:
    """Median, least and most milliseconds of a call, the slowest rank's."""
    found = []
    for _ in range(repeats):
        wait(runtime)
        dist.barrier(group=runtime.control)
        at = time.perf_counter()
        f()
        wait(runtime)
        took = torch.tensor([time.perf_counter() - at])
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=runtime.control)
        found.append(took.item() * 1e3)
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def wait(runtime: Runtime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()


def measure_sync(rollout: Rollout, runtime: Runtime) -> dict[str, Any]:
    """A sync, and plain copies of the same bytes; between ranks, the rate of one large all-gather and all-to-all."""
    engine, actor = rollout.engine, rollout.actor
    held = actor.held()
    assert held is not None, "the actor's tensors cannot be read in place"
    assert engine.held is not None, "the rollout engine's tensors cannot be written in place"
    at = time.perf_counter()
    path = rollout._connect(held, engine.held)
    facts: dict[str, Any] = {"build_table_s": time.perf_counter() - at}
    elements = sum(h.view.numel() for h in engine.held)
    facts["target_bytes"] = sum(h.view.numel() * h.view.element_size() for h in engine.held)
    facts["source_dtype"], facts["target_dtype"] = str(held[0].view.dtype), str(engine.held[0].view.dtype)
    for verify in ("off", "checksum"):
        path.run(verify)
        facts[f"sync_{verify}_ms"] = timed(lambda v=verify: path.run(v), runtime)
    facts["sync_full_ms"] = timed(lambda: path.run("full"), runtime, 1)
    facts["load_weights_ms"] = timed(lambda: engine.load_weights(actor.weights()), runtime, 3)
    count = min(elements, 1 << 32)
    facts["copy_ms"] = _copy(engine.held[0].view.dtype, engine.held[0].view.dtype, count, runtime)
    facts["converting_copy_ms"] = _copy(held[0].view.dtype, engine.held[0].view.dtype, count, runtime)
    facts["copied_elements"], facts["elements"] = count, elements
    if runtime.pool.size > 1:
        facts |= _between(path, runtime)
    return facts


def _copy(source: torch.dtype, target: torch.dtype, count: int, runtime: Runtime) -> dict[str, float]:
    a = torch.empty(count, dtype=source, device=runtime.device).normal_()
    b = torch.empty(count, dtype=target, device=runtime.device)
    return timed(lambda: b.copy_(a), runtime)


def _between(path: Any, runtime: Runtime) -> dict[str, Any]:
    """What the links give: a large all-gather and all-to-all; and the bytes that a sync sends."""
    size, mib = runtime.pool.size, (256 << 20) if runtime.device.type == "cuda" else 1 << 20
    one = torch.ones(mib, dtype=torch.uint8, device=runtime.device)
    all_of_it = torch.empty(mib * size, dtype=torch.uint8, device=runtime.device)
    group = runtime.everyone
    gather = timed(lambda: dist.all_gather_into_tensor(all_of_it, one, group=group), runtime)
    back = torch.empty(mib * size, dtype=torch.uint8, device=runtime.device)
    exchange = timed(lambda: dist.all_to_all_single(back, all_of_it, group=group), runtime)
    per_rank = mib * (size - 1)
    return {
        "bytes_received": sum(p.nbytes for b in path.table.buckets for r in b.recv for p in r),
        "buckets": len(path.table.buckets),
        "all_gather_gbps": per_rank / gather["median"] / 1e6,
        "all_to_all_gbps": per_rank / exchange["median"] / 1e6,
    }


def requests(vocab: int, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    high = min(vocab, 40000)
    tokens = torch.randint(min(1000, high // 2), high, (PROMPTS, PROMPT), generator=generator)
    return [Request(i, row.tolist(), SAMPLES, seed) for i, row in enumerate(tokens)]


def measure_rollout(rollout: Rollout, config: Config, vocab: int, runtime: Runtime) -> dict[str, Any]:
    """Rounds of ours and of `LLM.generate` in turn, same prompts and lengths; then what the collector costs."""
    import vllm

    engine = rollout.engine
    assert isinstance(engine, VllmRollout)
    response = config.data.max_response_length
    tokens = PROMPTS * SAMPLES * response
    params = SamplingParams(max_tokens=response, ignore_eos=True)
    theirs = vllm.SamplingParams(
        n=SAMPLES, temperature=1.0, max_tokens=response, ignore_eos=True, logprobs=0, detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip

    def plain(seed: int) -> None:
        """What `LLM.generate` does (which wants a tokenizer): queue everything, step until it is done."""
        inner = engine.vllm.engine
        for r in requests(vocab, seed):
            inner.add_request(f"{seed}/{r.uid}", {"prompt_token_ids": list(r.prompt_ids)}, theirs)
        while inner.has_unfinished_requests():
            inner.step()

    def ours(seed: int) -> None:
        engine.generate(requests(vocab, seed), params, seed=0)

    found: dict[str, Any] = {"samples": PROMPTS * SAMPLES, "prompt": PROMPT, "response": response}
    kinds = {"ours": ours, "plain": plain}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(ROUNDS):
        for name, call in kinds.items():
            seed = 2 * round_ + (name == "plain")
            rates[name].append(tokens / timed(lambda s=seed, c=call: c(s), runtime, 1)["median"] * 1e3)
    found["tokens_per_s"] = rates
    gc.collect()
    gc.freeze()
    gc.disable()
    rates = {name: [] for name in kinds}
    for round_ in range(2):
        for name, call in kinds.items():
            seed = 100 + 2 * round_ + (name == "plain")
            rates[name].append(tokens / timed(lambda s=seed, c=call: c(s), runtime, 1)["median"] * 1e3)
    gc.enable()
    found["tokens_per_s_without_gc"] = rates
    return found


def measure_sampler(vocab: int, runtime: Runtime) -> dict[str, Any]:
    """One draw for 512 rows: the keyed kernel, the same in torch, and torch's softmax and multinomial."""
    rows = 512
    logits = torch.randn(rows, vocab, device=runtime.device, dtype=torch.bfloat16)
    keys = row_keys(0, 1, torch.arange(rows), torch.zeros(rows, dtype=torch.int64)).to(runtime.device)
    at = torch.arange(rows, device=runtime.device)
    params = SamplingParams()
    ours, plain = sample(logits, params, keys, at), sample(logits, params, keys, at, 256)
    return {
        "same_tokens": (ours[0] == plain[0]).float().mean().item(),
        "log_prob_difference": (ours[1] - plain[1]).abs().max().item(),
        "kernel_ms": timed(lambda: sample(logits, params, keys, at), runtime),
        "torch_ms": timed(lambda: sample(logits, params, keys, at, 256), runtime),
        "softmax_multinomial_ms": timed(lambda: torch.multinomial(logits.float().softmax(-1), 1), runtime),
        "read_once_ms": timed(lambda: logits.amax(-1), runtime),
    }


def measure_swap(rollout: Rollout, vocab: int, runtime: Runtime) -> dict[str, Any]:
    """Sleep; then wake, sync and the first token of a batch, piece by piece, in milliseconds."""
    engine, rounds = rollout.engine, []
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for i in range(3):
        took: dict[str, float] = {}

        def clock(name: str, f: Callable[[], Any], took: dict[str, float] = took) -> None:
            took[name] = timed(f, runtime, 1)["median"]

        clock("sleep", engine.sleep)
        rollout.synced_at = -1
        clock("wake_weights", lambda: engine.wake("weights"))
        clock("sync", rollout.sync)
        clock("wake_kv_cache", lambda: engine.wake("kv_cache"))
        clock("prefill_and_first_token", lambda s=i: engine.generate(requests(vocab, 50 + s), params, seed=0))
        rounds.append(took)
    return {"rounds_ms": rounds}


def draw_on_device(device: torch.device) -> None:
    """Random weights of any values, fast: drawing them as every rank and world would takes a CPU minutes at 8B."""

    def block(name: str, index: int, shape: Any, seed: int, std: float) -> torch.Tensor:
        return torch.empty(*shape, device=device).normal_(0.0, std)

    random_weights._block = block


def main(out: Path, whats: list[str], overrides: list[str]) -> None:
    config = parse_arguments(["experiment=quickstart", "rollout=vllm", *overrides]).config()
    env = read_environment()
    runtime = start(config, plan_of(config, env), env)
    draw_on_device(runtime.device)
    model = load_model_facts(config)
    actor = make_engine("actor", config, model, config.actor.engine, runtime, folder=model.folder)
    at = time.perf_counter()
    rollout = Rollout(config, runtime, make_rollout_engine(config, model, runtime), actor)
    facts: dict[str, Any] = {
        "overrides": overrides,
        "ranks": env.world_size,
        "engine_start_s": time.perf_counter() - at,
    }
    rollout.sync()
    vocab = model.hf_config.vocab_size
    act = {
        "sync": lambda: measure_sync(rollout, runtime),
        "rollout": lambda: measure_rollout(rollout, config, vocab, runtime),
        "sampler": lambda: measure_sampler(vocab, runtime),
        "swap": lambda: measure_swap(rollout, vocab, runtime),
    }
    for what in whats:
        facts[what] = act[what]()
        if runtime.is_first:
            out.write_text(json.dumps(facts, indent=1))
            print(what, json.dumps(facts[what]), flush=True)
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
