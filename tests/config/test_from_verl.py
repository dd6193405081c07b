"""Translating verl's command lines."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.fields import find, is_free
from spmd_rl.config.from_verl import Translation, quote, read, render, spell, translate
from spmd_rl.config.load import compose
from spmd_rl.config.shell import split_words
from spmd_rl.config.verl_keys import RENAMED, SFT_RENAMED

HERE = Path(__file__).parent


def _data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verl_overrides", HERE / "verl_overrides.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERL = _data()
UNTRANSLATED = {
    "grpo_trainer/run_qwen2-7b_seq_balance.sh": ["actor_rollout_ref.rollout.multi_turn.format"],
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh": [],
    "cispo_trainer/run_qwen3_8b_fsdp.sh": [],
    "ppo_trainer/run_qwen3_8b_megatron.sh": [],
    "grpo_trainer/run_qwen3-236b_megatron.sh": [
        "actor_rollout_ref.actor.megatron.dist_checkpointing_path",
        "actor_rollout_ref.actor.megatron.use_dist_checkpointing",
        "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage",
        "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage",
        "actor_rollout_ref.ref.megatron.use_dist_checkpointing",
    ],
    "recipe/dapo/run_dapo_qwen2.5_32b.sh": [
        "data.gen_batch_size",
        "actor_rollout_ref.model.override_config.attention_dropout",
        "actor_rollout_ref.model.override_config.embd_pdrop",
        "actor_rollout_ref.model.override_config.resid_pdrop",
    ],
    "remax_trainer/run_qwen2.5-3b_seq_balance.sh": [],
    "rollout_correction/run_qwen2_5_7b_fsdp.sh": [],
    "ppo_trainer/run_qwen2-7b_rm_reward_loop_colocate.sh": [
        "reward_model.use_reward_loop",
        "reward_model.inference.name",
        "reward_model.inference.gpu_memory_utilization",
        "reward_model.num_workers",
    ],
}


def translated(text: str, module: str = "verl.trainer.main_ppo") -> tuple[Config, Translation]:
    made = translate(split_words(text), module)
    return compose(made.overrides), made


@pytest.mark.parametrize("script", VERL.SCRIPTS)
def test_example_scripts_translate_into_valid_configs_and_say_what_is_left(script: str) -> None:
    _, made = translated(VERL.overrides_of(script))
    assert [word.partition("=")[0] for word, _ in made.absent] == UNTRANSLATED[script]
    assert all(why for _, why in made.absent + made.implied)


def test_grpo_script() -> None:
    config, made = translated(VERL.overrides_of("grpo_trainer/run_qwen2-7b_seq_balance.sh"))
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.train.files == ["$HOME/data/gsm8k/train.parquet"]
    assert config.data.overlong_prompts == "filter"
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (1024, 256, 5)
    assert config.actor.engine.max_tokens_per_micro_batch == 24000
    assert config.ref.engine.max_tokens_per_micro_batch == 24000
    assert config.ref.engine.offload_params is True
    assert (config.rollout.name, config.rollout.infer_tp) == ("vllm", 2)
    assert config.actor.use_kl_loss is True
    assert config.observe.trackers == ["console", "wandb", "jsonl"]
    assert "actor_rollout_ref.model.use_remove_padding=true" in [word for word, _ in made.implied]


def test_rows_a_micro_batch_become_a_budget_of_tokens() -> None:
    config, _ = translated(VERL.overrides_of("grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh"))
    assert config.actor.engine.max_tokens_per_micro_batch == 40 * 1536
    assert config.ref.engine.max_tokens_per_micro_batch == 40 * 1536
    assert (config.model.lora.rank, config.model.lora.alpha) == (64, 32)


def test_megatron_script() -> None:
    config, _ = translated(VERL.overrides_of("grpo_trainer/run_qwen3-236b_megatron.sh"))
    megatron = config.actor.engine.megatron
    assert config.actor.engine.name == "megatron"
    assert (megatron.tp, megatron.pp, megatron.ep) == (4, 8, 4)
    assert config.ref.engine.megatron.pp == 8
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (32, 8)
    assert (config.reward.overlong_buffer_len, config.reward.overlong_penalty_factor) == (4096, 0.1)
    assert config.rollout.engine_kwargs["max_num_batched_tokens"] == 6144
    assert (config.rollout.val_top_p, config.rollout.val_temperature) == (0.7, 1.0)
    assert config.data.overlong_prompts == "truncate_left"
    assert config.trainer.output_dir == "/c"


def test_dapo_script_keeps_the_budget_of_a_row_shared_by_ulysses_ranks() -> None:
    config, _ = translated(VERL.overrides_of("recipe/dapo/run_dapo_qwen2.5_32b.sh"))
    assert config.actor.engine.fsdp.ulysses_size == 8
    assert config.actor.engine.max_tokens_per_micro_batch == 22528 * 8
    assert config.ref.engine.max_tokens_per_micro_batch == 22528 * 8
    assert config.algorithm.filter_groups.enable is True
    assert config.actor.loss_agg_mode == "token-mean"
    assert config.reward.overlong_buffer_len == 4096
    assert config.actor.optim.warmup_steps == 10


def test_reward_model_and_critic() -> None:
    config, _ = translated(VERL.overrides_of("ppo_trainer/run_qwen2-7b_rm_reward_loop_colocate.sh"))
    assert config.reward.model.enable is True
    assert config.reward.model.path == "$HOME/models/Skywork-Reward-V2-Llama-3.2-3B"
    assert config.critic.engine.max_tokens_per_micro_batch == 32 * 3072
    assert config.critic.optim.warmup_ratio == 0.05


def test_verls_defaults_hold_where_ours_differ() -> None:
    config, _ = translated("actor_rollout_ref.model.path=org/model")
    assert config.algorithm.adv_estimator == "gae"
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (1024, 256, 1)
    assert (config.rollout.name, config.rollout.infer_tp, config.trainer.total_epochs) == ("vllm", 2, 30)
    assert config.data.overlong_prompts == "error"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", {"actor.optim.schedule": "cosine"}),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", {"actor.optim.warmup_steps": 0}),
        ("actor_rollout_ref.rollout.top_k=0", {"rollout.top_k": -1}),
        ("actor_rollout_ref.rollout.name=hf", {"rollout": "transformers"}),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=False", {"rollout.val_temperature": 0.0}),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", {"rollout.engine_kwargs.swap_space": 4}),
        ("actor_rollout_ref.actor.strategy=fsdp2", {}),
        ("actor_rollout_ref.actor.strategy=megatron", {"engine": "megatron"}),
        ("custom_reward_function.path=my/r.py", {"reward.functions": ["my/r.py:compute_score"]}),
        ("trainer.resume_mode=disable", {"trainer.resume": "never"}),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", {"algorithm.rollout_correction.rollout_is": "token"}),
        ("actor_rollout_ref.rollout.nnodes=2", {"rollout.pool": "rollout", "pools.rollout.nnodes": 2}),
        ("data.val_batch_size=null", {"data.val_batch_size": 0}),
        ("actor_rollout_ref.actor.router_replay.mode=R3", {"actor.router_replay": "rollout"}),
        ("actor_rollout_ref.actor.megatron.router_replay.mode=disabled", {"actor.router_replay": "none"}),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", {}),
        ("trainer.total_training_steps=null", {"trainer.total_training_steps": None}),
    ],
)
def test_values_that_change(override: str, expected: dict[str, object]) -> None:
    config, made = translated(override)
    assert isinstance(config, Config)
    assert made.absent == []
    for key, value in expected.items():
        assert made.values[key] == value


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("ray_kwargs.ray_init.num_cpus=4", "no Ray"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "single-turn"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=16", "max_tokens_per_micro_batch"),
        ("data.truncation=middle", "error, left and right only"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "bfloat16 and float32 only"),
        ("some.new_key=1", "not one of the keys that this translator knows"),
        ("data.train_batchsize=64", "knows; did you mean data.train_batch_size?"),
        ("actor_rollout_ref.actr.optim.lr=1e-6", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("actor_rollout_ref.actor.router_replay.mode=R2", "no R2: set actor.router_replay=rollout"),
        ("actor_rollout_ref.actor.router_replay.replay_file=x", "no files"),
    ],
)
def test_what_has_no_counterpart_says_why(override: str, word: str) -> None:
    _, made = translated(override)
    assert len(made.absent) == 1
    assert word in made.absent[0][1]


def test_sft_command() -> None:
    text = (
        "data.train_files=$HOME/t.parquet data.messages_key=messages data.max_length=1024 data.train_batch_size=64"
        " model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct optim.lr=1e-4 model.lora_rank=32 model.lora_alpha=16"
        " model.target_modules=all-linear trainer.default_local_dir=/s trainer.total_epochs=1 trainer.logger=[console]"
    )
    config, made = translated(text, "verl.trainer.fsdp_sft_trainer")
    assert made.absent == []
    assert config.trainer.mode == "sft"
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (64, 64)
    assert (config.data.prompt_key, config.data.max_response_length) == ("messages", 1024)
    assert config.model.lora.target_modules == ["all-linear"]
    assert config.actor.optim.lr == 1e-4


@pytest.mark.parametrize("key", sorted({*RENAMED.values(), *SFT_RENAMED.values()}))
def test_every_key_that_the_tables_name_is_a_key_of_ours(key: str) -> None:
    assert find(key) is not None or is_free(key)


def test_reading() -> None:
    assert read(["a.b=1 c.d=[x,y]"]).words == ["a.b=1", "c.d=[x,y]"]
    assert read(["a.b=1", "c.d=['x y']"]).words == ["a.b=1", "c.d=['x y']"]
    with pytest.raises(ConfigError, match="there is no file"):
        read(["nowhere/run.sh"])


@pytest.mark.parametrize(
    "value", ["a b", "it's", "[x", "a,b", "k: v", "", "$HOME/a", 1e-6, True, None, ["a b", 1], {"a": 1}]
)
def test_spelled_values_are_read_back(value: object) -> None:
    from spmd_rl.config.from_verl import _value

    assert _value(f"key={spell(value)}") == ("key", value)


def test_quoting_for_a_shell() -> None:
    assert quote("a=$HOME/x") == '"a=$HOME/x"'
    assert quote("a=[x, 'y']") == "'a=[x, '\"'\"'y'\"'\"']'"
    assert "-m spmd_rl.train" in render(Translation(values={"rollout.n": 4}))
