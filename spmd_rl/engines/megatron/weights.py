"""Weights in and out of a Megatron model under their Hugging Face names, a parameter at a time.

In: each rank reads the boxes that it holds from the folder's mapped files. Out: either `local_parts`, what this rank
holds (a weight sync starts from it), or `whole_tensors`, gathered over the ranks that together hold one copy.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.config import ConfigError
from spmd_rl.engines.megatron.model import Model
from spmd_rl.models.checkpoint import Checkpoint
from spmd_rl.models.megatron_names import VALUE_HEAD, Cut, MegatronNames, Parameter, Piece, fused_source, rectangles
from spmd_rl.models.random_weights import random_region
from spmd_rl.topology.layout import Layout, RoleLayout
from spmd_rl.weights.held import Box, Held


@dataclass(frozen=True)
class Part:
    """A box of a checkpoint's tensor that this rank holds, and the whole tensor's shape."""

    held: Held
    shape: tuple[int, ...]


def cut_of(layout: RoleLayout, pool_rank: int) -> Cut:
    """Where a rank is on the axes that cut parameters."""
    assert layout.expert is not None, f"role {layout.role} has a Megatron layout"
    dense, expert = layout.mesh.coords(pool_rank), layout.expert.coords(pool_rank)
    sizes = layout.expert.axis_size
    return Cut(dense["tp"], layout.mesh.axis_size("tp"), expert["ep"], sizes("ep"), expert["etp"], sizes("etp"))


def local_parameters(model: Model) -> Iterator[tuple[Parameter, nn.Parameter]]:
    """This rank's parameters, in the order of the table."""
    found = [dict(chunk.named_parameters()) for chunk in model.chunks]
    for parameter in model.names.parameters(model.stage):
        yield parameter, found[parameter.chunk].pop(parameter.name)
    left = [name for names in found for name in names]
    assert not left, f"parameters that the table does not know: {left}"


def local_parts(model: Model, cut: Cut) -> Iterator[Part]:
    """Every part of the checkpoint that this rank holds, as views of its parameters; the copy of a tied embedding is
    left out. Ranks that differ in dp or cp alone hold the same."""
    for parameter, tensor in local_parameters(model):
        if not model.names.is_copy(parameter):
            yield from flat_parts(model.names.pieces(parameter, cut), tensor.detach().view(-1), 0)


def flat_parts(pieces: Sequence[Piece], values: Tensor, start: int) -> Iterator[Part]:
    """The parts that `values`, the elements from `start` on of a flattened parameter, are: views of it, in order.

    Each piece is an interval of the flattened parameter, and they follow each other.
    """
    at, stop = 0, start + len(values)
    for piece in pieces:
        size = prod(piece.sizes)
        for low, high, starts, sizes in rectangles(piece.sizes, max(start - at, 0), min(stop - at, size)):
            place = tuple(a + b for a, b in zip(piece.starts, starts, strict=True))
            local = values[at + low - start : at + high - start].view(sizes)
            yield Part(Held(Box(piece.name, place, sizes), local), piece.shape)
        at += size


@torch.no_grad()
def fill(model: Model, cut: Cut, folder: Path | None, *, seed: int, std: float, fresh_head: bool = False) -> None:
    """Fill the parameters from a folder, or at random from `seed` when it is None: the same numbers on any layout and
    as FSDP has. A fresh value head says 0. Raises ConfigError for a tensor that is missing, misshapen or left over."""
    checkpoint = Checkpoint(folder) if folder is not None else None
    if checkpoint is not None:
        _refuse_leftovers(checkpoint, model.names)
    for parameter, tensor in local_parameters(model):
        if parameter.name == VALUE_HEAD and fresh_head:
            tensor.zero_()
            continue
        for piece in model.names.pieces(parameter, cut):
            if checkpoint is not None:
                value = checkpoint.read(_names(piece.name), piece.shape, piece.region)
            else:
                name, shape, region = fused_source(piece, model.names.experts)
                value = random_region(name, shape, region, seed, std)
            view = tensor[piece.place]
            view.copy_(value.reshape(view.shape))


