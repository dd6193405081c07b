"""Composition, typing and the errors of `spmd_rl.config.load`."""

from pathlib import Path

import pytest
import yaml

from spmd_rl.algorithms import ADVANTAGES, POLICY_LOSSES
from spmd_rl.config import Config, ConfigError
from spmd_rl.config.choices import NAMED
from spmd_rl.config.fields import all_fields, docstrings, nearest_keys
from spmd_rl.config.load import (
    as_yaml,
    build,
    compose,
    groups,
    load_config,
    packaged_configs,
    parse_arguments,
    save_config,
    usage,
)

EXPERIMENTS = groups([packaged_configs()])["experiment"]


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_preset_composes_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = compose([f"experiment={name}"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("group", ["model", "engine", "rollout", "algorithm"])
def test_every_group_preset_composes(group: str) -> None:
    for choice in groups([packaged_configs()])[group]:
        assert isinstance(compose([f"{group}={choice}"]), Config)


def test_without_overrides_the_dataclass_defaults_hold() -> None:
    config = compose([])
    config.trainer.output_dir = Config().trainer.output_dir
    assert config == Config()


def test_values_take_the_types_of_the_dataclasses_and_interpolations_resolve() -> None:
    config = compose(["actor.optim.lr=3", "data.train.files=[a.jsonl]", "trainer.experiment_name=x", "cluster.nodes=2"])
    assert config.actor.optim.lr == 3.0
    assert isinstance(config.actor.optim.lr, float)
    assert config.data.train.files == ["a.jsonl"]
    assert config.trainer.output_dir == "outputs/spmd_rl/x"
    assert config.cluster.nodes == 2


def test_engine_group_sets_all_trained_roles() -> None:
    config = compose(["engine=megatron"])
    assert {config.actor.engine.name, config.ref.engine.name, config.critic.engine.name} == {"megatron"}


def test_a_model_named_on_the_command_line_wins_over_the_experiments() -> None:
    assert compose(["experiment=tiny"]).model.path == "tiny-digits"
    assert compose(["experiment=tiny", "model=smollm2-135m-instruct"]).model.path == "smollm2-135m-instruct"
    assert compose(["experiment=tiny", "model.path=/some/folder"]).model.path == "/some/folder"


def test_an_algorithm_named_on_the_command_line_wins_over_the_experiments() -> None:
    assert compose(["experiment=gsm8k"]).actor.policy_loss.loss_mode == "vanilla"
    config = compose(["experiment=gsm8k", "algorithm=gspo"])
    assert (config.actor.policy_loss.loss_mode, config.actor.clip_ratio_high) == ("gspo", 4e-4)


@pytest.mark.parametrize("name", groups([packaged_configs()])["algorithm"])
def test_algorithm_presets_name_functions_that_exist(name: str) -> None:
    algorithms = pytest.importorskip("spmd_rl.algorithms")
    config = compose([f"algorithm={name}"])
    assert config.algorithm.adv_estimator in algorithms.ADVANTAGES
    assert config.actor.policy_loss.loss_mode in algorithms.POLICY_LOSSES
    assert config.actor.loss_agg_mode in algorithms.AGGREGATIONS


def test_free_keys_need_no_plus() -> None:
    config = compose(["reward.kwargs.tolerance=0.5", "rollout.engine_kwargs={block_size: 64}", "pools.reward.nnodes=2"])
    assert config.reward.kwargs == {"tolerance": 0.5}
    assert config.rollout.engine_kwargs == {"block_size": 64}
    assert config.pools["reward"].nnodes == 2
    assert config.pools["reward"].placement == "pack"


@pytest.mark.parametrize("band", ["0.5_5", "0.5_2.0", "2_000"])
def test_a_band_is_no_number(band: str) -> None:
    """YAML and Hydra read 0.5_5 as 0.55."""
    correction = compose([f"algorithm.rollout_correction.rollout_is_threshold={band}"]).algorithm.rollout_correction
    assert correction.rollout_is_threshold == band
    assert compose(["data.train.size=1_000"]).data.train.size == 1000


def test_files_with_functions_are_plain_values() -> None:
    assert compose(["reward.functions=[my/file.py:score]"]).reward.functions == ["my/file.py:score"]


def test_the_names_that_a_plan_knows_are_those_of_the_algorithms() -> None:
    assert set(NAMED["algorithm.adv_estimator"]) == set(ADVANTAGES)
    assert set(NAMED["actor.policy_loss.loss_mode"]) == set(POLICY_LOSSES)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("actor.lr=1e-6", ["unknown key actor.lr", "actor.optim.lr: float = 1e-06", "Peak learning rate."]),
        ("rolout.n=4", ["unknown key rolout.n", "rollout.n: int = 8"]),
        ("pools.reward.nodes=1", ["unknown key pools.reward.nodes", "pools.*.nnodes"]),
        ("rollout.n=four", ["rollout.n='four'", "it takes int", "Samples a prompt"]),
        ("trainer.resume=null", ["trainer.resume=null", "it takes str"]),
        ("data.shuffle=perhaps", ["it takes bool"]),
        ("data.train.files=a.jsonl", ["it takes list[str]"]),
        ("actor=3", ["actor is a section", "actor.optim"]),
        ("actor=null", ["actor=null: actor is a section"]),
        ("pools=[1]", ["pools is a section"]),
        ("pools.reward=null", ["pools.reward is a section"]),
        ("actor_rollout_ref.actor.optim.lr=1e-6", ["verl's name for actor.optim.lr", "from-verl"]),
        ("experiment=quikstart", ["did you mean quickstart?", "gsm8k"]),
        ("engine=fdsp", ["did you mean fsdp?"]),
        ("actor.engine.name=fdsp", ["not one of fsdp, megatron", "did you mean fsdp?"]),
        (
            "algorithm.adv_estimator=grpoo",
            ["adv_estimator=grpoo is not known; did you mean grpo?", "package.module:fun"],
        ),
        ("actor.policy_loss.loss_mode=vanila", ["did you mean vanilla?", "geo_mean", "path/to/file.py:function"]),
        ("trainer.schedule=colocatd", ["did you mean colocated?", "one_step_off"]),
        ("observe.trackers=[console,tensorbord]", ["observe.trackers=tensorbord", "did you mean tensorboard?"]),
        ("rollout.temperature=-1", ["out of range", "at least 0"]),
        ("rollout.top_p=1.5", ["from 0 to 1"]),
        ("actor.optim.lr=nan", ["not a finite number"]),
        ("rollout.n=4,8", ["several values", "[a,b]"]),
        ("hydra.run.dir=x", ["trainer.output_dir"]),
        ("trainer.output_dir=${nope.x}", ["nope.x", "not found"]),
        ("rollout.n", ["'rollout.n' is not key=value or group=preset"]),
        ("rollout.n=[1", ["cannot read the argument 'rollout.n=[1'"]),
        ("~pools", ["~pools takes nothing away: no preset", "or a whole preset: ~algorithm, ~cluster", "~rollout"]),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(override: str, fragments: list[str]) -> None:
    message = error_of(override)
    for fragment in fragments:
        assert fragment in message


def test_several_mistakes_come_in_one_error() -> None:
    message = error_of("rolout.n=4", "actor.optim.lr=fast", "experiment=quikstart", "trainer.mode=dpo")
    assert message.startswith("4 mistakes")
    for fragment in ("rolout.n", "actor.optim.lr='fast'", "quikstart", "trainer.mode=dpo"):
        assert fragment in message


def test_each_unknown_key_is_named_in_full() -> None:
    message = error_of("rolout.n=4", "rolout.temperature=0")
    assert "rollout.n: int" in message
    assert "unknown key rolout.temperature" in message


def test_a_users_own_folder_comes_before_the_packages(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    own = "# @package _global_\ndefaults: [tiny]\nrollout: {n: 3}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(own)
    (tmp_path / "experiment" / "gsm8k.yaml").write_text("# @package _global_\nrollout: {n: 5}\n")
    mine = compose(["experiment=mine"], [tmp_path])
    assert (mine.rollout.n, mine.model.path) == (3, "tiny-digits")
    assert compose(["experiment=gsm8k"], [tmp_path]).rollout.n == 5
    assert compose(["experiment=quickstart"], [tmp_path]) == compose(["experiment=quickstart"])
    assert "mine" in usage("spmd-rl train", [tmp_path])


def test_a_mistake_in_a_users_preset_is_found_by_the_same_check(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(
        "# @package _global_\nrollout: {m: 5}\nactor: {clip_ratio: big}\n"
    )
    with pytest.raises(ConfigError, match=r"(?s)rollout\.m.*actor\.clip_ratio='big'"):
        compose(["experiment=bad"], [tmp_path])
    (tmp_path / "experiment" / "bad.yaml").write_text("rollout: {n: 5\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml|while parsing"):
        compose(["experiment=bad"], [tmp_path])


def test_loading_a_file_reports_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="no mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "extra.yaml").write_text("rollout: {n: 2, tempratur: 1}\n")
    with pytest.raises(ConfigError, match=r"rollout\.temperature: float"):
        load_config(tmp_path / "extra.yaml")


def test_the_explained_yaml_is_yaml_with_every_docstring() -> None:
    config = compose(["experiment=quickstart", "pools.reward.nnodes=1"])
    text = as_yaml(config, explain=True)
    assert yaml.safe_load(text) == yaml.safe_load(as_yaml(config))
    assert build(yaml.safe_load(text)) == config
    assert "# Samples a prompt: GRPO's group. (int)\n  'n': 8" in text


def test_every_field_has_a_docstring() -> None:
    assert [key for key, found in all_fields().items() if not found.doc] == []
    assert docstrings(Config)["trainer"] == "The loop."


def test_every_default_passes_its_own_checks() -> None:
    assert build({}).rollout.n == Config().rollout.n


def test_nearest_keys_prefers_the_same_section() -> None:
    assert nearest_keys("rollout.temprature")[0] == "rollout.temperature"
    assert nearest_keys("trainer.lr")[:2] == ["actor.optim.lr", "critic.optim.lr"]


def test_arguments_are_sorted() -> None:
    arguments = parse_arguments(["experiment=tiny", "--cfg", "job", "--config-dir=x", "--nproc=2"])
    assert arguments.overrides == ["experiment=tiny"]
    assert (arguments.show, arguments.config_dirs, arguments.other) == ("job", ["x"], ["--nproc=2"])
    with pytest.raises(ConfigError, match="--nproc=2"):
        arguments.reject_others()
    with pytest.raises(ConfigError, match="--cfg nope"):
        parse_arguments(["--cfg", "nope"])
