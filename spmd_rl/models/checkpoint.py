"""A folder of safetensors as transformers writes and reads it: read slice by slice, write shard by shard."""

import copy
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spmd_rl.config import ConfigError
from spmd_rl.config.folders import writing
from spmd_rl.models.names import expert_parts, fused_experts

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises ConfigError when there is none, or not all of the index."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.gguf"))
        found = f"; it has {', '.join(others)}, save it again with save_pretrained to convert" if others else ""
        raise ConfigError(f"{folder}: no weights ({SINGLE} or {INDEX}){found}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder}: the weight files {', '.join(missing)} named by {INDEX} are missing")
    return [folder / name for name in names]


class Checkpoint:
    """The tensors of a folder by name. Only the bytes of the slices asked for are read (the files are mapped)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_keys: set[str] = set()
        self._files: dict[str, Any] = {}
        for file in weight_files(folder):
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file}: not a whole safetensors file: {error}") from error
            self._files |= dict.fromkeys(handle.keys(), handle)

    def keys(self) -> set[str]:
        return set(self._files)

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def read(self, names: Sequence[str], shape: Sequence[int], region: Sequence[slice]) -> Tensor:
        """A region of the tensor that goes by one of `names` and has `shape` as a whole.

        A layer's fused experts are put together from the checkpoint's single ones, the region's experts only.
        Raises ConfigError when no such tensor is there or its shape is another.
        """
        for name in names:
            if name in self._files:
                return self._slice(name, shape, region)
        for name in names:
            fused = fused_experts(name)
            if fused and any(key.startswith(f"{fused[0]}.0.") for key in self._files):
                return self._experts(*fused, shape, region)
        raise ConfigError(
            f"{self.folder}: tensor {names[0]!r} of the model is missing among {len(self._files)} tensors"
        )

    def unread(self) -> list[str]:
        """Keys that nothing asked for."""
        return sorted(self.keys() - self.read_keys)

    def _slice(self, name: str, shape: Sequence[int], region: Sequence[slice]) -> Tensor:
        self.read_keys.add(name)
        piece = self._files[name].get_slice(name)
        if list(piece.get_shape()) != list(shape):
            raise ConfigError(f"{self.folder}: {name} has shape {piece.get_shape()}, the config asks for {list(shape)}")
        sizes = [r.stop - r.start for r in region]
        if 0 in sizes:
            return torch.empty(sizes)
        return piece[tuple(region)] if sizes else self._files[name].get_tensor(name)

    def _experts(self, module: str, fused: str, shape: Sequence[int], region: Sequence[slice]) -> Tensor:
        parts = expert_parts(fused, shape[1])
        self.read_keys |= {f"{module}.{e}.{part}.weight" for e in range(shape[0]) for part, _ in parts}
        experts = [
            torch.cat(
                [self._matrix(f"{module}.{e}.{part}.weight", [r.stop - r.start, *shape[2:]]) for part, r in parts]
            )
            for e in range(region[0].start, region[0].stop)
        ]
        return torch.stack(experts)[(slice(None), *region[1:])] if experts else torch.empty(0, *shape[1:])

    def _matrix(self, name: str, shape: Sequence[int]) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"{self.folder}: tensor {name!r} of the model is missing")
        return self._slice(name, shape, [slice(0, n) for n in shape])


def save_folder(
    folder: Path,
    hf_config: PretrainedConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write a model folder that transformers and vLLM load; complete or not there at all.

    `tensors` yields whole tensors by checkpoint name (see `names.exports`), one at a time; no more than one shard of
    `max_shard_bytes` is held. `dtype` None keeps their types. One rank writes; others only drain the iterator.
    Raises ConfigError when the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: exists and is not empty; choose another folder")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with writing("the model's folder", folder.parent):
        partial.mkdir()
    try:
        kept = _write_shards(partial, tensors, dtype, max_shard_bytes)
        config = copy.deepcopy(hf_config)
        config.dtype = kept
        config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(partial)
        if generation_config is not None:
            generation_config.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, max_shard_bytes: int
) -> torch.dtype:
    """Safetensors files and their index; returns the type of the last tensor."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    kept = torch.float32

    def flush() -> None:
        save_file(held, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()
        if held and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        held[name], kept = tensor, tensor.dtype
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return kept
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"shard-{i}").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    return kept
