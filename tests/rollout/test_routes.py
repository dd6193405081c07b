"""The experts that the transformers engine says it chose: those of a plain forward over prompt and reply."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spmd_rl.models.filling import allocate
from spmd_rl.models.loading import build_meta, resolve
from spmd_rl.models.names import export_tensors
from spmd_rl.models.routing import no_routes
from spmd_rl.rollout.base import Reply, Request, to_batch
from spmd_rl.rollout.transformers import ATTENTION, TransformersRollout
from tests.rollout.test_begun import in_pieces
from tests.rollout.test_transformers import PARAMS, requests


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve("tiny-moe"), attn_implementation="eager").eval()


def rollout(plain: PreTrainedModel, rows: int = 256, routes: bool = True) -> TransformersRollout:
    config = copy.deepcopy(plain.config)
    lm = build_meta(config, torch.float32, ATTENTION)
    allocate(lm, "cpu")
    engine = TransformersRollout(lm, [2], rows, no_routes(config) if routes else None)
    engine.load_weights(export_tensors(plain, lambda parameter: parameter.detach()))
    return engine


def chosen(plain: PreTrainedModel, request: Request, reply: Reply) -> Tensor:
    """[prompt + reply - 1, layers, k], ascending."""
    read = torch.tensor([[*request.prompt_ids, *reply.token_ids[:-1]]])
    with torch.no_grad():
        logits = plain(input_ids=read, output_router_logits=True).router_logits
    return torch.stack(logits, 1).topk(plain.config.num_experts_per_tok).indices.sort().values


def assert_plain(plain: PreTrainedModel, asked: Sequence[Request], found: Sequence[Sequence[Reply]]) -> None:
    for request, group in zip(asked, found, strict=True):
        for reply in group:
            assert reply.routes is not None
            assert reply.routes.dtype == torch.uint8
            assert torch.equal(reply.routes.long().sort().values, chosen(plain, request, reply))


@pytest.mark.parametrize("rows", [3, 20])
def test_routes_are_those_of_a_plain_forward(plain: PreTrainedModel, rows: int) -> None:
    engine, asked = rollout(plain, rows), requests()
    found = engine.generate(asked, PARAMS, seed=7)
    assert {len(reply.token_ids) for group in found for reply in group} > {1, PARAMS.max_tokens}
    assert_plain(plain, asked, found)
    assert_plain(plain, asked, in_pieces(engine, asked, PARAMS, [3, 1, 4]))


def test_without_being_asked_there_are_none(plain: PreTrainedModel) -> None:
    engine = rollout(plain, routes=False)
    assert all(reply.routes is None for group in engine.generate(requests(), PARAMS, seed=7) for reply in group)
    assert not any(module._forward_hooks for module in engine.model.modules())


def test_tokens_that_are_read_again_keep_the_choices_they_were_drawn_under(plain: PreTrainedModel) -> None:
    asked = requests()[1:3]
    before = rollout(plain).generate(asked, replace(PARAMS, ignore_eos=True), seed=7, new_tokens=5)
    moved = copy.deepcopy(plain)
    with torch.no_grad():
        for layer in moved.model.layers:
            layer.mlp.gate.weight.neg_()
    begun = [replace(request, begun=replies) for request, replies in zip(asked, before, strict=True)]
    after = rollout(moved).generate(begun, replace(PARAMS, ignore_eos=True), seed=7)
    for request, group, earlier in zip(asked, after, before, strict=True):
        for reply, old in zip(group, earlier, strict=True):
            assert reply.routes is not None
            assert old.routes is not None
            assert len(reply.routes) == len(request.prompt_ids) + PARAMS.max_tokens - 1
            assert torch.equal(reply.routes[: len(old.routes)], old.routes)
            expected = chosen(moved, request, reply)
            assert torch.equal(reply.routes[len(old.routes) :].long().sort().values, expected[len(old.routes) :])
            assert not torch.equal(old.routes.long().sort().values, expected[: len(old.routes)])


def test_the_column(plain: PreTrainedModel) -> None:
    engine, asked = rollout(plain), requests()
    found = engine.generate(asked, PARAMS, seed=7)
    rows = to_batch([replace(r, begun=g) for r, g in zip(asked, found, strict=True)], engine.no_routes)
    lengths = rows["prompts"].lengths + rows["responses"].lengths - 1
    assert torch.equal(rows["routed_experts"].lengths, lengths)
    nobody = to_batch([], engine.no_routes)["routed_experts"].values
    assert (nobody.shape, nobody.dtype) == ((0, 2, 2), torch.uint8)  # so that ranks without rows have the column too
    fresh = to_batch([replace(asked[0], n=1)], engine.no_routes)["routed_experts"]
    assert fresh.lengths.tolist() == [0]  # not begun
