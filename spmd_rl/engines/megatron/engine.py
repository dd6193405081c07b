"""The Megatron engine: TP, SP, PP, VPP, CP, EP under the same `Engine` protocol as FSDP.

Shapes: S tokens of this rank, R response tokens of a micro-batch, H hidden size.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from spmd_rl.config.roles import EngineConfig, OptimConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.engines.base import Objective, StepResult
from spmd_rl.engines.dtypes import compute_dtype
from spmd_rl.engines.megatron.balance import load_metrics
from spmd_rl.engines.megatron.checkpoint import by_name
from spmd_rl.engines.megatron.cpu import on_device
from spmd_rl.engines.megatron.gradients import Finalize
from spmd_rl.engines.megatron.groups import collection
from spmd_rl.engines.megatron.memory import Memory
from spmd_rl.engines.megatron.model import Model
from spmd_rl.engines.megatron.optimizer import ShardedAdam
from spmd_rl.engines.megatron.outputs import TokenHead
from spmd_rl.engines.megatron.schedule import Micro, run_schedule
from spmd_rl.engines.megatron.settings import ddp_config
from spmd_rl.engines.megatron.weights import Part, cut_of, fill, flat_parts, local_parts, whole_tensors
from spmd_rl.engines.schedule import learning_rate
from spmd_rl.models.megatron_names import check_model
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.mcore import DistributedDataParallel
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.weights.held import Held


class MegatronEngine:
    """An `Engine`. Without `optim` it is frozen (ref, teacher); with `value_head` it is a critic."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        folder: Path | None,
        layout: RoleLayout,
        runtime: Runtime,
        config: EngineConfig,
        *,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
        value_head: bool = False,
        fresh_head: bool = False,
        replays: bool = False,
    ) -> None:
        """Build this rank's part and read its boxes from `folder` (None: random weights from `seed`).

        `replays`: the batches say which experts to choose (`data/routes.py`).
        """
        check_model(hf_config)
        self.config, self.layout, self.device, self.pool_rank = config, layout, runtime.device, runtime.pool_rank
        self.optim, self.total_steps, self.version = optim, total_steps, 0
        self.cut = cut_of(layout, runtime.pool_rank)
        self._lie: list[int] = []
        self._held: list[Held] | None = None
        dtype = compute_dtype(config.megatron.param_dtype, self.device)
        with on_device(self.device):
            groups = collection(layout, runtime.groups)
            recompute = config.gradient_checkpointing and optim is not None
            self.model = Model(hf_config, layout, config, groups, self.device, dtype, value_head, recompute, replays)
            std = float(getattr(hf_config, "initializer_range", 0.02))
            fill(self.model, self.cut, folder, seed=seed, std=std, fresh_head=fresh_head)
            self.chunks: list[Any] = list(self.model.chunks)
            self.optimizer = self._wrap(optim, runtime) if optim is not None else None
        self.memory = Memory(self.chunks, self.optimizer)
        self.memory.gradients(wanted=False)
        self.head = TokenHead(self.model, temperature, config.logprob_chunk_tokens)
        if optim is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)

    def _wrap(self, optim: OptimConfig, runtime: Runtime) -> ShardedAdam:
        """Gradient buffers around the chunks, and the optimizer of this rank's share of them."""
        model = self.model
        self.chunks = [
            DistributedDataParallel(
                model.config, ddp_config(self.config), chunk, disable_bucketing=at > 0, pg_collection=model.groups
            )
            for at, chunk in enumerate(model.chunks)
        ]
        model.config.finalize_model_grads_func = Finalize(model)
        return ShardedAdam(model, self.chunks, optim, runtime.everyone)

    def forward(self, batch: Batch, micro: Sequence[Sequence[int]], want: Sequence[str]) -> dict[str, Ragged]:
        parts = [Micro.of(batch.select(rows), self.model) for rows in micro]
        with on_device(self.device), torch.no_grad():
            for chunk in self.chunks:
                chunk.eval()
            outputs = run_schedule(
                self.model, self.chunks, parts, lambda part, h: self.head(part, h, want), train=False
            )
            outputs = self.head.share_columns(parts, outputs, want)
        columns: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in want}
        for rows, part, found in zip(micro, parts, outputs, strict=True):
            for name in want:
                pieces = found[name].cpu().split(part.rows["responses"].lengths.tolist())
                columns[name] += zip(rows, pieces, strict=True)
        return {
            name: Ragged.from_rows([piece for _, piece in sorted(pairs, key=lambda p: p[0])], torch.float32)
            for name, pairs in columns.items()
        }

    def train(self, batch: Batch, micro: Sequence[Sequence[int]], objective: Objective) -> StepResult:
        assert self.optimizer is not None, "a frozen engine cannot be trained"
        assert self.optim is not None, "an optimizer has its settings"
        result = StepResult(lr=learning_rate(self.optim, self.version, self.total_steps))
        parts = [Micro.of(batch.select(rows), self.model) for rows in micro]
        with on_device(self.device):
            load_metrics(self.model, self.layout.role)  # counts from here on
            self.memory.gradients(wanted=True)
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            found = run_schedule(
                self.model, self.chunks, parts, lambda part, h: self._loss(part, h, objective), train=True
            )
            result.loss, partial = self.head.share_metrics(found)
            result.partial = partial | load_metrics(self.model, self.layout.role)
            result.grad_norm = self.optimizer.norm()
            result.skipped = not torch.isfinite(torch.tensor(result.grad_norm)).item()
            if not result.skipped:
                self.optimizer.step(result.lr, self._clip_scale(result.grad_norm))
            self.memory.gradients(wanted=False)
        self.version += 1
        return result

    def _loss(self, part: Micro, hidden: Tensor, objective: Objective) -> tuple[Tensor, Any]:
        """The micro-batch's share of the loss, and (its value, its metrics)."""
        loss, partial = objective(part.rows, self.head(part, hidden, ["entropy"]))
        return loss, (loss.item(), partial)

    def _clip_scale(self, norm: float) -> float:
        """What the gradient is multiplied by, as torch.nn.utils.clip_grads_with_norm_ has it."""
        assert self.optim is not None
        return min(1.0, self.optim.clip_grad / (norm + 1e-6)) if self.optim.clip_grad > 0 else 1.0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from whole_tensors(self.model, self.layout, self.pool_rank)

    def held(self) -> list[Held] | None:
        lie = [p.data_ptr() for chunk in self.model.chunks for p in chunk.parameters()]
        if not all(lie):  # on the host
            return None
        if lie != self._lie:
            self._lie, self._held = lie, [part.held for part in local_parts(self.model, self.cut)]
        return self._held

    def state(self) -> dict[str, Any]:
        """Under Hugging Face names, whatever the layout: master weights in float32, AdamW's moments, steps made."""
        if self.optimizer is None:
            return {"model": by_name(local_parts(self.model, self.cut))}
        masters, moments = self._share_parts()
        steps = torch.tensor(self.optimizer.steps)
        return {"model": by_name(masters), "optimizer": {n: by_name(m) for n, m in moments.items()} | {"steps": steps}}

    def _share_parts(self) -> tuple[list[Part], dict[str, list[Part]]]:
        """(of the master weights, of each moment) that this rank has. The copy of a tied embedding is saved too, by
        the same name: what it holds is equal, and is read back into both."""
        assert self.optimizer is not None, "a frozen engine has no shares"
        masters: list[Part] = []
        moments: dict[str, list[Part]] = {"exp_avg": [], "exp_avg_sq": []}
        for share in self.optimizer.shares:
            pieces = self.model.names.pieces(share.parameter, self.cut)
            masters += flat_parts(pieces, share.master.detach(), share.start)
            for name, values in self.optimizer.moments(share).items():
                moments[name] += flat_parts(pieces, values, share.start)
        return masters, moments

    def load_state(self, state: dict[str, Any], version: int) -> None:
        self.version = version
        if self.optimizer is not None:
            with on_device(self.device), torch.no_grad():
                self.optimizer.resume(int(state["optimizer"]["steps"]))

    def resident(self, piece: str) -> list[Tensor]:
        return self.memory.resident(piece)
