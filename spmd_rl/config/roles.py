"""What a role needs: its pool, its engine, its optimizer. Field names follow verl where verl has the field."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of AdamW's two moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on tensors of two dims and more."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    schedule: str = "constant"
    """After the warm-up: constant | cosine."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    warmup_ratio: float = 0.0
    """The same as a share of all optimizer steps; used when warmup_steps is 0."""
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a share of lr."""


@dataclass
class FsdpConfig:
    """FSDP2: how parameters are sharded over the role's pool."""

    fsdp_size: int = -1
    """Ranks that share one copy of the parameters; -1 or the pool's size shards over all ranks, 1 is plain DDP."""
    ulysses_size: int = 1
    """Ranks that share one sequence (Ulysses sequence parallelism); must divide the attention heads."""
    param_dtype: str = "auto"
    """Compute type: float32 | bfloat16 | auto (bfloat16 on CUDA, float32 on CPU) | fastest (bfloat16 also on a CPU with
    matrix units for it, AMX). Master weights stay float32."""
    reduce_dtype: str = "float32"
    """Type in which gradients are summed over ranks."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward (ZeRO-3); false keeps them until the backward (ZeRO-2)."""
    offload_policy: bool = False
    """Keep parameters, gradients and optimizer on the CPU all the time and stream layers in (FSDP's own offload)."""


@dataclass
class MegatronConfig:
    """megatron-core: sizes of the axes, order tp-cp-ep-dp-pp, innermost first."""

    tp: int = 1
    """Tensor parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Virtual stages a rank (interleaved 1F1B)."""
    cp: int = 1
    """Context parallel ranks."""
    ep: int = 1
    """Expert parallel ranks."""
    etp: int | None = None
    """Tensor parallel ranks inside an expert; unset means tp."""
    sequence_parallel: bool = True
    """Shard the norms' activations over tp (only when tp > 1)."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over dp."""
    param_dtype: str = "auto"
    """Compute type: float32 | bfloat16 | auto | fastest, as FSDP's. Master weights stay float32."""


@dataclass
class EngineConfig:
    """How a model is held, run and trained."""

    name: str = "fsdp"
    """fsdp | megatron"""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Layout and precision when name=fsdp."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Layout when name=megatron."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward."""
    compile: bool = False
    """Run each layer through torch.compile."""
    offload_params: bool = False
    """Move parameters to the host while another role holds the GPU."""
    offload_optimizer: bool = False
    """Move optimizer state to the host while another role holds the GPU."""
    max_tokens_per_micro_batch: int = 16384
    """Token budget of one micro-batch on one dp rank; never exceeded. A longer single row is an error."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time in the chunked head."""


@dataclass
class PolicyLossConfig:
    """Which policy loss, and the knobs that only some of them read."""

    loss_mode: str = "vanilla"
    """A name in algorithms.POLICY_LOSSES, or path/to/file.py:function."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens whose gradient is cut."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower end of the covariance band."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper end of the covariance band."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that get the KL penalty."""
    ppo_kl_coef: float = 0.1
    """kl_cov: coefficient of that penalty."""
    tau_pos: float = 1.0
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: float = 1.05
    """sapo: temperature of the gate for negative advantages."""
    dro_beta: float = 0.1
    """dro: weight of the squared log-ratio."""


@dataclass
class ActorConfig:
    """The policy that is trained."""

    pool: str = "global"
    """The pool it lives on."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How it is held."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Its optimizer."""
    ppo_mini_batch_size: int = 32
    """Prompts (times rollout.n samples) for one optimizer step, over all dp ranks together."""
    ppo_epochs: int = 1
    """Passes over a step's batch."""
    shuffle: bool = False
    """Draw the mini-batches in a fresh seeded order each epoch."""
    clip_ratio: float = 0.2
    """PPO's epsilon."""
    clip_ratio_low: float | None = None
    """Lower epsilon; unset means clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper epsilon (DAPO's clip-higher); unset means clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual-clip bound for negative advantages."""
    router_replay: str = "none"
    """MoE: rollout (training takes the experts that the rollout chose for each token, R3, arXiv 2510.11370) | none."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Which loss."""
    loss_agg_mode: str = "token-mean"
    """token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; unset means the longest response allowed."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term to the reference policy to the loss."""
    kl_loss_coef: float = 0.001
    """Its coefficient."""
    kl_loss_type: str = "low_var_kl"
    """k1 | abs | k2 | k3, verl's names kl, mse, low_var_kl, and the straight-through forms with a trailing +."""


@dataclass
class RefConfig:
    """The frozen reference policy of the KL term."""

    pool: str = "global"
    """The pool it lives on."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How it is held."""
    path: str | None = None
    """Its weights; unset means the actor's start."""


@dataclass
class CriticConfig:
    """PPO's value model: a causal model with a scalar head."""

    pool: str = "global"
    """The pool it lives on."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How it is held."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Its optimizer."""
    path: str | None = None
    """Its weights; unset means the actor's start with a fresh head."""
    ppo_mini_batch_size: int | None = None
    """Prompts an optimizer step; unset means the actor's."""
    ppo_epochs: int | None = None
    """Passes over a step's batch; unset means the actor's."""
    cliprange_value: float = 0.5
    """Clip of the value change in the value loss."""
    loss_agg_mode: str = "token-mean"
    """As the actor's."""
    warmup_steps: int = 0
    """Steps in which only the critic is trained."""


