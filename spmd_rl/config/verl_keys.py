"""What verl's keys are called here. docs/from-verl.md is generated from these tables.

A pattern's `*` stands for the rest of a key. Sources: verl's ppo_trainer, ppo_megatron_trainer and sft_trainer configs.
"""

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))


def _same(prefix: str, ours: str, names: str) -> dict[str, str]:
    return {f"{prefix}.{name}": f"{ours}.{name}" for name in names.split()}


def _optim(prefix: str, ours: str) -> dict[str, str]:
    renamed = {"lr_warmup_steps_ratio": "warmup_ratio"}
    return {
        **_same(prefix, ours, "lr betas weight_decay clip_grad min_lr_ratio"),
        **{f"{prefix}.{name}": f"{ours}.{new}" for name, new in renamed.items()},
    }


def _fsdp(prefix: str, ours: str) -> dict[str, str]:
    return {
        f"{prefix}.fsdp_size": f"{ours}.fsdp.fsdp_size",
        f"{prefix}.reshard_after_forward": f"{ours}.fsdp.reshard_after_forward",
        f"{prefix}.offload_policy": f"{ours}.fsdp.offload_policy",
        f"{prefix}.ulysses_sequence_parallel_size": f"{ours}.fsdp.ulysses_size",
        f"{prefix}.param_offload": f"{ours}.offload_params",
        f"{prefix}.optimizer_offload": f"{ours}.offload_optimizer",
    }


def _megatron(prefix: str, ours: str) -> dict[str, str]:
    sizes = {
        "tensor_model_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
        "sequence_parallel": "sequence_parallel",
        "use_distributed_optimizer": "distributed_optimizer",
    }
    return {
        **{f"{prefix}.{name}": f"{ours}.megatron.{new}" for name, new in sizes.items()},
        f"{prefix}.param_offload": f"{ours}.offload_params",
        f"{prefix}.optimizer_offload": f"{ours}.offload_optimizer",
    }