def _names(name: str) -> list[str]:
    """A folder saved from the base model lacks its prefix."""
    return [name, name.removeprefix("model.")] if name.startswith("model.") else [name]


def _refuse_leftovers(checkpoint: Checkpoint, names: MegatronNames) -> None:
    known = {alias for name in names.checkpoint_names for alias in _names(name)}
    ignored = r"rotary_emb\.inv_freq$|^score\.bias$" + (r"|^lm_head\." if names.value_head or names.tied else "")
    left = sorted(key for key in checkpoint.keys() - known if not re.search(ignored, key))
    if left:
        shown = ", ".join(left[:3]) + (" …" if len(left) > 3 else "")
        raise ConfigError(
            f"{checkpoint.folder}: {len(left)} tensors have no place in a Megatron {names.config.model_type}: {shown}; "
            "is config.json of the same model as the weights?"
        )


@torch.no_grad()
def whole_tensors(model: Model, layout: RoleLayout, pool_rank: int) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, whole tensor), one parameter's at a time, on every rank; each rank with the same dp and cp
    takes part. Every rank broadcasts what it holds once, and all know by the table what comes when."""
    tensors = {(p.chunk, p.name): t for p, t in local_parameters(model)}
    for stage in range(model.stages):
        for parameter in model.names.parameters(stage):
            if not model.names.is_copy(parameter):
                local = tensors.get((parameter.chunk, parameter.name)) if stage == model.stage else None
                yield from _whole(model, layout, pool_rank, stage, parameter, local)


def _whole(
    model: Model, layout: RoleLayout, pool_rank: int, stage: int, parameter: Parameter, local: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors that a parameter is a part of, each as soon as it is complete."""
    parts: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    fold, axes = _fold(layout, parameter)
    group = model.groups.tp_ep_pp if parameter.is_expert else model.groups.mp
    for owner in _owners(fold, axes, pool_rank, stage, parameter):
        pieces = model.names.pieces(parameter, cut_of(layout, owner))
        flat = torch.empty(sum(prod(p.sizes) for p in pieces), dtype=model.config.params_dtype, device=model.device)
        if owner == pool_rank:
            assert local is not None, "the owner is of this stage"
            torch.cat([local[p.place].reshape(-1) for p in pieces], out=flat)
        if group.size() > 1:
            dist.broadcast(flat, src=owner, group=group)
        for piece, values in zip(pieces, flat.split([prod(p.sizes) for p in pieces]), strict=True):
            if piece.name not in parts:
                parts[piece.name] = flat.new_empty(piece.shape)
                missing[piece.name] = prod(piece.shape)
            parts[piece.name][tuple(piece.region)] = values.view(piece.sizes)
            missing[piece.name] -= len(values)
        for name in [name for name, left in missing.items() if not left]:
            del missing[name]
            yield name, parts.pop(name)
    assert not missing, f"{parameter.name}: parts of {sorted(missing)} are held by no rank"


def _fold(layout: RoleLayout, parameter: Parameter) -> tuple[Layout, tuple[str, ...]]:
    assert layout.expert is not None, f"role {layout.role} has a Megatron layout"
    return (layout.expert, ("ep", "etp")) if parameter.is_expert else (layout.mesh, ("tp",))


def _owners(fold: Layout, axes: tuple[str, ...], pool_rank: int, stage: int, parameter: Parameter) -> list[int]:
    """Pool ranks that hold the parameter's distinct parts, at this rank's own place on every axis that copies it."""
    here = fold.coords(pool_rank)
    base = pool_rank + (stage - here["pp"]) * fold.stride("pp")
    on_stage = sorted(fold.group_of(base, *axes))
    return on_stage[:1] if parameter.is_whole else on_stage