@dataclass
class RolloutConfig:
    """Sampling."""

    name: str = "transformers"
    """transformers | vllm"""
    pool: str = "global"
    """The pool it lives on."""
    infer_tp: int = 1
    """Tensor parallel ranks of one replica."""
    infer_pp: int = 1
    """Pipeline stages of one replica."""
    n: int = 8
    """Samples a prompt: GRPO's group."""
    temperature: float = 1.0
    """Softmax temperature of sampling; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps all."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    segment_tokens: int = 0
    """Sample in rounds of so many new tokens a reply; after each the ranks agree whether to go on. 0: to the end."""
    over_sampling: float = 1.0
    """Begin this many times train_batch_size prompts and stop when train_batch_size groups are complete."""
    partial: bool = False
    """Groups that a step begins and does not train on are continued in the next step, under its weights; else they are
    dropped."""
    max_new_tokens_per_step: int = 0
    """A reply gets at most so many tokens a step; then the step trains on the groups that are complete. 0: no limit."""
    time_limit_s: float = 0.0
    """The same by the clock, looked at after each round of segment_tokens: gives world-size invariance up. 0: none."""
    truncated: str = "keep"
    """Replies cut off at max_response_length: keep | mask (not trained on, DAPO's overlong filtering) | drop_group."""
    balance: str = "none"
    """Prompts over replicas: none (consecutive) | expected_length (by the mean length of earlier replies to them)."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ends of a reply besides the tokenizer's and the generation config's."""
    ignore_eos: bool = False
    """Sample to the full length (for benchmarks)."""
    dtype: str = "auto"
    """float32 | bfloat16 | fastest | auto (as the actor computes)."""
    max_batch_rows: int = 256
    """Rows that the transformers engine decodes at one time on one rank."""
    gpu_memory_utilization: float = 0.5
    """vllm: share of the card for weights and KV cache while generating."""
    enforce_eager: bool = False
    """vllm: no CUDA graphs."""
    sleep_level: int = 2
    """vllm: 0 stays awake, 1 keeps weights on the host, 2 drops them."""
    enable_prefix_caching: bool = True
    """vllm: reuse the KV cache of equal prompt starts; reset after each weight sync."""
    verify_sync: str = "checksum"
    """After a weight sync compare: checksum | full | off."""
    calculate_log_probs: bool = True
    """Keep the sampled tokens' log-probs under the sampling distribution."""
    val_n: int = 1
    """Samples a validation prompt."""
    val_temperature: float = 0.0
    """Temperature in validation; 0 is greedy."""
    val_top_p: float = 1.0
    """Nucleus mass in validation."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """vllm: further arguments of its EngineArgs; those that have a key here or say how it is run are refused."""


@dataclass
class RewardModelConfig:
    """A model that scores replies, beside or instead of functions."""

    enable: bool = False
    """Use it."""
    pool: str = "global"
    """The pool it lives on."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How it is held."""
    path: str | None = None
    """Its folder or hub id."""
    kind: str = "classifier"
    """classifier (a sequence classifier with one label: its score at the last token) | judge (a causal LM that is asked
    about the reply: the probability of `answers[0]` against `answers[1]`)."""
    weight: float = 1.0
    """The score is the functions' sum plus this times the model's."""
    question: str = "{prompt}\n\nReply: {reply}\n\nIs the reply correct? Answer Yes or No."
    """judge: what it is asked; {prompt} is the prompt's last message, {reply} the text, {ground_truth} the answer."""
    answers: list[str] = field(default_factory=lambda: ["Yes", "No"])
    """judge: the good answer and the bad one."""


@dataclass
class RewardConfig:
    """How a reply is scored. Functions run in worker processes on the ranks that collect replies."""

    functions: list[str] = field(default_factory=lambda: ["auto"])
    """Names in rewards.REWARDS, or path/to/file.py:function (verl's compute_score or TRL's reward_func signature);
    `auto` picks by the row's data_source. Several are summed with `weights`."""
    weights: list[float] = field(default_factory=list)
    """One weight a function; empty means all 1."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the functions."""
    num_workers: int = 1
    """Worker processes a collecting rank; 0 runs in the rank itself (no time limit)."""
    timeout_s: float = 10.0
    """Time limit of one call, in seconds."""
    on_error: float = 0.0
    """The score of a reply whose reward raised, ran out of time or was not finite."""
    overlong_buffer_len: int = 0
    """DAPO's soft punishment: length of the buffer before max_response_length; 0 turns it off."""
    overlong_penalty_factor: float = 1.0
    """Its largest penalty."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model."""


@dataclass
class TeacherConfig:
    """On-policy distillation: a frozen model whose log-probs the actor learns from."""

    enable: bool = False
    """Use it."""
    pool: str = "global"
    """The pool it lives on."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How it is held."""
    path: str | None = None
    """Its folder or hub id."""
    top_k: int = 0
    """0: the reverse KL of the sampled tokens, as part of their advantages; k: of the teacher's k likeliest tokens and
    all others together, in the loss; -1: of the whole vocabulary, in the loss."""
    coef: float = 1.0
    """Weight of that KL."""
    reward_weight: float = 1.0
    """Weight of the rewards' advantages beside it; 0 only distils."""
