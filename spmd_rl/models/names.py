"""Parameter names: ours (wrapped, sharded, with adapters, experts fused) and those of a checkpoint."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


def clean_name(name: str) -> str:
    """The name without what torch.compile, activation checkpointing and sharding put into it."""
    return _WRAPPERS.sub("", name).removeprefix(".")


@dataclass(frozen=True)
class Export:
    """One tensor as a checkpoint (and a rollout engine) names it, made from one or more parameters of ours."""

    name: str
    """Its name in the checkpoint."""
    sources: tuple[str, ...]
    """The parameters it is made from, by their names in `model.named_parameters()`."""
    region: tuple[slice | int, ...] | None = ()
    """The part of the one source that it is, as an index; None when it is computed (adapters merged in)."""
    compute: Callable[[Sequence[Tensor]], Tensor] | None = None
    """Whole source tensors, in that order -> the tensor; only where `region` is None."""

    def make(self, sources: Sequence[Tensor]) -> Tensor:
        """The tensor, from the whole source tensors in order; a view where it is a region."""
        if self.region is None:
            assert self.compute is not None, f"{self.name} is neither a region nor computed"
            return self.compute(sources)
        return sources[0][self.region] if self.region else sources[0]


def exports(model: nn.Module) -> Iterator[Export]:
    """Every tensor of the checkpoint, in parameter order: adapters merged, experts one by one, tied weights once.

    `model` is a `Policy` or a transformers model, sharded or not. Pure: no tensor is read, so all ranks get the same.
    """
    from spmd_rl.models.lora import merged
    from spmd_rl.models.policy import Policy

    prefix = "model." if isinstance(model, Policy) else ""
    for name, parameter in model.named_parameters():
        clean = clean_name(name).removeprefix(prefix)
        if ".lora_" in clean:
            continue
        export = Export(clean, (name,))
        if ".base_layer." in clean:
            export = merged(model, name, clean)
        if fused := _FUSED.match(clean):
            yield from _experts(fused, name, parameter.shape[0], parameter.shape[1])
        else:
            yield export


def export_tensors(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every export; `whole` gathers a parameter, once even if several exports need it."""
    parameters = dict(model.named_parameters())
    gathered: dict[str, Tensor] = {}
    for export in exports(model):
        if set(export.sources) != set(gathered):  # exports that share a source follow each other
            gathered = {name: whole(parameters[name]).detach() for name in export.sources}
        yield export.name, export.make([gathered[name] for name in export.sources])


def destinations(model: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> where that tensor lies in a plain model without adapters: copy into it to load it."""
    parameters = dict(model.named_parameters())
    return {export.name: export.make([parameters[s].data for s in export.sources]) for export in exports(model)}


def _experts(fused: re.Match[str], source: str, experts: int, width: int) -> Iterator[Export]:
    """[E, 2I, H] gate_up_proj -> E gate_proj and up_proj of [I, H]; [E, H, I] down_proj -> E down_proj of [H, I]."""
    for e in range(experts):
        for part, rows in expert_parts(fused[2], width):
            yield Export(f"{fused[1]}.{e}.{part}.weight", (source,), (e, rows))


def expert_parts(fused: str, width: int) -> list[tuple[str, slice]]:
    """Which rows of one expert's fused matrix (`width` rows) are which matrix of the checkpoint."""
    if fused == "gate_up_proj":
        return [("gate_proj", slice(0, width // 2)), ("up_proj", slice(width // 2, width))]
    return [("down_proj", slice(0, width))]


def fused_experts(name: str) -> tuple[str, str] | None:
    """(module, gate_up_proj or down_proj) when this parameter holds all experts of a layer."""
    match = _FUSED.match(name)
    return (match[1], match[2]) if match else None