RENAMED: dict[str, str] = {
    **_same("data", "data", "train_batch_size max_prompt_length max_response_length prompt_key shuffle"),
    "data.tokenizer": "model.tokenizer",
    "data.trust_remote_code": "model.trust_remote_code",
    f"{MODEL}.path": "model.path",
    f"{MODEL}.tokenizer_path": "model.tokenizer",
    f"{MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{MODEL}.custom_chat_template": "model.chat_template",
    f"{MODEL}.enable_gradient_checkpointing": "actor.engine.gradient_checkpointing",
    f"{MODEL}.lora_rank": "model.lora.rank",
    f"{MODEL}.lora_alpha": "model.lora.alpha",
    f"{MODEL}.lora.rank": "model.lora.rank",
    f"{MODEL}.lora.alpha": "model.lora.alpha",
    **_same(
        ACTOR,
        "actor",
        "ppo_mini_batch_size ppo_epochs shuffle clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode"
        " loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef kl_loss_type",
    ),
    **_same(
        f"{ACTOR}.policy_loss",
        "actor.policy_loss",
        "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta",
    ),
    **_same(ACTOR, "actor.policy_loss", "tau_pos tau_neg"),
    **_optim(f"{ACTOR}.optim", "actor.optim"),
    f"{ACTOR}.grad_clip": "actor.optim.clip_grad",
    **_fsdp(f"{ACTOR}.fsdp_config", "actor.engine"),
    **_megatron(f"{ACTOR}.megatron", "actor.engine"),
    f"{ACTOR}.ulysses_sequence_parallel_size": "actor.engine.fsdp.ulysses_size",
    f"{ACTOR}.checkpoint.async_save": "trainer.checkpoint.async_save",
    **_fsdp(f"{REF}.fsdp_config", "ref.engine"),
    **_megatron(f"{REF}.megatron", "ref.engine"),
    f"{REF}.ulysses_sequence_parallel_size": "ref.engine.fsdp.ulysses_size",
    f"{REF}.model.path": "ref.path",
    **_optim("critic.optim", "critic.optim"),
    **_same("critic", "critic", "ppo_mini_batch_size ppo_epochs cliprange_value loss_agg_mode"),
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.model.path": "critic.path",
    "critic.model.enable_gradient_checkpointing": "critic.engine.gradient_checkpointing",
    "critic.ulysses_sequence_parallel_size": "critic.engine.fsdp.ulysses_size",
    **_fsdp("critic.model.fsdp_config", "critic.engine"),
    **_fsdp("critic.fsdp", "critic.engine"),
    **_megatron("critic.megatron", "critic.engine"),
    **_same(
        ROLLOUT,
        "rollout",
        "n temperature top_p ignore_eos gpu_memory_utilization enforce_eager enable_prefix_caching calculate_log_probs",
    ),
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.infer_tp",
    f"{ROLLOUT}.pipeline_model_parallel_size": "rollout.infer_pp",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    **{
        f"{ROLLOUT}.{name}": f"rollout.engine_kwargs.{name}"
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill")
    },
    f"{ROLLOUT}.val_kwargs.n": "rollout.val_n",
    f"{ROLLOUT}.val_kwargs.temperature": "rollout.val_temperature",
    f"{ROLLOUT}.val_kwargs.top_p": "rollout.val_top_p",
    **_same("algorithm", "algorithm", "gamma lam adv_estimator use_kl_in_reward kl_penalty norm_adv_by_std_in_grpo"),
    **_same("algorithm.kl_ctrl", "algorithm.kl_ctrl", "type kl_coef horizon target_kl"),
    **_same("algorithm.filter_groups", "algorithm.filter_groups", "enable metric max_num_gen_batches"),
    **_same(
        "algorithm.rollout_correction",
        "algorithm.rollout_correction",
        "rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs rollout_rs_threshold bypass_mode"
        " loss_type",
    ),
    "reward_model.enable": "reward.model.enable",
    "reward_model.model.path": "reward.model.path",
    "reward_model.model_path": "reward.model.path",
    **_fsdp("reward_model.model.fsdp_config", "reward.model.engine"),
    "reward.reward_model.enable": "reward.model.enable",
    "reward.reward_model.model_path": "reward.model.path",
    "distillation.enabled": "teacher.enable",
    "distillation.teacher_models.teacher_model.model_path": "teacher.path",
    **_same(
        "trainer",
        "trainer",
        "total_epochs total_training_steps project_name experiment_name save_freq test_freq val_before_train device",
    ),
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.critic_warmup": "critic.warmup_steps",
    "actor_rollout_ref.nccl_timeout": "trainer.timeout_s",
}
"""verl's key to ours, the value unchanged."""

SFT_RENAMED: dict[str, str] = {
    **_same("data", "data", "train_batch_size prompt_key response_key"),
    "data.messages_key": "data.prompt_key",
    "model.partial_pretrain": "model.path",
    "model.path": "model.path",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.enable_gradient_checkpointing": "actor.engine.gradient_checkpointing",
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    **_optim("optim", "actor.optim"),
    **_fsdp("engine", "actor.engine"),
    **_megatron("engine", "actor.engine"),
    **_same(
        "trainer", "trainer", "total_epochs total_training_steps project_name experiment_name save_freq test_freq seed"
    ),
    "ulysses_sequence_parallel_size": "actor.engine.fsdp.ulysses_size",
    "trainer.default_local_dir": "trainer.output_dir",
}
"""The same for verl's SFT trainer."""

