"""Parts of Hugging Face tensors as torch DCP saves and loads them, so that a checkpoint knows nothing of layouts.

DCP takes a tensor of another class if that says what it holds: `Boxes` names a whole tensor's shape and the boxes of
it that this rank has. A share of the optimizer is an interval of a flattened parameter, which is a few boxes; what is
saved under one layout is read under any other, without gathering anything.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from spmd_rl.engines.megatron.weights import Box


class Boxes(Tensor):
    """A whole tensor's shape and type, without its memory, and this rank's boxes of it. Only for torch DCP."""

    boxes: list[Box]

    @staticmethod
    def __new__(cls, boxes: list[Box]) -> "Boxes":
        first = boxes[0]
        made = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.local.dtype, device=first.local.device)  # type: ignore[attr-defined]
        made.boxes = boxes
        return made

    def __init__(self, boxes: list[Box]) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Boxes({self.boxes[0].name}, {len(self.boxes)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: Boxes can be saved and loaded, not computed with")

    def __deepcopy__(self, memo: Any) -> "Boxes":
        """For saves in the background: a copy on the host of these boxes alone, not of the buffers they view."""
        return Boxes(
            [Box(b.name, b.shape, b.starts, b.sizes, b.local.detach().to("cpu", copy=True)) for b in self.boxes]
        )

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(box.local), self.size()),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.starts), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box.local for box in self.boxes if torch.Size(box.starts) == index.offset)


def by_name(boxes: Iterable[Box]) -> dict[str, Boxes]:
    """Name -> the boxes of that tensor."""
    ordered = sorted(boxes, key=lambda box: box.name)
    return {name: Boxes(list(found)) for name, found in groupby(ordered, key=lambda box: box.name)}
