"""What a run needs besides its roles and its machines: the data, the algorithm, the loop and what is shown of it."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class PoolConfig:
    """A named, ordered, disjoint set of ranks."""

    nnodes: int = 1
    """Hosts it spans."""
    n_gpus_per_node: Any = 8
    """Ranks on each of them, one number or a list with one a host."""
    placement: str = "pack"
    """pack fills a host before the next one; spread takes the emptiest hosts first."""
    node_tag: str | None = None
    """Only hosts of this class."""


@dataclass
class LoraConfig:
    """Low-rank adapters (peft) instead of full weights."""

    rank: int = 0
    """0 trains the full weights."""
    alpha: int = 32
    """Scale: the update is alpha / rank · B·A."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the adapted modules."""

    def takes_experts(self) -> str:
        """What is wrong with `target_modules` on a model with experts, unless they are the attention's."""
        return (
            f"model.lora.target_modules={self.target_modules} takes in the experts, which lie in one tensor a "
            "layer and get no adapters here; name the attention's: [q_proj,k_proj,v_proj,o_proj]"
        )


@dataclass
class ModelConfig:
    """The actor's start, and what the tokenizer needs."""

    path: str = "smollm2-135m-instruct"
    """A local folder, a hub id, or a name that models.loading knows how to get offline."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; unset means path."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    shape: str | None = None
    """A shape shipped with the package (qwen3-8b …) to plan with when path is not at hand."""
    random_init: bool = False
    """Start from random weights of the shape (benchmarks)."""
    seed: int = 0
    """Seed of random_init and of fresh heads."""
    chat_template: str | None = None
    """A Jinja chat template (or a file with one) instead of the tokenizer's."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters."""


@dataclass
class SourceConfig:
    """One set of rows."""

    files: list[str] = field(default_factory=list)
    """jsonl or parquet files; a hub data set as hf:name or hf:name:config:split."""
    task: str | None = None
    """A reasoning_gym task name instead of files."""
    task_kwargs: dict[str, Any] = field(default_factory=dict)
    """That task's settings."""
    size: int = 0
    """How many rows: of a task, how many to make; of files, how many to keep (0 keeps all)."""
    seed: int = 0
    """Seed of a task's rows."""
    exclude_train: bool = True
    """Validation only: drop rows whose prompt also occurs in the training set."""


@dataclass
class DataConfig:
    """Prompts."""

    train: SourceConfig = field(default_factory=SourceConfig)
    """Rows to train on."""
    val: SourceConfig = field(default_factory=SourceConfig)
    """Rows to validate on."""
    train_batch_size: int = 32
    """Prompts a step, over all ranks."""
    val_batch_size: int = 0
    """Prompts a validation round; 0 means all at once."""
    max_prompt_length: int = 512
    """Tokens."""
    max_response_length: int = 512
    """Tokens."""
    overlong_prompts: str = "filter"
    """filter | error | truncate_left | truncate_right."""
    prompt_key: str = "prompt"
    """Column with the chat messages, or with one string."""
    answer_key: str | None = None
    """Column with the ground truth, for rows that are not in verl's format (GSM8K's `answer`)."""
    response_key: str = "response"
    """SFT: column with the reply (rows without chat messages that end in an assistant turn)."""
    data_source: str | None = None
    """data_source of rows that have no such column."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message."""
    apply_chat_template: bool = True
    """false sends the prompt's text as it is."""
    shuffle: bool = True
    """A fresh seeded order each epoch; every prompt exactly once an epoch."""
    seed: int = 1
    """Seed of that order."""
    drop_last: bool = True
    """Leave out an epoch's last, smaller batch."""


@dataclass
class KlCtrlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: str = "fixed"
    """fixed | adaptive."""
    kl_coef: float = 0.001
    """Coefficient, or where the adaptive one starts."""
    horizon: int = 10000
    """Adaptive: samples over which the error is corrected."""
    target_kl: float = 0.1
    """Adaptive: the KL aimed at."""