IMPLIED: dict[str, str] = {
    "*.use_remove_padding": "sequences are always packed",
    "*.use_rmpad": "sequences are always packed",
    "*.use_dynamic_bsz": "micro-batches are always cut by a token budget",
    "*.log_prob_use_dynamic_bsz": "micro-batches are always cut by a token budget",
    "*.forward_max_token_len_per_gpu": "one budget for forward and update",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "old log-probs are taken under the actor's own budget",
    f"{ROLLOUT}.log_prob_micro_batch_size*": "old log-probs are taken under the actor's own budget",
    f"{ROLLOUT}.mode": "the rollout engine runs inside the rank; there is no server to be synchronous with",
    f"{ROLLOUT}.load_format": "the rollout engine starts empty and gets its weights from the first sync",
    f"{ROLLOUT}.layered_summon": "weights always move in buckets",
    f"{ROLLOUT}.data_parallel_size": "follows from the pool's ranks and infer_tp, infer_pp",
    f"{ROLLOUT}.skip_tokenizer_init": "the engine gets token ids",
    f"{ROLLOUT}.logprobs_mode": "log-probs are always those of the sampling distribution",
    "*.entropy_from_logits*": "the head is always chunked",
    "*.use_fused_kernels": "the head is always chunked",
    "*.fused_kernel_options*": "the head is always chunked",
    "*.use_orig_params": "FSDP2 has no flat parameters",
    "*.model_dtype": "master weights are float32",
    "*.grad_offload": "gradients do not outlive the update",
    "*.forward_only": "a frozen role has no optimizer",
    "*.use_shm": "weights are read once a node, slice by slice",
    "*.use_mbridge": "Hugging Face weights are read and written directly",
    "*.vanilla_mbridge": "Hugging Face weights are read and written directly",
    "actor_rollout_ref.hybrid_engine": "roles on one pool are always hot-swapped",
    "data.return_*": "the batch always holds what the roles and rewards need",
    "data.balance_dp_token": "rows are always balanced over ranks",
    "data.use_dynamic_bsz": "micro-batches are always cut by a token budget",
    "data.pad_mode": "sequences are always packed",
    "use_remove_padding": "sequences are always packed",
    "data.validation_shuffle": "the validation set is taken whole",
    "trainer.balance_batch": "rows are always balanced over ranks",
    "trainer.rollout_data_dir": "replies are in samples/ of the run's folder (observe.samples_per_step)",
    "trainer.validation_data_dir": "replies are in samples/ of the run's folder (observe.samples_per_step)",
    "trainer.log_val_generations": "replies are in samples/ of the run's folder (observe.samples_per_step)",
    "reward_model.reward_manager": "reward.functions=[auto] picks by data_source",
    "reward.reward_manager.name": "reward.functions=[auto] picks by data_source",
    "reward_model.reward_kwargs.max_resp_len": "the over-long penalty takes data.max_response_length",
    "reward_model.launch_reward_fn_async": "rewards always run in worker processes",
    "critic.enable": "algorithm.adv_estimator=gae brings the critic",
    "critic.model.tokenizer_path": "one tokenizer for all roles",
    "trainer.use_legacy_worker_impl": "one implementation",
    "trainer.use_v1": "one implementation",
}
"""verl's settings that need no key here, and why."""

