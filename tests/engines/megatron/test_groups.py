"""The groups that a run makes from the plan, against megatron-core's own `parallel_state`, on every mesh fixture."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmd_rl.config.roles import MegatronConfig
from spmd_rl.runtime.process_groups import ProcessGroups
from spmd_rl.topology.fold import megatron_layout
from spmd_rl.topology.groups import role_axes
from tests.topology.test_fixtures import cases

FITTING = [case for case in cases("mesh_megatron") if "raises" not in case.values[0]["outputs"]]
GETTERS = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "mp": ("get_model_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
    "tp_dp_cp": ("get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
    "ep": ("get_expert_model_parallel_group", {}),
    "expt_tp": ("get_expert_tensor_parallel_group", {}),
    "expt_dp": ("get_expert_data_parallel_group", {}),
    "tp_ep": ("get_expert_tensor_and_model_parallel_group", {}),
    "tp_ep_pp": ("get_expert_tensor_model_pipeline_parallel_group", {}),
}


@pytest.fixture(params=["middle", "last"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    from spmd_rl.runtime.mcore import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state._set_global_memory_buffer()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("case", FITTING)
def test_every_group_of_a_rank(case: dict[str, Any], place: str) -> None:
    from spmd_rl.engines.megatron.groups import collection
    from spmd_rl.runtime.mcore import parallel_state

    p, size = case["params"], case["inputs"]["world_size"]
    rank = {"middle": size // 2 - 1, "last": size - 1}[place]
    names = ("tensor", "pipeline", "context", "expert")
    tp, pp, cp, ep = (p[f"{n}_{'model_' if n != 'context' else ''}parallel_size"] for n in names)
    etp = p["expert_tensor_parallel_size"]
    layout = megatron_layout("actor", "global", size, MegatronConfig(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    registered = ProcessGroups(rank, size, "cpu")
    for fold, axes in role_axes(layout):
        registered.register(fold, *axes)
    ours = collection(layout, registered)
    _make(parallel_state, tp, pp, cp, ep, etp)
    for name, (getter, arguments) in GETTERS.items():
        theirs = getattr(parallel_state, getter)(**arguments)
        found, wanted = (dist.get_process_group_ranks(group) for group in (getattr(ours, name), theirs))
        assert sorted(found) == sorted(wanted), name
        if name not in ("mp", "tp_dp_cp"):  # order matters where parts follow each other
            assert found == wanted, name


def _make(parallel_state: Any, tp: int, pp: int, cp: int, ep: int, etp: int | None) -> None:
    parallel_state._GLOBAL_MEMORY_BUFFER = None  # it wants to make it
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    parallel_state._GLOBAL_MEMORY_BUFFER = None
