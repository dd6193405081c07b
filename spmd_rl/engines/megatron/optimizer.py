"""AdamW over this rank's share of megatron-core's gradient buffers (ZeRO stage 1, arXiv:1910.02054), and clipping.

megatron-core's DistributedDataParallel lays parameters and float32 gradients out in flat buffers and scatters the sums
over dp·cp (experts: over edp). This is the step on a share: master weights in float32 for shares in another type, one
state a share, the norm over every distinct element once. megatron-core 0.16.1's own optimizer reports another norm for
experts beside tensor parallelism, and without Transformer Engine or Apex loads one `step` into all parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from spmd_rl.config.roles import OptimConfig
from spmd_rl.engines.megatron.model import Model
from spmd_rl.engines.megatron.weights import local_parameters
from spmd_rl.models.megatron_names import Parameter
from spmd_rl.runtime.mcore import DistributedDataParallel, ProcessGroupCollection


@dataclass
class Share:
    """The elements [start, stop) of a flattened parameter that this rank updates."""

    parameter: Parameter
    tensor: nn.Parameter
    start: int
    stop: int
    master: Tensor
    """Float32, the optimizer's; the parameter's own memory when that is float32."""
    counts: bool
    """Whether the norm counts it here: of equal elements on several ranks, one does."""

    @property
    def weights(self) -> Tensor:
        """These elements in the model."""
        return self.tensor.data.view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """Their summed gradient, in megatron-core's buffer."""
        return self.tensor.main_grad.view(-1)[self.start : self.stop]  # type: ignore[attr-defined,no-any-return]


class ShardedAdam:
    """The optimizer of one engine. `world` are all ranks of the role's pool."""

    def __init__(
        self, model: Model, wrapped: list[DistributedDataParallel], optim: OptimConfig, world: ProcessGroup
    ) -> None:
        self.optim, self.world, self.wrapped = optim, world, wrapped
        self.steps = 0
        """Steps made, which is what bias correction counts."""
        self.scattered = wrapped[0].ddp_config.use_distributed_optimizer
        self.shares = list(self._make_shares(model))
        decayed = [s.master for s in self.shares if s.tensor.ndim > 1]
        others = [s.master for s in self.shares if s.tensor.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]] or [{"params": [torch.zeros(0, device=model.device)]}],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            fused=model.device.type == "cuda",
        )

    def _make_shares(self, model: Model) -> Iterator[Share]:
        for parameter, tensor in local_parameters(model):
            start, stop = self._range(parameter, tensor)
            if start < stop:
                weights = tensor.data.view(-1)[start:stop]
                master = weights.detach() if tensor.dtype == torch.float32 else weights.float()
                yield Share(parameter, tensor, start, stop, master, self._counts(model, parameter))

    def _range(self, parameter: Parameter, tensor: nn.Parameter) -> tuple[int, int]:
        """What of the flattened parameter lies in this rank's part of its bucket."""
        if not self.scattered:
            return 0, tensor.numel()
        wrapped = self.wrapped[parameter.chunk]
        buffers = wrapped.expert_parallel_buffers if parameter.is_expert else wrapped.buffers
        buffer = next(b for b in buffers if tensor in b.param_index_map)
        first, last, bucket_id = buffer.param_index_map[tensor]
        bucket_first, bucket_last = buffer.bucket_indices[bucket_id]
        part = (bucket_last - bucket_first) // buffer.data_parallel_world_size
        mine = bucket_first + part * buffer.data_parallel_group.rank()
        start = min(max(mine, first), last)
        return start - first, max(min(mine + part, last), start) - first

    def _counts(self, model: Model, parameter: Parameter) -> bool:
        groups: ProcessGroupCollection = model.groups
        first_copy = groups.tp.rank() == 0 or not parameter.is_whole
        if not self.scattered:  # then every rank of the group has the whole gradient
            first_copy &= (groups.expt_dp if parameter.is_expert else groups.dp_cp).rank() == 0
        return first_copy and not model.names.is_copy(parameter)

    def norm(self) -> float:
        """The global L2 norm of the gradient; the same on every rank."""
        mine = [s.gradient for s in self.shares if s.counts and s.stop > s.start]
        device = self.shares[0].master.device if self.shares else torch.device("cpu")
        squared = torch.zeros(1, dtype=torch.float64, device=device)
        if mine:
            squared += torch.stack(torch._foreach_norm(mine)).double().square().sum()  # type: ignore[arg-type]
        dist.all_reduce(squared, group=self.world)
        return float(squared.sqrt())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """One AdamW step with the gradient times `scale`; then all ranks have the new parameters."""
        for share in self.shares:
            gradient = share.gradient
            share.master.grad = gradient if scale == 1.0 else gradient.mul_(scale)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.steps += 1
        for share in self.shares:
            share.master.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Hand the master weights to the model: into this rank's share, then to all ranks that hold the parameter."""
        for share in self.shares:
            if share.master.dtype != share.tensor.dtype:
                share.weights.copy_(share.master)
        if self.scattered:
            for wrapped in self.wrapped:
                wrapped.start_param_sync(force_sync=True)

    def moments(self, share: Share) -> dict[str, Tensor]:
        """AdamW's exp_avg and exp_avg_sq of a share, made (as zeros) when no step has been taken yet."""
        state: dict[str, Any] = self.adam.state[share.master]
        if not state:
            state["step"] = torch.zeros((), device=share.master.device if self.adam.defaults["fused"] else "cpu")
            state["exp_avg"] = torch.zeros_like(share.master)
            state["exp_avg_sq"] = torch.zeros_like(share.master)
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}

    def resume(self, steps: int) -> None:
        """Go on after `steps` steps, with masters and moments as they were loaded in place.

        Each share has a `step` of its own: AdamW adds 1 to the tensor, and would do so once a share to a shared one.
        """
        self.steps = steps
        for share in self.shares:
            self.moments(share)
            self.adam.state[share.master]["step"].fill_(steps)
        self.publish()