ABSENT: dict[str, str] = {
    "ray_kwargs.*": "there is no Ray: torchrun, Slurm or torchx starts the ranks",
    "ray_init.*": "there is no Ray: torchrun, Slurm or torchx starts the ranks",
    "trainer.ray_wait_register_center_timeout": "there is no Ray",
    "transfer_queue.*": "batches move between layouts by collectives",
    f"{ROLLOUT}.agent.*": "replies are single-turn; there is no agent loop",
    f"{ROLLOUT}.multi_turn.*": "replies are single-turn; there are no tools",
    "data.tool_config_path": "replies are single-turn; there are no tools",
    "data.function_tool_path": "replies are single-turn; there are no tools",
    "data.gen_batch_size": "a generation round is train_batch_size prompts; filter_groups adds rounds",
    "data.custom_cls.*": "write the rows as jsonl or parquet instead",
    "data.sampler.*": "every prompt comes once an epoch, in a seeded order",
    "data.datagen.*": "write the rows as jsonl or parquet instead",
    "data.apply_chat_template_kwargs*": "set model.chat_template instead",
    "data.image*": "text only",
    "data.video*": "text only",
    "data.audio*": "text only",
    "data.mm_processor*": "text only",
    "data.*workers": "prompts are tokenized once, at the start",
    "data.prompt_dict_keys": "name the columns with data.prompt_key and data.response_key",
    "data.response_dict_keys": "name the columns with data.prompt_key and data.response_key",
    "data.reward_fn_key": "the column is data_source",
    "*.ppo_micro_batch_size": "a number over all GPUs; give a budget of tokens: *.engine.max_tokens_per_micro_batch",
    "*.log_prob_micro_batch_size": "a number over all GPUs; give a budget of tokens",
    "*.forward_micro_batch_size*": "one budget for forward and update",
    "*.use_torch_compile": "verl compiles its entropy with it; *.engine.compile=true compiles the layers",
    "*.wrap_policy*": "FSDP2 wraps the model's layers",
    "*.forward_prefetch": "FSDP2 prefetches by itself",
    "*.use_liger": "no Liger kernels",
    "*.override_config*": "change the model folder's config.json",
    "*.override_transformer_config*": "the Megatron config follows from the model and the engine's keys",
    "*.override_ddp_config*": "the Megatron config follows from the model and the engine's keys",
    "*.override_mcore_model_config*": "the Megatron config follows from the model and the engine's keys",
    "*.override_optimizer_config*": "AdamW, by the keys of *.optim",
    "*.optim.total_training_steps": "the schedule runs over trainer.total_training_steps",
    "*.optim.num_cycles": "the cosine has half a period",
    "*.optim.optimizer*": "AdamW",
    "*.dist_checkpointing*": "checkpoints are torch DCP, whatever the layout",
    "*.use_dist_checkpointing": "checkpoints are torch DCP, whatever the layout",
    "*.checkpoint.*": "a checkpoint always holds weights, optimizer, data position and RNG",
    "*.external_lib": "import it in your own reward or loss file",
    "*.enable_activation_offload": "activations are recomputed, not moved",
    "*.exclude_modules": "name the modules to adapt in model.lora.target_modules",
    "*.profiler.*": "observe.profile_steps traces with torch.profiler",
    "global_profiler.*": "observe.profile_steps traces with torch.profiler",
    "*.router_replay.*": "the actor alone replays, what its rollout chose: no files",
    "*.qat.*": "no quantisation",
    f"{ROLLOUT}.quantization*": "no quantisation",
    f"{ROLLOUT}.checkpoint_engine.*": "weights go from the actor's shards to the engine in buckets",
    f"{ROLLOUT}.prometheus.*": "observe.trackers",
    f"{ROLLOUT}.trace.*": "samples are kept in the run's folder",
    f"{ROLLOUT}.disable_log_stats": "set rollout.engine_kwargs.disable_log_stats",
    f"{ROLLOUT}.seed": "trainer.seed: noise is keyed by prompt, sample and position",
    f"{ROLLOUT}.val_kwargs.top_k": "validation keeps all tokens",
    "sandbox_fusion.*": "no code sandbox: call one from your own reward function",
    "reward_model.sandbox_fusion.*": "no code sandbox: call one from your own reward function",
    "reward.sandbox_fusion.*": "no code sandbox: call one from your own reward function",
    "reward_model.num_workers": "reward.num_workers counts per collecting rank",
    "reward.num_workers": "reward.num_workers counts per collecting rank",
    "reward_model.reward_kwargs.*": "give keyword arguments with reward.kwargs",
    "reward_model.*": "the reward model is a sequence classifier run by its engine",
    "reward.reward_model.*": "the reward model is a sequence classifier run by its engine",
    "trainer.default_hdfs_dir": "checkpoints go to a folder",
    "trainer.del_local_ckpt_after_load": "trainer.checkpoint.keep",
    "trainer.max_critic_ckpt_to_keep": "one checkpoint holds all roles",
    "trainer.val_only": "call spmd-rl eval",
    "trainer.esi_redundant_time": "trainer.time_limit_s",
    "algorithm.use_pf_ppo": "no PF-PPO",
    "algorithm.pf_ppo.*": "no PF-PPO",
    "distillation.*": "see the keys of teacher",
}
"""verl's settings that nothing here answers to, and what to do instead."""

DEFAULTS: dict[str, str] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": "1024",
    "data.truncation": "error",
    f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ROLLOUT}.n": "1",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": "2",
    "critic.ppo_max_token_len_per_gpu": "32768",
    "trainer.total_epochs": "30",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
}
"""verl's defaults that differ from ours and change what is computed: put in when a command line leaves them out."""
