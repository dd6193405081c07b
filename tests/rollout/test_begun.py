"""Replies that are drawn in several calls are those of one call: the same tokens, the same log-probs."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from spmd_rl.rollout.base import Reply, Request
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.rollout.transformers import TransformersRollout
from tests.rollout.test_transformers import PARAMS, assert_same, plain, requests, rollout

assert plain  # the fixture


def in_pieces(
    engine: TransformersRollout, asked: Sequence[Request], params: SamplingParams, sizes: Sequence[int]
) -> list[list[Reply]]:
    """By calls of `sizes` tokens, then one to the end."""
    groups = list(asked)
    for size in [*sizes, params.max_tokens]:
        found = engine.generate(groups, params, seed=7, new_tokens=size)
        before = [[len(reply.token_ids) for reply in group.replies()] for group in groups]
        groups = [replace(group, begun=replies) for group, replies in zip(groups, found, strict=True)]
        for group, lengths in zip(groups, before, strict=True):
            for reply, length in zip(group.begun, lengths, strict=True):
                assert len(reply.token_ids) <= min(length + size, params.max_tokens)
                assert len(reply.token_ids) == length + size or reply.done(params.max_tokens)
    return [group.replies() for group in groups]


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("sizes", [[1], [5], [3, 1, 4], [1] * 14, [14]])
def test_pieces_make_the_reply_of_one_call(plain: PreTrainedModel, rows: int, sizes: list[int]) -> None:
    engine, asked = rollout(plain, rows), requests()
    for params in (PARAMS, replace(PARAMS, top_p=0.8, top_k=30, temperature=1.3), replace(PARAMS, ignore_eos=True)):
        whole = engine.generate(asked, params, seed=7)
        pieces = in_pieces(engine, asked, params, sizes)
        assert_same(dict(enumerate(pieces)), dict(enumerate(whole)))
    assert {reply.finished for group in engine.generate(asked, PARAMS, seed=7) for reply in group} == {True, False}


def test_what_is_begun_is_kept_as_it_is(plain: PreTrainedModel) -> None:
    """Log-probs of tokens that other weights drew stay those that they were drawn with; what is done stays done."""
    engine, asked = rollout(plain), requests()[:2]
    begun = [Reply([5, 6, 7], [-9.0, -8.0, -7.0], False), Reply([5, 2], [-6.0, -5.0], True), Reply([], [], False)]
    (first, second, third), fresh = engine.generate([replace(asked[0], begun=begun), asked[1]], PARAMS, seed=7)
    assert first.token_ids[:3] == [5, 6, 7]
    assert first.log_probs[:3] == [-9.0, -8.0, -7.0]
    assert len(first.log_probs) == len(first.token_ids) > 3
    assert second == begun[1]
    whole = engine.generate(asked, PARAMS, seed=7)
    assert third.token_ids == whole[0][2].token_ids
    assert [reply.token_ids for reply in fresh] == [reply.token_ids for reply in whole[1]]


def test_a_request_with_some_replies_begun_must_have_all() -> None:
    with pytest.raises(ValueError, match="Request 3: 1 replies are begun, but n=2"):
        Request(3, [4], 2, 1, begun=[Reply([], [], False)])
