"""Hot swap of an optimizer's state against the rate at which this machine copies one large pinned buffer:

    python -m benchmarks.swap [--shape qwen3-8b] [--bytes N] [--rounds 5] [--device cuda] [--out FILE]

Both are measured in the same run, each way by itself and by turns. The state is AdamW's two moments of the shape's
parameters (layer by layer, as FSDP2 on one rank holds them), or as much of it as `--bytes` allows. Two figures a way:
the copies alone, and the whole call until the device's memory is given back or may be read (with `empty_cache`, as the
rollout engine has it). On a CPU it only shows that it runs: there a copy goes from the host to the host.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config.run import ModelConfig
from spmd_rl.engines.host_pool import CopyStream, Swap
from spmd_rl.models.loading import build_meta, load_hf_config

GIB = 2**30


def state_of(shape: str, limit: int, device: torch.device) -> list[Tensor]:
    """float32 moments of the shape's parameters in order, two each, until `limit` bytes."""
    moments: list[Tensor] = []
    left = limit
    for parameter in build_meta(load_hf_config(ModelConfig(shape=shape, random_init=True))).parameters():
        for _ in range(2):
            size = min(parameter.numel(), left // 4)
            left -= 4 * size
            if size:
                moments.append(torch.randn(size, device=device))
    return moments


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(act: Callable[[], Any], device: torch.device) -> float:
    """Seconds until all of it is done."""
    wait(device)
    began = time.perf_counter()
    act()
    wait(device)
    return time.perf_counter() - began


def large_copies(size: int, device: torch.device, rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of one copy of `size` bytes each way, between one device buffer and one that torch pins."""
    here = torch.empty(size, dtype=torch.uint8, device=device)
    there = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there.zero_()
    stream = CopyStream(device)
    for _ in range(rounds):
        found = {}
        for way, pair in (("out", (there, here)), ("in", (here, there))):
            stream.start([pair])
            found[way] = stream.seconds()
        yield found


def swaps(swap: Swap, device: torch.device, rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of a swap each way: the copies, the whole of it, and how long its start kept the rank."""
    for _ in range(rounds):
        found = {}

        def out() -> None:
            swap.leave()
            swap.free()
            if device.type == "cuda":
                torch.cuda.empty_cache()

        def back() -> None:
            swap.come()
            swap.settle()

        found["out whole"], found["in whole"] = timed(out, device), timed(back, device)
        went, came = swap.take()
        assert went.bytes == came.bytes, "what came back is what went out"
        found |= {"out": went.copying, "in": came.copying, "in start": came.waiting}
        yield found


def measure(shape: str, limit: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """The figures of one size; the first round of each kind warms up and is kept apart."""
    moments = state_of(shape, limit, device)
    size = sum(x.nbytes for x in moments)
    sums = [float(x.sum(dtype=torch.float64)) for x in moments]
    swap = Swap("optimizer", lambda: moments, device)
    began = time.perf_counter()
    swap.leave()  # makes the pool
    swap.free()
    first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.empty_cache()
    swap.come()
    swap.settle()
    swap.take()
    swapped = list(swaps(swap, device, rounds + 1))[1:]
    swap.leave()  # makes room on the device for the large buffer
    swap.free()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    plain_size = min(size, 8 * GIB)
    plain = list(large_copies(plain_size, device, rounds + 1))[1:]
    swap.come()
    swap.settle()
    assert [float(x.sum(dtype=torch.float64)) for x in moments] == sums, "the state has changed on its way"
    rates = {way: plain_size / median(r[way] for r in plain) / 1e9 for way in ("out", "in")}
    found: dict[str, Any] = {
        "shape": shape,
        "bytes": size,
        "tensors": len(moments),
        "rounds": rounds,
        "first swap out, with its pool made": first,
        "plain copy bytes": plain_size,
        "plain copy GB/s": rates,
        "seconds": {name: [r[name] for r in swapped] for name in swapped[0]},
    }
    for name in ("out", "in", "out whole", "in whole"):
        rate = found["bytes"] / median(r[name] for r in swapped) / 1e9
        found[f"swap {name}"] = {"GB/s": rate, "of the plain copy": rate / rates[name.split()[0]]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", help="a shipped shape")
    parser.add_argument("--bytes", type=float, default=float("inf"), help="at most so much of its state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")) / "swap.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    limit = int(min(arguments.bytes, 2.0**60))
    found = measure(arguments.shape, limit, arguments.rounds, device)
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found["torch"] = torch.__version__
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    rates = found["plain copy GB/s"]
    print(f"{found['device']}: {found['bytes'] / GIB:.2f} GiB in {found['tensors']} tensors of {found['shape']}")
    print(f"one large pinned copy: out {rates['out']:.1f} GB/s, in {rates['in']:.1f} GB/s")
    for name in ("out", "out whole", "in", "in whole"):
        entry = found[f"swap {name}"]
        print(f"swap {name:<9} {entry['GB/s']:6.1f} GB/s  {entry['of the plain copy']:6.1%} of the plain copy")


if __name__ == "__main__":
    main()
