"""What the last stage makes of hidden states, and how the other stages come to know it.

Shapes: S tokens of this rank, R response tokens of a micro-batch, R' of them at this cp rank, H hidden size.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.engines.base import Outputs
from spmd_rl.engines.megatron.attention import gather_columns
from spmd_rl.engines.megatron.head import parallel_logprobs
from spmd_rl.engines.megatron.model import Model
from spmd_rl.engines.megatron.schedule import Micro
from spmd_rl.observe.metrics import Partial, Stat, merge, pack
from spmd_rl.runtime.mcore import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region


class TokenHead:
    """Token columns of a policy (log_probs, entropy, sum_pi_squared) or a critic (values)."""

    def __init__(self, model: Model, temperature: float, chunk: int) -> None:
        self.model, self.temperature, self.chunk = model, temperature, chunk

    def __call__(self, part: Micro, hidden: Tensor, want: Sequence[str]) -> Outputs:
        """Hidden states of the last stage [S or S/tp, 1, H] -> columns [R], equal on every tp and cp rank."""
        hidden_SH = self._whole(hidden)[:, 0]
        which, places = part.stream.find(part.positions, part.stream.cp_rank)
        chosen = hidden_SH.index_select(0, places.to(hidden.device))
        found = self._values(chosen) if self.model.names.value_head else self._stats(chosen, part.targets[which], want)
        return {name: gather_columns(column, part.positions, part.stream) for name, column in found.items()}

    def _whole(self, hidden: Tensor) -> Tensor:
        """[S, 1, H] on every tp rank. The backward sums what the parts of a vocabulary found; a value head is whole on
        each rank, so there nothing is to be summed."""
        group, parts = self.model.groups.tp, not self.model.names.value_head
        if self.model.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=parts, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group) if parts else hidden

    def _stats(self, chosen: Tensor, targets: Tensor, want: Sequence[str]) -> dict[str, Tensor]:
        stats = parallel_logprobs(
            chosen,
            self.model.head_weight(),
            targets.to(chosen.device),
            self.model.groups.tp,
            self.temperature,
            chunk=self.chunk,
            entropy="entropy" in want,
            sum_pi_squared="sum_pi_squared" in want,
        )
        columns = {"log_probs": stats.logprobs, "entropy": stats.entropy, "sum_pi_squared": stats.sum_pi_squared}
        return {name: column for name, column in columns.items() if column is not None}

    def _values(self, chosen: Tensor) -> dict[str, Tensor]:
        return {"values": (chosen @ self.model.head_weight().T)[:, 0].float()}

    def share_columns(self, parts: Sequence[Micro], found: Sequence[Outputs], want: Sequence[str]) -> list[Outputs]:
        """The last stage's columns of every micro-batch, on all stages."""
        counts = [len(part.positions) for part in parts]
        if self.model.stages == 1:
            return list(found)
        flat = torch.empty(len(want), sum(counts), dtype=torch.float32, device=self.model.device)
        if self.model.is_last:
            flat.copy_(torch.stack([torch.cat([outputs[name] for outputs in found]) for name in want]))
        dist.broadcast(flat, src=self._last(), group=self.model.groups.pp)
        return [dict(zip(want, piece, strict=True)) for piece in flat.split(counts, 1)]

    def share_metrics(self, found: Sequence[tuple[float, Partial]]) -> tuple[float, Partial]:
        """(the sum of the losses, the merged metrics) of the last stage, on all stages."""
        loss, partial = sum(loss for loss, _ in found), merge([partial for _, partial in found])
        if self.model.stages == 1:
            return loss, partial
        kinds = self._share_json({name: partial[name].kind for name in sorted(partial)})
        numbers = torch.zeros(1 + 2 * len(kinds), dtype=torch.float64)
        if self.model.is_last:
            numbers.copy_(torch.from_numpy(np.concatenate([[loss], pack(partial).ravel()])))
        dist.broadcast(numbers, src=self._last(), group=self.model.groups.pp)
        rows = numbers[1:].view(-1, 2).tolist()
        return numbers[0].item(), {n: Stat(k, *row) for (n, k), row in zip(kinds.items(), rows, strict=True)}

    def _share_json(self, value: Any) -> Any:
        """A small JSON value of the last stage, on all stages."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=self._last(), group=self.model.groups.pp)
        data = text if self.model.is_last else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=self._last(), group=self.model.groups.pp)
        return json.loads(bytes(data.tolist()))

    def _last(self) -> int:
        return dist.get_global_rank(self.model.groups.pp, self.model.stages - 1)
