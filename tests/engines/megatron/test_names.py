"""The table of names, without weights: every element of every tensor lies on one rank, whatever the layout."""

from collections import defaultdict
from itertools import product
from math import prod

import pytest
import torch

from spmd_rl.config.roles import MegatronConfig
from spmd_rl.models.loading import build_meta
from spmd_rl.models.megatron_names import Cut, MegatronNames, fused_source
from spmd_rl.models.names import exports
from spmd_rl.topology.fold import megatron_layout
from tests.engines.megatron.ranks import FAMILIES, family_config

LAYOUTS = [(1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (1, 2, 2, 1, 1), (2, 2, 1, 2, 1), (2, 1, 1, 2, 2), (1, 4, 1, 4, 1)]
"""(tp, pp, vpp, ep, etp)"""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_boxes_of_all_ranks_tile_every_tensor(family: str, sizes: tuple[int, int, int, int, int]) -> None:
    tp, pp, vpp, ep, etp = sizes
    config = family_config(family)
    if ep > 1 and "moe" not in family:
        ep = etp = 1
    names = MegatronNames(config, pp, vpp)
    whole = {e.name: shape for e, shape in _exported(config)}
    covered: dict[str, torch.Tensor] = {name: torch.zeros(shape, dtype=torch.int) for name, shape in whole.items()}
    for stage in range(pp):
        for parameter in names.parameters(stage):
            if names.is_copy(parameter):
                continue
            cuts = [Cut(0, tp, e, ep, t, etp) for e, t in product(range(ep), range(etp))]
            if not parameter.is_expert:
                cuts = [Cut(t, tp) for t in range(1 if parameter.is_whole else tp)]
            for cut in cuts:
                for piece in names.pieces(parameter, cut):
                    assert piece.shape == whole[piece.name]
                    covered[piece.name][tuple(piece.region)] += 1
    assert {name: int(c.min()) for name, c in covered.items()} == dict.fromkeys(whole, 1)
    assert {name: int(c.max()) for name, c in covered.items()} == dict.fromkeys(whole, 1)
    assert names.checkpoint_names == set(whole)


def _exported(config):  # type: ignore[no-untyped-def]
    model = build_meta(config)
    shapes = dict(model.named_parameters())
    return [(e, tuple(e.make([shapes[s] for s in e.sources]).shape)) for e in exports(model)]


@pytest.mark.parametrize("family", ["qwen3-moe", "llama"])
def test_a_piece_is_found_in_transformers_own_tensors(family: str) -> None:
    config = family_config(family)
    model = build_meta(config)
    own = {n: torch.arange(p.numel()).view(p.shape) for n, p in model.named_parameters()}
    exported = {e.name: e.make([own[s] for s in e.sources]) for e in exports(model)}
    names = MegatronNames(config, 2, 1)
    for parameter in names.parameters(1):
        for piece in names.pieces(parameter, Cut(1, 2, 1, 2, 0, 1)):
            name, shape, region = fused_source(piece, names.experts)
            assert tuple(own[name].shape) == shape
            found = own[name][tuple(region)].reshape(piece.sizes)
            assert torch.equal(found, exported[piece.name][tuple(piece.region)])


def test_layers_of_virtual_stages_alternate() -> None:
    names = MegatronNames(family_config("llama"), 2, 2)
    assert [[list(names.layers_of(stage, chunk)) for chunk in (0, 1)] for stage in (0, 1)] == [[[0], [2]], [[1], [3]]]


def test_pieces_follow_each_other_in_the_flattened_parameter() -> None:
    names = MegatronNames(family_config("qwen3-moe"))
    local: dict[str, int] = defaultdict(int)
    for parameter in names.parameters(0):
        pieces = names.pieces(parameter, Cut(1, 2, 1, 2, 1, 2))
        shape = _local_shape(parameter.name)
        if shape is None:
            continue
        flat = torch.arange(prod(shape)).view(shape)
        read = torch.cat([flat[p.place].reshape(-1) for p in pieces])
        assert torch.equal(read, torch.arange(prod(shape)))
        local[parameter.name] += 1
    assert len(local) == 4 * 4


def _local_shape(name: str) -> tuple[int, ...] | None:
    """As tp=2, ep=2, etp=2 leave it: 4 heads and 2 groups of 8, hidden 32, 4 experts of 16."""
    for end, shape in {
        "linear_qkv.weight": (32, 32), "linear_proj.weight": (32, 16),
        "experts.weight1": (2, 16, 32), "experts.weight2": (2, 32, 8),
    }.items():  # fmt: skip
        if name.endswith(end):
            return shape
    return None


def test_the_layout_has_the_sizes_that_cut() -> None:
    layout = megatron_layout("actor", "global", 8, MegatronConfig(tp=2, ep=2, etp=1, pp=2))
    from spmd_rl.engines.megatron.weights import cut_of

    assert cut_of(layout, 5) == Cut(tp=1, tp_size=2, ep=1, ep_size=2, etp=0, etp_size=1)
