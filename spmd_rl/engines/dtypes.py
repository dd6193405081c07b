"""The names of number types that a config may use."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on the CPU; `fastest` is bfloat16 on a CPU with AMX, too."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "fastest":
        return torch.bfloat16 if device.type == "cuda" or torch.cpu._is_amx_tile_supported() else torch.float32
    return DTYPES[name]
