"""`spmd-rl export`: a checkpoint's policy as a Hugging Face folder that transformers and vLLM load."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import load_config
from spmd_rl.models.loading import (
    allocate,
    build_meta,
    load_generation_config,
    load_hf_config,
    load_tokenizer,
    resolve,
    save_folder,
)
from spmd_rl.models.lora import add_adapters
from spmd_rl.models.names import destinations, export_tensors
from spmd_rl.models.policy import Policy
from spmd_rl.trainer.checkpoint import find_checkpoint, read_state, shards_of

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(argv: list[str]) -> int:
    """Parse the command line and export; one process, on the CPU."""
    parser = argparse.ArgumentParser(prog="spmd-rl export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's folder, or a run's output_dir for its newest one")
    parser.add_argument("folder", type=Path, help="where to write; must not exist, or be empty")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="type of the weights (default: %(default)s)"
    )
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest file in GB (default: %(default)s)")
    options = parser.parse_args(argv)
    source = find_checkpoint(options.checkpoint)
    export(source, options.folder, DTYPES[options.dtype], int(options.shard_gb * 1e9))
    print(f"{source} -> {options.folder}")
    return 0


def export(checkpoint: Path, folder: Path, dtype: torch.dtype, max_shard_bytes: int = 4 << 30) -> None:
    """Write the actor of `checkpoint` into `folder`: weights (adapters merged), config, tokenizer.

    Raises ConfigError when the run's config is missing, or the checkpoint holds another model.
    """
    config = _run_config(checkpoint)
    model = config.model
    hf_config = load_hf_config(model)
    start = None if model.random_init else resolve(model.path, trust_remote_code=model.trust_remote_code)
    lm = build_meta(hf_config, dtype, trust_remote_code=model.trust_remote_code)
    policy = Policy(add_adapters(lm, model.lora) if model.lora.rank else lm)
    allocate(policy, "cpu")
    _read(checkpoint, policy)
    save_folder(
        folder,
        hf_config,
        export_tensors(policy, lambda parameter: parameter),
        tokenizer=load_tokenizer(model),
        generation_config=load_generation_config(start) if start is not None else None,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def _run_config(checkpoint: Path) -> Config:
    file = checkpoint.absolute().parents[1] / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{checkpoint}: the run's config is not at {file}; keep checkpoints inside their output_dir")
    return load_config(file)


def _read(checkpoint: Path, policy: Policy) -> None:
    """Fill the policy from the shards, whatever number of ranks wrote them; without a process group."""
    model: dict[str, Any] = get_model_state_dict(policy)
    shards = shards_of(checkpoint, read_state(checkpoint)["shards"]["actor"])
    saved = FileSystemReader(shards).read_metadata().state_dict_metadata
    if not any(f"actor.model.{name}" in saved for name in model):
        model = destinations(policy)  # the Megatron engine saves under the checkpoint's own names
    missing = [name for name in model if f"actor.model.{name}" not in saved]
    if missing:
        raise ConfigError(f"{checkpoint}: holds no {missing[0]}; was it saved from another model?")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what we want here
        dcp.load({"actor": {"model": model}}, checkpoint_id=str(shards), no_dist=True)
