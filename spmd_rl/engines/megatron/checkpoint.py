"""Parts of Hugging Face tensors as torch DCP saves and loads them, so that a checkpoint knows nothing of layouts.

DCP takes a tensor of another class if that says what it holds: `Boxes` names a whole tensor's shape and the boxes of
it that this rank has. A share of the optimizer is an interval of a flattened parameter, which is a few boxes; what is
saved under one layout is read under any other, without gathering anything.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from spmd_rl.engines.megatron.weights import Part
from spmd_rl.weights.held import Held


class Boxes(Tensor):
    """A whole tensor's shape and type, without its memory, and this rank's boxes of it. Only for torch DCP."""

    held: list[Held]

    @staticmethod
    def __new__(cls, held: list[Held], shape: tuple[int, ...]) -> "Boxes":
        view = held[0].view
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=view.dtype, device=view.device)  # type: ignore[attr-defined]
        made.held = held
        return made

    def __init__(self, held: list[Held], shape: tuple[int, ...]) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Boxes({self.held[0].box.name}, {len(self.held)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """A save in the background asks for an empty one and copies the attributes, that is the views, to the host."""
        if func is torch.ops.aten.new_empty.default:
            device = (kwargs or {}).get("device", args[0].device)
            return Tensor._make_wrapper_subclass(cls, args[1], dtype=args[0].dtype, device=device)  # type: ignore[attr-defined]
        raise NotImplementedError(f"{func}: Boxes can be saved and loaded, not computed with")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(held.view), self.size()),
            )
            for held, chunk in zip(self.held, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(h.box.start), torch.Size(h.box.size)) for h in self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(h.view for h in self.held if torch.Size(h.box.start) == index.offset)


def by_name(parts: Iterable[Part]) -> dict[str, Boxes]:
    """Name -> what this rank holds of that tensor."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.held.box.name, []).append(part)
    return {name: Boxes([p.held for p in same], same[0].shape) for name, same in found.items()}
