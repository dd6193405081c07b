"""Real gloo ranks for a test. They fork from one server process that has imported torch and transformers already."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(
    [
        "spmd_rl.models.loading",
        "spmd_rl.models.policy",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "peft",
    ]
)


def run_ranks(worker: Callable[[int, Path], Any], world: int, folder: Path) -> list[Any]:
    """worker(rank, folder) on each of `world` ranks under one gloo group; what each returned (must suit torch.save)."""
    mp.start_processes(_rank, args=(worker, world, folder), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def _rank(rank: int, worker: Callable[[int, Path], Any], world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(worker(rank, folder), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
