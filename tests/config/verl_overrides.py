"""Overrides of verl's public example scripts, shell variables put in. `a.` `m.` `o.` `f.` stand for
actor_rollout_ref's actor, model, rollout and ref."""

PREFIXES = {part[0]: f"actor_rollout_ref.{part}" for part in ("actor", "model")} | {
    "o": "actor_rollout_ref.rollout",
    "f": "actor_rollout_ref.ref",
}

GSM8K = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet"
GSM8K_MATH = (
    "data.train_files=['$HOME/data/gsm8k/train.parquet','$HOME/data/math/train.parquet']"
    " data.val_files=['$HOME/data/gsm8k/test.parquet','$HOME/data/math/test.parquet']"
)

SCRIPTS: dict[str, str] = {
    "grpo_trainer/run_qwen2-7b_seq_balance.sh": f"""
        algorithm.adv_estimator=grpo {GSM8K} data.return_raw_chat=True data.train_batch_size=1024
        data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True
        data.truncation=error m.path=Qwen/Qwen2-7B-Instruct a.optim.lr=1e-6 m.use_remove_padding=True
        a.ppo_mini_batch_size=256 a.use_dynamic_bsz=True a.ppo_max_token_len_per_gpu=24000 a.use_kl_loss=True
        a.kl_loss_coef=0.001 a.kl_loss_type=low_var_kl a.entropy_coeff=0 m.enable_gradient_checkpointing=True
        a.fsdp_config.param_offload=False a.fsdp_config.optimizer_offload=False o.tensor_model_parallel_size=2
        o.name=sglang o.mode=async o.multi_turn.format=hermes o.gpu_memory_utilization=0.6 o.n=5
        f.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0
        trainer.logger=[console,wandb] trainer.project_name=verl_grpo_example_gsm8k
        trainer.experiment_name=qwen2_7b_function_rm_kl1e-3 trainer.val_before_train=False trainer.n_gpus_per_node=8
        trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15""",
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh": f"""
        algorithm.adv_estimator=grpo {GSM8K} data.train_batch_size=1024 data.max_prompt_length=512
        data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error data.shuffle=False
        m.path=Qwen/Qwen2.5-3B-Instruct m.use_shm=True m.lora_rank=64 m.lora_alpha=32 a.optim.lr=3e-6
        m.use_remove_padding=True a.ppo_mini_batch_size=256 a.ppo_micro_batch_size_per_gpu=40 a.use_kl_loss=True
        a.kl_loss_coef=0.001 a.kl_loss_type=low_var_kl a.entropy_coeff=0 m.enable_gradient_checkpointing=True
        a.fsdp_config.param_offload=False a.fsdp_config.optimizer_offload=False
        o.log_prob_micro_batch_size_per_gpu=40 o.tensor_model_parallel_size=2 o.name=vllm
        o.gpu_memory_utilization=0.6 o.n=5 o.load_format=safetensors o.layered_summon=True
        f.log_prob_micro_batch_size_per_gpu=40 f.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False
        trainer.critic_warmup=0 trainer.logger=[console,wandb] trainer.project_name=verl_grpo_example_gsm8k
        trainer.experiment_name=qwen2_7b_function_rm trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
        trainer.test_freq=5 trainer.total_epochs=15""",
    "cispo_trainer/run_qwen3_8b_fsdp.sh": f"""
        algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False {GSM8K_MATH} data.train_batch_size=1024
        data.max_prompt_length=1024 data.max_response_length=2048 data.filter_overlong_prompts=True
        data.truncation=error m.path=Qwen/Qwen3-8B m.use_remove_padding=True m.enable_gradient_checkpointing=True
        a.policy_loss.loss_mode=cispo a.clip_ratio_low=10 a.clip_ratio_high=0.2 a.optim.lr=1e-6
        a.ppo_mini_batch_size=256 a.use_dynamic_bsz=True a.ppo_max_token_len_per_gpu=24576 a.use_kl_loss=True
        a.kl_loss_coef=0.001 a.kl_loss_type=low_var_kl a.entropy_coeff=0 a.fsdp_config.param_offload=False
        a.fsdp_config.optimizer_offload=False o.name=vllm o.tensor_model_parallel_size=2 o.gpu_memory_utilization=0.6
        o.n=5 o.log_prob_use_dynamic_bsz=True o.log_prob_max_token_len_per_gpu=24576 f.log_prob_use_dynamic_bsz=True
        f.log_prob_max_token_len_per_gpu=24576 f.fsdp_config.param_offload=True trainer.balance_batch=True
        trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name=verl_cispo_gsm8k_math
        trainer.experiment_name=qwen3_8b_vllm_fsdp trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
        trainer.test_freq=5 trainer.total_epochs=15""",
    "ppo_trainer/run_qwen3_8b_megatron.sh": f"""
        algorithm.adv_estimator=gae {GSM8K_MATH} data.train_batch_size=1024 data.max_prompt_length=1024
        data.max_response_length=2048 data.filter_overlong_prompts=True data.truncation=error m.path=Qwen/Qwen3-8B
        m.use_remove_padding=True a.optim.lr=1e-6 a.ppo_mini_batch_size=256 a.use_dynamic_bsz=True
        a.ppo_max_token_len_per_gpu=24576 a.entropy_coeff=0 a.megatron.tensor_model_parallel_size=2
        a.megatron.pipeline_model_parallel_size=2 o.name=vllm o.tensor_model_parallel_size=2
        o.gpu_memory_utilization=0.6 o.n=1 o.log_prob_use_dynamic_bsz=True o.log_prob_max_token_len_per_gpu=24576
        f.log_prob_use_dynamic_bsz=True f.log_prob_max_token_len_per_gpu=24576 f.megatron.tensor_model_parallel_size=2
        f.megatron.pipeline_model_parallel_size=2 critic.model.path=Qwen/Qwen3-8B critic.model.use_remove_padding=True
        critic.optim.lr=1e-5 critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=24576
        critic.megatron.tensor_model_parallel_size=2 critic.megatron.pipeline_model_parallel_size=2
        trainer.balance_batch=True trainer.critic_warmup=0 trainer.logger='["console","wandb"]'
        trainer.project_name=verl_ppo_gsm8k_math trainer.experiment_name=qwen3_8b_vllm_megatron
        trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
        model_engine=megatron""",
    "grpo_trainer/run_qwen3-236b_megatron.sh": """
        --config-path=config --config-name=ppo_megatron_trainer.yaml data.train_files=/d/dapo-math-17k.parquet
        data.val_files=/d/aime-2024.parquet data.prompt_key=prompt data.truncation=left data.max_prompt_length=2048
        data.max_response_length=4096 data.train_batch_size=256 o.n=4 algorithm.adv_estimator=grpo
        algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 a.use_kl_loss=False a.kl_loss_coef=0.0
        a.clip_ratio_low=0.2 a.clip_ratio_high=0.28 a.clip_ratio_c=10.0 a.ppo_micro_batch_size_per_gpu=1
        f.log_prob_micro_batch_size_per_gpu=4 o.log_prob_micro_batch_size_per_gpu=4 m.path=/m/Qwen3-235B-A22B
        m.enable_gradient_checkpointing=True a.optim.lr=1e-6 a.optim.lr_warmup_steps=10 a.optim.weight_decay=0.1
        a.ppo_mini_batch_size=16 a.megatron.param_offload=True a.megatron.optimizer_offload=True
        a.megatron.grad_offload=True a.megatron.pipeline_model_parallel_size=8
        a.megatron.tensor_model_parallel_size=4 a.megatron.expert_model_parallel_size=4
        a.megatron.dist_checkpointing_path=/m/mcore a.megatron.use_dist_checkpointing=True
        +a.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=5
        +a.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=5 a.entropy_coeff=0
        a.optim.clip_grad=1.0 a.loss_agg_mode=token-mean o.gpu_memory_utilization=0.8 o.tensor_model_parallel_size=8
        o.enable_chunked_prefill=True o.max_num_batched_tokens=6144 o.temperature=1.0 o.top_p=1.0 o.top_k=-1
        o.val_kwargs.temperature=1.0 o.val_kwargs.top_p=0.7 o.val_kwargs.top_k=-1 o.val_kwargs.do_sample=True
        o.val_kwargs.n=1 f.megatron.pipeline_model_parallel_size=8 f.megatron.tensor_model_parallel_size=4
        f.megatron.expert_model_parallel_size=4 f.megatron.param_offload=True f.megatron.use_dist_checkpointing=True
        reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
        +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
        +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.1
        +reward_model.reward_kwargs.overlong_buffer_cfg.log=False +reward_model.reward_kwargs.max_resp_len=4096
        trainer.logger=['console','wandb'] trainer.project_name=DAPO trainer.experiment_name=DAPO-Qwen3-236b-megatron
        trainer.n_gpus_per_node=8 trainer.nnodes=32 trainer.val_before_train=False trainer.test_freq=10
        trainer.save_freq=20 trainer.total_epochs=10 trainer.total_training_steps=100 trainer.default_local_dir=/c
        trainer.resume_mode=auto trainer.log_val_generations=10""",
    "recipe/dapo/run_dapo_qwen2.5_32b.sh": """
        data.train_files=/d/dapo-math-17k.parquet data.val_files=/d/aime-2024.parquet data.prompt_key=prompt
        data.truncation=left data.max_prompt_length=2048 data.max_response_length=20480 data.gen_batch_size=1536
        data.train_batch_size=512 o.n=16 algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0.0 a.kl_loss_coef=0.0
        a.clip_ratio_low=0.2 a.clip_ratio_high=0.28 algorithm.filter_groups.enable=True
        algorithm.filter_groups.max_num_gen_batches=10 algorithm.filter_groups.metric=acc m.use_remove_padding=True
        a.use_dynamic_bsz=True f.log_prob_use_dynamic_bsz=True o.log_prob_use_dynamic_bsz=True
        a.ppo_max_token_len_per_gpu=22528 f.log_prob_max_token_len_per_gpu=22528 o.log_prob_max_token_len_per_gpu=22528
        m.path=/m/Qwen2.5-32B +m.override_config.attention_dropout=0. +m.override_config.embd_pdrop=0.
        +m.override_config.resid_pdrop=0. m.enable_gradient_checkpointing=True a.optim.lr=1e-6
        a.optim.lr_warmup_steps=10 a.optim.weight_decay=0.1 a.ppo_mini_batch_size=32 a.fsdp_config.param_offload=True
        a.fsdp_config.optimizer_offload=True a.entropy_coeff=0 a.grad_clip=1.0 a.use_token_level_loss=True
        a.ulysses_sequence_parallel_size=8 o.gpu_memory_utilization=0.80 o.tensor_model_parallel_size=4
        o.enable_chunked_prefill=True o.max_num_batched_tokens=22528 o.temperature=1.0 o.top_p=1.0 o.top_k="-1"
        o.val_kwargs.temperature=1.0 o.val_kwargs.top_p=1.0 o.val_kwargs.top_k=-1 o.val_kwargs.do_sample=True
        o.val_kwargs.n=1 f.fsdp_config.param_offload=True f.ulysses_sequence_parallel_size=8 a.fsdp_config.fsdp_size=-1
        reward_model.reward_manager=dapo custom_reward_function.overlong_buffer.enable=True
        custom_reward_function.overlong_buffer.len=4096 custom_reward_function.overlong_buffer.penalty_factor=1.0
        trainer.logger=['console','wandb'] trainer.project_name=DAPO trainer.experiment_name=DAPO-Qwen2.5-32B
        trainer.n_gpus_per_node=8 trainer.nnodes=16 +trainer.val_before_train=True trainer.test_freq=5
        trainer.save_freq=5 trainer.total_epochs=1 trainer.default_local_dir=/c trainer.resume_mode=auto""",
    "remax_trainer/run_qwen2.5-3b_seq_balance.sh": f"""
        algorithm.adv_estimator=remax {GSM8K} data.train_batch_size=512 data.max_prompt_length=512
        data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
        m.path=Qwen/Qwen2.5-3B-Instruct a.optim.lr=1e-6 m.use_remove_padding=True a.ppo_mini_batch_size=128
        a.use_dynamic_bsz=True a.ppo_max_token_len_per_gpu=30000 a.use_kl_loss=False
        m.enable_gradient_checkpointing=True a.fsdp_config.param_offload=False a.fsdp_config.optimizer_offload=False
        o.tensor_model_parallel_size=2 o.name=vllm o.gpu_memory_utilization=0.8 o.n=4 f.fsdp_config.param_offload=True
        algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0
        trainer.logger=['console','wandb'] trainer.project_name=verl_remax_example_gsm8k
        trainer.experiment_name=qwen2.5_3b_function_rm_kl1e-3 trainer.val_before_train=False trainer.n_gpus_per_node=8
        trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=5""",
    "rollout_correction/run_qwen2_5_7b_fsdp.sh": """
        data.train_files=data/train.parquet data.val_files=data/test.parquet data.max_prompt_length=2048
        data.max_response_length=4096 data.train_batch_size=128 data.truncation=left algorithm.adv_estimator=rloo
        algorithm.gamma=1.0 algorithm.rollout_correction.rollout_is=sequence
        algorithm.rollout_correction.rollout_is_threshold=2.0
        algorithm.rollout_correction.rollout_is_batch_normalize=true algorithm.rollout_correction.rollout_rs=null
        algorithm.rollout_correction.rollout_rs_threshold=null algorithm.rollout_correction.bypass_mode=true
        algorithm.rollout_correction.loss_type=reinforce m.path=Qwen/Qwen2.5-7B a.optim.lr=5e-7
        a.ppo_mini_batch_size=32 a.ppo_micro_batch_size_per_gpu=8 a.ppo_epochs=1 o.calculate_log_probs=True
        o.log_prob_micro_batch_size_per_gpu=8 o.name=vllm trainer.logger='["console","wandb"]'
        trainer.project_name=rollout_corr_rloo_example trainer.experiment_name=rloo_seq_is_pure
        trainer.total_epochs=10""",
    "ppo_trainer/run_qwen2-7b_rm_reward_loop_colocate.sh": f"""
        algorithm.adv_estimator=gae {GSM8K_MATH} data.train_batch_size=1024 data.max_prompt_length=1024
        data.max_response_length=2048 data.filter_overlong_prompts=True data.truncation=error data.return_raw_chat=True
        m.path=$HOME/models/Qwen2.5-3B-Instruct a.optim.lr=1e-6 m.use_remove_padding=True
        a.optim.lr_warmup_steps_ratio=0.1 a.ppo_mini_batch_size=256 a.ppo_micro_batch_size_per_gpu=16
        a.use_kl_loss=False m.enable_gradient_checkpointing=True a.fsdp_config.param_offload=False
        a.fsdp_config.optimizer_offload=False o.log_prob_micro_batch_size_per_gpu=16 o.tensor_model_parallel_size=1
        o.name=vllm o.gpu_memory_utilization=0.6 critic.optim.lr=1e-5 critic.model.use_remove_padding=True
        critic.optim.lr_warmup_steps_ratio=0.05 critic.model.path=$HOME/models/Qwen2.5-3B-Instruct
        critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32
        critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False
        reward_model.enable=True reward_model.model_path=$HOME/models/Skywork-Reward-V2-Llama-3.2-3B
        reward_model.use_reward_loop=True reward_model.inference.name=vllm
        reward_model.inference.gpu_memory_utilization=0.8 reward_model.num_workers=8 algorithm.use_kl_in_reward=False
        trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name=verl_test_qwen25_rm
        trainer.val_before_train=False trainer.experiment_name=reward_loop_colocate_reward_model
        trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=10
        trainer.total_epochs=15""",
}


def overrides_of(script: str) -> str:
    """The script's overrides with the short prefixes written out."""
    words = []
    for word in SCRIPTS[script].split():
        plus = "+" * word.startswith("+")
        head, dot, rest = word.removeprefix("+").partition(".")
        words.append(plus + PREFIXES.get(head, head) + dot + rest)
    return " ".join(words)
