"""A model on the meta device gets its memory and its weights: only this rank's slices are read or drawn."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from spmd_rl.config import ConfigError
from spmd_rl.models.checkpoint import Checkpoint
from spmd_rl.models.lora import base_name
from spmd_rl.models.names import clean_name
from spmd_rl.models.random_weights import random_region


@dataclass
class _Place:
    """Where a parameter or buffer hangs, and what a checkpoint calls it."""

    name: str
    owner: nn.Module
    attribute: str


@torch.no_grad()
def materialise(
    model: nn.Module,
    folder: Path | None,
    device: torch.device | str,
    *,
    seed: int = 0,
    buffer_device: torch.device | str | None = None,
    fresh: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> None:
    """Give a meta model its memory on `device` and its weights from `folder`, or at random when that is None.

    Parameters may be plain or sharded (DTensor). Those whose names hold a text of `fresh`, and adapters, start at
    random from `seed`, the same on any number of ranks. Tied weights stay tied. Buffers that no checkpoint has (rotary
    frequencies) are computed anew, on `buffer_device` (default: `device`).
    Raises ConfigError that names the key when a tensor is missing, has another shape, or is left over in the folder
    (but for keys that hold a text of `ignore`).
    """
    lm_name, lm = next((n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel))
    prefix = f"{clean_name(lm_name)}." if lm_name else ""
    tied = _tied_places(model, prefix)
    buffers = _persistent_buffers(model, prefix)
    allocate(model, device, buffer_device)
    checkpoint = Checkpoint(folder) if folder is not None else None
    value = _source(checkpoint, lm, seed, (".lora_A.", ".lora_B.", *fresh))
    for places in tied:
        parameter = places[0].owner._parameters[places[0].attribute]
        assert parameter is not None, places[0].name
        local, region = _local(parameter)
        local.copy_(value([p.name for p in places], parameter.shape, region))
    for place in buffers:
        buffer, region = _local(getattr(place.owner, place.attribute))
        buffer.copy_(value([place.name], buffer.shape, region))
    if checkpoint is not None:
        _refuse_leftovers(checkpoint, lm, {p.name for places in tied for p in places}, ignore)


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device | str, buffer_device: torch.device | str | None = None) -> None:
    """Memory for what is on the meta device, parameters uninitialised: for a model whose weights come by a sync.

    Parameters go to `device`; buffers to `buffer_device` (default: `device`), with right values unless a checkpoint
    has them.
    """
    tied = _tied_places(model, "")
    recomputed = _recompute_buffers(model)

    def empty(x: Tensor) -> Tensor:
        where = device if isinstance(x, nn.Parameter) else buffer_device or device
        return torch.empty_like(x, device=where) if x.is_meta else x

    model._apply(empty)  # tells FSDP of its new shards, but unties: tie again
    for first, *others in tied:
        for place in others:
            place.owner._parameters[place.attribute] = first.owner._parameters[first.attribute]
    for owner, attribute, tensor in recomputed:
        getattr(owner, attribute).copy_(tensor)


def _tied_places(model: nn.Module, prefix: str) -> list[list[_Place]]:
    """The places of each parameter, more than one when it is tied."""
    found: dict[int, list[_Place]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        place = _Place(base_name(clean_name(name).removeprefix(prefix)), model.get_submodule(owner), attribute)
        found.setdefault(id(parameter), []).append(place)
    return list(found.values())


def _persistent_buffers(model: nn.Module, prefix: str) -> list[_Place]:
    return [
        _Place(clean_name(f"{name}.{attribute}").removeprefix(prefix), owner, attribute)
        for name, owner in model.named_modules()
        for attribute in owner._buffers
        if attribute not in owner._non_persistent_buffers_set
    ]


def _recompute_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Values of the buffers that are not saved: each module with such buffers is made once more, with real numbers."""
    values = []
    for name, owner in model.named_modules():
        attributes = [a for a in owner._buffers if a in owner._non_persistent_buffers_set]
        if not attributes:
            continue
        if not hasattr(owner, "config"):
            raise ConfigError(f"{name} ({type(owner).__name__}): its buffers {attributes} are in no checkpoint")
        again = type(owner)(config=owner.config)
        values += [(owner, a, again.get_buffer(a)) for a in attributes]
    return values


def _local(x: Tensor) -> tuple[Tensor, list[slice]]:
    """This rank's part of a tensor, and which region of the whole it is."""
    if not isinstance(x, DTensor):
        return x, [slice(0, n) for n in x.shape]
    sizes, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return x.to_local(), [slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)]


def _source(
    checkpoint: Checkpoint | None, lm: PreTrainedModel, seed: int, fresh: Sequence[str]
) -> Callable[[list[str], Sequence[int], list[slice]], Tensor]:
    """(a tensor's names, its whole shape, a region) -> the region's values, from the checkpoint or at random."""
    std = float(getattr(lm.config, "initializer_range", 0.02))

    def value(names: list[str], shape: Sequence[int], region: list[slice]) -> Tensor:
        if checkpoint is None or any(text in names[0] for text in fresh):
            return random_region(names[0], shape, region, seed, std)
        return checkpoint.read([*names, *(_other_prefix(n, lm.base_model_prefix) for n in names)], shape, region)

    return value


def _other_prefix(name: str, base: str) -> str:
    """Folders saved from the base model lack its prefix, and the other way round."""
    return name.removeprefix(f"{base}.") if name.startswith(f"{base}.") else f"{base}.{name}"


def _refuse_leftovers(checkpoint: Checkpoint, lm: PreTrainedModel, known: set[str], ignore: Sequence[str]) -> None:
    patterns = [*(getattr(lm, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    patterns += [re.escape(text) for text in ignore]
    known = known | {_other_prefix(name, lm.base_model_prefix) for name in known}
    left = [k for k in checkpoint.unread() if k not in known and not any(re.search(p, k) for p in patterns)]
    if left:
        shown = ", ".join(left[:3]) + (" …" if len(left) > 3 else "")
        raise ConfigError(
            f"{checkpoint.folder}: {len(left)} tensors have no place in a {type(lm).__name__}: {shown}; "
            "is config.json of the same model as the weights?"
        )
