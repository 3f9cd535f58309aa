"""Says what to use here instead of a setting that other trainers have: on the command line, in a file of settings, and
in a file of theirs that is translated."""

_INSTEAD = {
    "use beta": "kl_coef init_kl_coef kl_loss_coef",
    "use kl_target": "target_kl",
    "use dataset_name": "train_files train_dataset",
    "use dataset_name with a .yaml of several, one of them with weight 0": "eval_dataset_name val_files eval_dataset",
    "use dataset_name with a .yaml of several": "dataset_mixture",
    "use dataset_config": "dataset_configs",
    "use dataset_train_split, with a part of it: train[:1000]": "train_max_samples",
    "use eval_samples": "val_max_samples",
    "use dataset_order: shuffled, or as_is": "shuffle_dataset shuffle",
    "use dataset_image_column, for a model that reads pictures": "image_key",
    "use max_pictures": "limit_images",
    "use log_eval_completions": "val_generations_to_log",
    "use dtype": "bf16 torch_dtype model_dtype model_init_kwargs",
    "use dtype bfloat16, or float32: in float16 small gradients would be 0": "fp16",
    "use epsilon": "clip_ratio eps_clip",
    "use importance_sampling_mode": (
        "vllm_importance_sampling_mode vllm_importance_sampling_correction rollout_is rollout_rs"
    ),
    "use importance_sampling_clip_max": (
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold"
    ),
    "use importance_sampling_clip_min": "vllm_importance_sampling_clip_min",
    "use eval_steps": "eval_strategy evaluation_strategy eval_on_start do_eval test_freq val_freq",
    "use learning_rate": "lr actor_learning_rate",
    "use max_completion_length": "max_new_tokens max_response_length generate_max_len",
    "use max_prompt_length and max_completion_length": "max_seq_length max_model_len",
    "use max_resample": "filter_groups online_filtering max_try_make_batch max_num_gen_batches",
    "use soft_punish_cache": "overlong_buffer overlong_buffer_cfg",
    "use max_steps": "all_steps",
    "use warmup_steps, where a number below 1 is a share": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "use lr_scheduler_type": "warmup_style",
    "use adam_epsilon": "adam_eps",
    "use num_train_epochs": "total_epochs total_episodes max_epochs num_episodes",
    "use num_generations": "n n_samples_per_prompt num_pre_Q",
    "use num_generations_eval and eval_temperature": "val_kwargs val_override_config",
    "use prompts_per_step": "Q_batch_size",
    "use prompts_per_step and micro_batch_tokens": "per_device_train_batch_size gradient_accumulation_steps",
    "use prompts_per_step and steps_per_generation": "generation_batch_size rollout_batch_size",
    "use micro_batch_tokens": (
        "micro_batch_size_per_device_for_update ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "micro_batch_size_per_device_for_experience log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu"
    ),
    "use quantization": "load_in_4bit load_in_8bit",
    "use ref_update_steps": "sync_ref_model ref_model_sync_steps",
    "use ref_mixup_alpha": "ref_model_mixup_alpha",
    "use sequences_per_generate": "per_device_eval_batch_size micro_rollout_batch_size",
    "use gradient_checkpointing": "activation_checkpointing use_gradient_checkpointing",
    "use activation_offloading": "enable_activation_offload",
    "use sequence_parallel_size": "ulysses_sequence_parallel_size ulysses_size",
    "use deepspeed (docs/larger.md)": (
        "param_offload optimizer_offload offload_params offload_optimizer enable_cpu_offload"
    ),
    "give grpo launch nproc_per_node": "n_gpus_per_node num_processes",
    "use output_dir": "save_checkpoint_path default_local_dir",
    "use output_dir, whose last part names the run": "run_name experiment_name",
    "use resume_from_checkpoint": "load_checkpoint_path resume_mode resume_from_path",
    "use report_to": "logger",
    "use reward_funcs": "reward_model reward_manager",
    "use max_turns": "max_assistant_turns max_user_turns",
    "use tools or environment (docs/tools.md)": "tool_config_path interaction_config_path",
    "use save_steps; the best checkpoint is kept too": "save_strategy",
    "use save_total_limit": "max_actor_ckpt_to_keep save_limit",
    "use data_seed, or seed": "random_state data_loader_seed",
    "use model_name_or_path, which takes an adapter's folder": "lora_adapter_path",
    "translate the file: grpo init --from": "data actor_rollout_ref algorithm worker trainer",
    "its settings are not read: translate that file too": "--config-name defaults",
    "use dry_run, or python ref_server.py --estimate": "estimate",
    "use sampler pool, and draw with python generate.py --engine vllm": (
        "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length "
        "gpu_memory_utilization tensor_parallel_size tensor_model_parallel_size max_num_batched_tokens fast_inference"
    ),
    "set the environment variable HF_TOKEN": "hub_token",
    "save it with the tokenizer": "chat_template chat_template_path override_chat_template custom_chat_template",
    "write it into system_prompt, or into the prompts of your rows": "format_prompt",
    "leave it out: the loss scores the full distribution, so that is drawn": "top_p top_k min_p repetition_penalty",
    "leave it out: the trainer chooses the attention itself": "attn_implementation",
    "leave it out: log-probs would be those of another distribution than was sampled from": "lora_dropout",
    "leave it out: no model is trained with dropout": "disable_dropout",
    "leave it out: every step is recorded": "logging_steps logging_strategy log_completions",
    "leave it out: every metric of an evaluation is better when it is higher": "greater_is_better",
    "leave it out: from_pretrained reads a checkpoint, and the run continues from it": "save_only_model",
    "leave it out: without a GPU the CPU computes": "use_cpu",
    "leave it out: batches are packed, whatever the lengths": "group_by_length padding_free use_remove_padding",
    "leave it out: the paper's numbers are fixed": (
        "sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg tau_positive tau_negative "
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg"
    ),
    "leave it out: longer prompts are always left out": "filter_overlong_prompts truncation",
    "leave it out: a run with eval_steps is evaluated before the first step": "val_before_train",
    "write it into rewards.py, with TRL's signature (docs/rewards.md)": (
        "score_function custom_reward_function reward_function compute_score"
    ),
}
# What to do about settings of other trainers, first of all TRL's, and of the reference server.
INSTEAD = {name: remedy for remedy, names in _INSTEAD.items() for name in names.split()}
