"""The FSDP2 engine: transformers models sharded over [fsdp] or [ddp, fsdp], packed rows, Ulysses over the same ranks.

Gradients are summed, not averaged, over ranks: a loss is already this rank's share of the whole mini-batch's loss.
FSDP2: `torch.distributed.fsdp.fully_shard`, after Zhao et al. 2023, arXiv:2304.11277.

Shapes: T packed tokens of a micro-batch, R response tokens.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spmd_rl.config.roles import EngineConfig, OptimConfig
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.routes import NONE, routes_of
from spmd_rl.engines.base import Objective, Outputs, StepResult
from spmd_rl.engines.dtypes import compute_dtype
from spmd_rl.engines.schedule import learning_rate
from spmd_rl.models.attention import gather_tokens
from spmd_rl.models.loading import materialise
from spmd_rl.models.names import export_tensors
from spmd_rl.models.packing import Packing, response_positions
from spmd_rl.models.policy import decoder_layers
from spmd_rl.models.routing import Replay
from spmd_rl.observe.metrics import Partial, mean, merge
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.layout import RoleLayout
from spmd_rl.weights.held import Held, held_by


class FsdpEngine:
    """An `Engine`. Without `optim` it is frozen (ref, teacher)."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path | None,
        layout: RoleLayout,
        runtime: Runtime,
        config: EngineConfig,
        *,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
        fresh: Sequence[str] = (),
        ignore: Sequence[str] = (),
        top_k: int = 0,
        replays: bool = False,
    ) -> None:
        """Shard `model` (on the meta device) over the layout's mesh, then read each rank's slices from `folder`.

        `fresh`, `ignore`: see `materialise`. `top_k`: of a teacher, for its columns `top_ids` and `top_log_probs`.
        `replays`: the batches say which experts to choose (`data/routes.py`).
        """
        self.config, self.layout, self.device = config, layout, runtime.device
        self.temperature, self.top_k = temperature, top_k
        self.sp_group = runtime.groups.along(layout.batch, "sp")
        self.sp_rank = layout.batch.coords(runtime.pool_rank)["sp"]
        self.sp_size = layout.batch.axis_size("sp")
        self._lie: list[int] = []
        self._held: list[Held] | None = None
        self.replay = Replay(model, self.device) if replays else None
        self.model = self._shard(model, runtime)
        self._fill(folder, seed, fresh, ignore)
        self.optim = optim
        self.total_steps = total_steps
        self.version = 0
        self.optimizer = self._make_optimizer(optim) if optim else None
        if optim is None:
            self.model.requires_grad_(False)

    def _fill(self, folder: Path | None, seed: int, fresh: Sequence[str], ignore: Sequence[str]) -> None:
        materialise(self.model, folder, self._home(), seed=seed, buffer_device=self.device, fresh=fresh, ignore=ignore)

    def _home(self) -> torch.device:
        """Where the shards live: the host under FSDP's offload policy, else the rank's device."""
        return torch.device("cpu") if self.config.fsdp.offload_policy else self.device

    def _shard(self, model: nn.Module, runtime: Runtime) -> nn.Module:
        fsdp = self.config.fsdp
        mesh = runtime.groups.mesh(self.layout.mesh)
        precision = MixedPrecisionPolicy(
            param_dtype=compute_dtype(fsdp.param_dtype, self.device),
            reduce_dtype=compute_dtype(fsdp.reduce_dtype, self.device),
        )
        offload = CPUOffloadPolicy() if fsdp.offload_policy and self.device.type == "cuda" else OffloadPolicy()
        for layer in decoder_layers(model):
            if self.config.compile:
                layer.compile()
            fully_shard(
                layer,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=fsdp.reshard_after_forward,
            )
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums, and a factor of 1 needs none
        return model

    def _make_optimizer(self, optim: OptimConfig) -> torch.optim.Optimizer:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            fused=self._home().type == "cuda",  # foreach, the default there, takes another copy of the shards
        )

    def forward(self, batch: Batch, micro: Sequence[Sequence[int]], want: Sequence[str]) -> dict[str, Ragged]:
        self.model.eval()
        columns: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in want}
        none: dict[str, Tensor] = {}  # of each column: what a rank without rows has
        with torch.no_grad():
            for rows in micro:
                part = batch.select(rows)
                outputs = self._outputs(part, want)
                counts = part["responses"].lengths.tolist()
                for name in want:
                    found = outputs[name].cpu()
                    found = found.float() if found.is_floating_point() else found
                    none[name] = found[:0]
                    columns[name] += zip(rows, found.split(counts) if rows else (), strict=True)
        self._sharded()
        in_order = {name: [piece for _, piece in sorted(pairs, key=lambda p: p[0])] for name, pairs in columns.items()}
        lengths = [len(piece) for piece in next(iter(in_order.values()), [])]  # of the rows that are in `micro`
        lengths_N = torch.tensor(lengths, dtype=torch.int64)
        return {name: Ragged(torch.cat([none[name], *pieces]), lengths_N) for name, pieces in in_order.items()}

    def train(self, batch: Batch, micro: Sequence[Sequence[int]], objective: Objective) -> StepResult:
        assert self.optimizer is not None, "a frozen engine cannot be trained"
        assert self.optim is not None, "an optimizer has its settings"
        self.model.train()
        result = StepResult(lr=learning_rate(self.optim, self.version, self.total_steps))
        self._replay_metrics()  # counts from here on
        for rows in micro:
            part = batch.select(rows)
            loss, partial = objective(part, self._outputs(part, ["entropy"]))
            loss.backward()
            result.loss += loss.item()
            result.partial = merge([result.partial, partial])
        result.partial |= self._replay_metrics()
        result.grad_norm = self._clip()
        result.skipped = not torch.isfinite(torch.tensor(result.grad_norm)).item()
        if not result.skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = result.lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return result

    def _replay_metrics(self) -> Partial:
        """Under router replay `<role>/router_replay_differs`: the share of (token, layer, choice) since the last call
        that the router would not have made; of the ranks that have the same rows."""
        if self.replay is None:
            return {}
        differs = self.replay.take()
        if self.sp_size > 1:
            dist.all_reduce(differs, group=self.sp_group)
        return {f"{self.layout.role}/router_replay_differs": mean(*differs.tolist())}

    def _outputs(self, batch: Batch, want: Sequence[str]) -> Outputs:
        """Run the model over a micro-batch; token columns of all its response tokens, on every rank of the sp group."""
        prompts, responses = batch["prompts"], batch["responses"]
        if len(batch):
            pairs = zip(prompts.rows(), responses.rows(), strict=True)
            tokens = torch.cat([t for pair in pairs for t in pair])
            lengths = (prompts.lengths + responses.lengths).tolist()
        else:  # nothing to do here, but every rank takes part in the collectives
            tokens, lengths = torch.zeros(1, dtype=torch.int64), [1]
        packing = Packing.pack(lengths, self.sp_size, self.sp_rank, self.sp_group, self.device)
        positions = response_positions(prompts.lengths.tolist(), responses.lengths.tolist())
        places, mine = packing.local_positions(positions)
        if self.replay is not None:
            self.replay.routes = packing.local(routes_of(batch), NONE).to(self.device) if len(batch) else None
        outputs = self.model(
            input_ids=packing.local(tokens).to(self.device),
            position_ids=packing.position_ids(),
            packing=packing,
            positions=places.to(self.device),
            targets=responses.values[mine].to(self.device),
            temperature=self.temperature,
            entropy="entropy" in want,
            sum_pi_squared="sum_pi_squared" in want,
            chunk=self.config.logprob_chunk_tokens,
            **self._of_a_teacher(batch, want, mine),
        )
        if self.sp_size == 1 or not len(positions):
            return outputs
        counts = packing.counts(positions)
        return {name: gather_tokens(column, counts, self.sp_group) for name, column in outputs.items()}

    def _of_a_teacher(self, batch: Batch, want: Sequence[str], mine: slice) -> dict[str, Any]:
        """For a teacher: how many of its likeliest tokens to tell; for its student in training: those tokens."""
        if "top_ids" in want:
            return {"top_k": self.top_k}
        if "teacher_ids" not in batch or "entropy" not in want or not len(batch):
            return {}
        ids, log_probs = (batch[name].values[mine].to(self.device) for name in ("teacher_ids", "teacher_top_log_probs"))
        return {"teacher_ids": ids, "teacher_log_probs": log_probs}

    def _clip(self) -> float:
        """Scale the gradient to the clip norm; its global L2 norm before."""
        assert self.optim is not None
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.optim.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optim.clip_grad, norm)
        return float(norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from export_tensors(self.model, full)

    def held(self) -> list[Held] | None:
        if self._home() != self.device:
            return None
        lie = [_address(p) for p in self.model.parameters()]
        if lie != self._lie:
            self._lie, self._held = lie, held_by(self.model)
        return self._held

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def load_state(self, state: dict[str, Any], version: int) -> None:
        set_model_state_dict(self.model, state["model"])
        if self.optimizer is not None:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.version = version

    def resident(self, piece: str) -> list[Tensor]:
        parameters = list(self._sharded().parameters())
        if piece == "params":
            return [_local(p) for p in parameters]
        assert piece == "optimizer", piece
        states = self.optimizer.state.values() if self.optimizer else ()
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor) and x.ndim]
        return [_local(x) for x in [*moments, *(p.grad for p in parameters if p.grad is not None)]]

    def _sharded(self) -> nn.Module:
        """The model with nothing gathered: what a forward without a backward leaves is let go."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return self.model


def full(parameter: Tensor) -> Tensor:
    """The whole tensor; a collective over the mesh when it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _address(parameter: Tensor) -> int:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return local.data_ptr()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
