"""How evenly a MoE model's tokens fall on its experts, of all ranks."""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from spmd_rl.engines.megatron.model import Model
from spmd_rl.observe.metrics import Partial, largest, mean


def load_metrics(model: Model, role: str) -> Partial:
    """`<role>/moe_load_max` and `/moe_load_mean`: over MoE layers, the busiest expert's tokens against an even share.

    1 is even, the number of experts over k is the worst. Counts everything computed since the last call, padding and
    recomputation too. Under router replay also `/router_replay_differs`: the share of (token, layer, choice) that the
    router would not have made. Empty for a model without experts; all ranks of the role call together.
    """
    if not model.names.experts:
        return {}
    found = torch.zeros(5, dtype=torch.float64, device=model.device)  # largest, sum, number of layers; replayed
    taken = [routing.take() for routing in model.routings().values()]
    if taken:
        load_LE, differs_L2 = (torch.stack(counts) for counts in zip(*taken, strict=True))
        dist.all_reduce(load_LE, group=model.groups.tp_dp_cp)
        dist.all_reduce(differs_L2, group=model.groups.tp_dp_cp)
        ratio_L = load_LE.amax(1) / load_LE.mean(1).clamp(min=1)
        ratios = torch.stack([ratio_L.max(), ratio_L.sum(), torch.full_like(ratio_L[0], len(ratio_L))])
        found = torch.cat([ratios, differs_L2.sum(0)])
    worst = found[:1].clone()
    dist.all_reduce(worst, op=ReduceOp.MAX, group=model.groups.pp)
    dist.all_reduce(found, group=model.groups.pp)
    replay = {f"{role}/router_replay_differs": mean(found[3].item(), found[4].item())} if model.replays else {}
    return {
        f"{role}/moe_load_max": largest(worst.item()),
        f"{role}/moe_load_mean": mean(found[1].item(), found[2].item()),
        **replay,
    }
