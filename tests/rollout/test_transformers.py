"""The rollout engine of plain transformers: what it draws does not depend on whom it is drawn beside."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spmd_rl.models.filling import allocate
from spmd_rl.models.loading import build_meta, resolve
from spmd_rl.rollout.base import Reply, Request, to_batch
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.rollout.transformers import ATTENTION, TransformersRollout

EOS = 2
PARAMS = SamplingParams(max_tokens=14, stop_token_ids=(20, 30, 40, 50, 60))
Replies = dict[int, list[Reply]]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny-digits"), attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # less flat than a model from scratch
    return model.eval()


def rollout(plain: PreTrainedModel, max_batch_rows: int = 256) -> TransformersRollout:
    config = copy.deepcopy(AutoConfig.from_pretrained(resolve("tiny-digits")))
    lm = build_meta(config, torch.float32, ATTENTION)
    allocate(lm, "cpu")
    engine = TransformersRollout(lm, [EOS], max_batch_rows)
    engine.load_weights(plain.named_parameters())
    return engine


def requests(n: int = 3, step: int = 4) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 9, 4, 17, 6, 2, 11]
    return [
        Request(100 + i, torch.randint(4, 104, (length,), generator=generator).tolist(), n, step)
        for i, length in enumerate(lengths)
    ]


def replies(plain: PreTrainedModel, asked: list[Request], params: SamplingParams = PARAMS, rows: int = 256) -> Replies:
    engine = rollout(plain, rows)
    return {r.uid: found for r, found in zip(asked, engine.generate(asked, params, seed=7), strict=True)}


def assert_same(got: Replies, expected: Replies) -> None:
    for uid, mine in got.items():
        for reply, true in zip(mine, expected[uid], strict=False):
            assert (reply.token_ids, reply.finished) == (true.token_ids, true.finished)
            assert reply.log_probs == pytest.approx(true.log_probs, abs=1e-5)


@pytest.fixture(scope="module")
def everything(plain: PreTrainedModel) -> Replies:
    return replies(plain, requests())


def test_replies_are_of_all_kinds(everything: Replies) -> None:
    flat = [reply for found in everything.values() for reply in found]
    assert {reply.finished for reply in flat} == {True, False}
    assert len({len(reply.token_ids) for reply in flat}) > 4
    assert all(len({tuple(reply.token_ids) for reply in found}) == 3 for found in everything.values())


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 20])
def test_the_size_of_a_wave_changes_nothing(plain: PreTrainedModel, everything: Replies, rows: int) -> None:
    assert_same(replies(plain, requests(), rows=rows), everything)


def test_what_memory_held_before_changes_nothing(plain: PreTrainedModel, everything: Replies) -> None:
    """With every `torch.empty` filled with nan, places that nothing was written to would show."""
    engine = rollout(plain)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        found = engine.generate(requests(), PARAMS, seed=7)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same({r.uid: replies for r, replies in zip(requests(), found, strict=True)}, everything)


def test_neighbours_change_nothing(plain: PreTrainedModel, everything: Replies) -> None:
    assert_same(replies(plain, requests()[::-1]), everything)
    for request in requests():
        assert_same(replies(plain, [request]), everything)
    assert_same(replies(plain, requests(5)), everything)  # the first three samples of five
    mixed = [replace(r, n=1 + i % 3) for i, r in enumerate(requests())]
    found = replies(plain, mixed)
    assert [len(found[r.uid]) for r in mixed] == [r.n for r in mixed]
    assert_same(found, everything)


def test_another_step_draws_otherwise_and_the_same_step_again_alike(
    plain: PreTrainedModel, everything: Replies
) -> None:
    assert_same(replies(plain, requests()), everything)
    other = replies(plain, requests(step=5))
    assert all(other[u][0].token_ids != everything[u][0].token_ids for u in everything)


def log_probs(plain: PreTrainedModel, prompt: list[int], reply: list[int], temperature: float) -> Tensor:
    """Of every token of the vocabulary at each place of the reply, by transformers without a cache."""
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_transformers(plain: PreTrainedModel, temperature: float) -> None:
    found = replies(plain, requests(), replace(PARAMS, temperature=temperature))
    for request in requests():
        for reply in found[request.uid]:
            every = log_probs(plain, list(request.prompt_ids), reply.token_ids, temperature)
            true = every.gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(reply.log_probs), true, atol=1e-5)


def test_greedy_takes_the_likeliest(plain: PreTrainedModel) -> None:
    found = replies(plain, requests(1), replace(PARAMS, temperature=0.0))
    for request in requests(1):
        (reply,) = found[request.uid]
        every = log_probs(plain, list(request.prompt_ids), reply.token_ids, 1.0)
        assert every.argmax(-1).tolist() == reply.token_ids
        assert reply.log_probs == pytest.approx(every.max(-1).values.tolist(), abs=1e-5)


def test_top_k_draws_among_the_likeliest_under_what_is_left(plain: PreTrainedModel) -> None:
    found = replies(plain, requests(), replace(PARAMS, top_k=3))
    for request in requests():
        for reply in found[request.uid]:
            best = log_probs(plain, list(request.prompt_ids), reply.token_ids, 1.0).topk(3, dim=-1)
            for place, (token, log_prob) in enumerate(zip(reply.token_ids, reply.log_probs, strict=True)):
                among = best.indices[place].tolist()
                assert token in among
                left = best.values[place].log_softmax(-1)
                assert log_prob == pytest.approx(left[among.index(token)].item(), abs=1e-5)


def test_a_reply_ends_with_the_first_stop_token(plain: PreTrainedModel, everything: Replies) -> None:
    stops = {EOS, *PARAMS.stop_token_ids}
    for reply in (r for found in everything.values() for r in found):
        assert not stops & {*reply.token_ids[:-1]}
        assert reply.finished == (reply.token_ids[-1] in stops)
        assert reply.finished or len(reply.token_ids) == PARAMS.max_tokens
    without = replies(plain, requests(), replace(PARAMS, ignore_eos=True))
    for uid, found in without.items():
        for reply, cut in zip(found, everything[uid], strict=True):
            assert len(reply.token_ids) == PARAMS.max_tokens
            assert not reply.finished
            assert reply.token_ids[: len(cut.token_ids)] == cut.token_ids


def test_one_token_and_nobody_asking(plain: PreTrainedModel) -> None:
    found = replies(plain, requests(), replace(PARAMS, max_tokens=1))
    assert all(len(reply.token_ids) == 1 for group in found.values() for reply in group)
    assert replies(plain, []) == {}
    empty = to_batch([])
    assert len(empty) == 0
    assert empty["responses"].values.dtype == torch.int64


def test_weights_that_do_not_fit_are_named(plain: PreTrainedModel) -> None:
    engine, weights = rollout(plain), dict(plain.named_parameters())
    weights.pop("model.norm.weight")
    with pytest.raises(RuntimeError, match=r"nothing arrived for \['model.norm.weight'\]"):
        engine.load_weights(weights.items())
    with pytest.raises(RuntimeError, match=r"model.norm.weight is \(3,\), rollout holds \(64,\)"):
        engine.load_weights([("model.norm.weight", torch.zeros(3))])