@dataclass
class RolloutCorrectionConfig:
    """Correction for samples that another policy (or another precision) drew."""

    rollout_is: str | None = "auto"
    """Importance weights: token | sequence | null (none) | auto (token under one_step_off or rollout.partial,
    else none)."""
    rollout_is_threshold: Any = 2.0
    """Upper truncation of the weights; `low_high` (as text) masks outside the band (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection rule(s), comma-separated: token_k1, seq_sum_k2, seq_max_k3 …."""
    rollout_rs_threshold: Any = None
    """Threshold(s) of the rejection, comma-separated, `low_high` for two-sided."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old ones (no old log-prob pass)."""
    loss_type: str = "ppo_clip"
    """In bypass mode: ppo_clip | reinforce."""

    def under(self, schedule: str, partial: bool) -> "RolloutCorrectionConfig":
        """The same with `auto` decided: samples of older weights are weighed, unless the ratio does it already."""
        if self.rollout_is != "auto":
            return self
        stale = (schedule == "one_step_off" or partial) and not self.bypass_mode
        return replace(self, rollout_is="token" if stale else None)


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups without signal are replaced by new prompts."""

    enable: bool = False
    """Use it."""
    metric: str = "score"
    """score | acc | seq_reward: what must differ inside a group."""
    max_num_gen_batches: int = 10
    """Generation rounds a step at most; 0 means no bound."""


@dataclass
class AlgorithmConfig:
    """Advantages and KL."""

    adv_estimator: str = "grpo"
    """A name in algorithms.ADVANTAGES, or path/to/file.py:function."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO."""
    gamma: float = 1.0
    """Discount."""
    lam: float = 1.0
    """GAE's lambda."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty from the token rewards."""
    kl_penalty: str = "kl"
    """Its estimator, as actor.kl_loss_type."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    """Its coefficient."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Off-policy correction."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    gdpo_weights: list[float] = field(default_factory=list)
    """gdpo: one weight a reward function."""


@dataclass
class CheckpointConfig:
    """Saving."""

    async_save: bool = False
    """Write in the background while training goes on."""
    keep: int = 2
    """Committed checkpoints to keep; 0 keeps all."""


@dataclass
class TrainerConfig:
    """The loop."""

    mode: str = "rl"
    """rl | sft"""
    schedule: str = "colocated"
    """colocated (sample, then train) | sequential (the same; refuses a rollout on the actor's pool) | one_step_off (the
    next step is sampled while this one is trained on)."""
    staleness: int = 1
    """one_step_off: how many steps the sampling is ahead of the training."""
    total_training_steps: int | None = None
    """Steps; unset means total_epochs."""
    total_epochs: int = 1
    """Passes over the training rows."""
    save_freq: int = -1
    """Save every so many steps, and at the end; -1 never, 0 only at the end."""
    test_freq: int = -1
    """Validate every so many steps, and at the end; -1 never."""
    val_before_train: bool = True
    """Validate before the first step (when there are validation rows)."""
    resume: str = "auto"
    """auto | never | a checkpoint's folder."""
    output_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """Checkpoints, metrics, samples and the copy of the config."""
    project_name: str = "spmd_rl"
    """For trackers."""
    experiment_name: str = "run"
    """For trackers."""
    seed: int = 0
    """Seed of sampling, of dropout and of mini-batch orders."""
    roles: dict[str, str] = field(default_factory=dict)
    """Your own roles: actor | ref | critic | rollout | reward to path/to/file.py:function, which is called as
    function(built_in, config, runtime) and returns what takes the built-in one's place."""
    device: str = "auto"
    """auto | cpu | cuda."""
    deterministic: bool = False
    """Deterministic kernels where torch has them."""
    rehearse: bool = False
    """One real step at the worst-case lengths, estimate against measurement, then leave nothing behind."""
    time_limit_s: float = 0.0
    """End cleanly (validate, save) before this many seconds have passed since start; 0 means no limit."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    timeout_s: float = 1800.0
    """A collective that takes longer than this ends the run."""


@dataclass
class ObserveConfig:
    """What is shown and kept."""

    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """console | jsonl | tensorboard | wandb | mlflow | trackio."""
    samples_per_step: int = 64
    """Replies a step written to samples/<step>.jsonl; -1 writes all, 0 none."""
    show_samples: int = 1
    """Replies shown on the console each step."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps to trace with torch.profiler."""
