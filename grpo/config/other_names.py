"""Names the settings of TRL, verl, EasyR1 and simple_GRPO as they are called here, and their defaults; says what to use
instead of those that are not here: on the command line, in a file of settings, and in a file that is translated.

Names are of TRL 1.16's GRPOConfig, verl's verl/trainer/config/_generated_ppo_trainer.yaml, EasyR1's
examples/config.yaml and simple_GRPO's grpo_vllm_one.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
Rule = tuple[str, Callable[[Any], Any] | None]
"""our name for a setting, or a part of one, and what makes our value, or None if there is no such"""


def _named(**ours: str) -> Callable[[Any], str]:
    """Give a word our name; others pass, and are refused when a run is launched."""
    return lambda word: ours.get(str(word).replace("-", "_"), str(word))


def _words(value: Any) -> list[str]:
    return value if isinstance(value, list) else [word.strip() for word in str(value).split(",") if word.strip()]


def _count(value: Any) -> int:
    if int(value) < 1:
        raise ValueError("use 1 or more")
    return int(value)


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError("use a finite number")
    return number


def _pair(value: Any) -> list[float]:
    first, second = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    return [float(first), float(second)]


_ESTIMATOR = _named(
    reinforce_plus_plus="reinforce++",
    reinforce_plus_plus_baseline="reinforce++_baseline",
    grpo_passk="passk",
    grpo_vectorized="grpo",
    rloo_vectorized="rloo",
)
_KL = _named(**{"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"})
_OPTIMIZER = _named(adamw_torch_fused="adamw_torch", adamw_bnb_8bit="adamw_8bit", paged_adamw_8bit="adamw_8bit")
_MEAN = _named(token_mean="dapo", seq_mean_token_mean="grpo", seq_mean_token_sum_norm="dr_grpo")

# A name without a dot is TRL's, the others are verl's and EasyR1's: those of actor_rollout_ref verl's alone, those of
# worker EasyR1's alone. A star stands for either.
_NAMES: dict[str | Rule, str] = {
    "model_name_or_path": "model model_name actor_rollout_ref.model.path worker.actor.model.model_path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code worker.actor.model.trust_remote_code",
    ("quantization", lambda value: "4bit" if value else None): "load_in_4bit",
    ("quantization", lambda value: "8bit" if value else None): "load_in_8bit",
    "dtype": "dtype torch_dtype",
    ("dtype", lambda value: "bfloat16" if value else "float32"): "bf16",
    "lora_r": "r",
    ("lora_target_modules", _words): "target_modules lora_target_modules",
    ("_rank", int): "actor_rollout_ref.model.lora_rank worker.actor.model.lora.rank",
    ("_alpha", int): "actor_rollout_ref.model.lora_alpha worker.actor.model.lora.alpha",
    ("_modules", _words): "actor_rollout_ref.model.target_modules worker.actor.model.lora.target_modules",
    "freeze_vision_tower": "actor_rollout_ref.actor.freeze_vision_tower worker.actor.model.freeze_vision_tower",
    "gradient_checkpointing": (
        "actor_rollout_ref.model.enable_gradient_checkpointing worker.actor.model.enable_gradient_checkpointing"
    ),
    "sequence_parallel_size": (
        "worker.actor.ulysses_size *.actor.ulysses_sequence_parallel_size "  # the second is EasyR1's older name
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "_train": "data.train_files",
    "_held_out": "data.val_files",
    "dataset_prompt_column": "data.prompt_key",
    "dataset_answer_column": "data.answer_key",
    ("dataset_image_column", lambda name: None if name in ("image", "images") else name): "data.image_key",
    ("dataset_order", lambda value: "shuffled" if value else "as_is"): "shuffle_dataset data.shuffle",
    "data_seed": "data.seed",
    "system_prompt": "data.system_prompt",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    ("max_pictures", lambda value: int(value) if int(value) > 0 else None): "worker.rollout.limit_images",
    "_reward_file": "custom_reward_function.path reward.custom_reward_function.path",
    "_reward": (
        "custom_reward_function.name reward.custom_reward_function.name "
        "worker.reward.reward_function worker.reward.score_function"  # the second is an older name
    ),
    ("num_generations", _count): "num_generations *.rollout.n",
    "temperature": "*.rollout.temperature",
    "seed": "worker.rollout.seed",
    ("_sequences", _count): "per_device_train_batch_size",
    ("_accumulation", _count): "gradient_accumulation_steps",
    ("_micro_steps", _count): "steps_per_generation",  # of accumulation there, and updates here
    ("_round", _count): "data.train_batch_size data.rollout_batch_size",
    ("_mini_batch", _count): "actor_rollout_ref.actor.ppo_mini_batch_size worker.actor.global_batch_size",
    ("num_iterations", _count): "*.actor.ppo_epochs",
    "micro_batch_tokens": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ("_max_steps", int): "max_steps trainer.total_training_steps trainer.max_steps",
    ("_epochs", float): "num_train_epochs trainer.total_epochs trainer.total_episodes",  # the last is an older name
    ("optim", _OPTIMIZER): "optim",
    ("optim", lambda name: "adamw_torch" if name == "adamw" else None): "worker.actor.optim.strategy",
    "learning_rate": "*.actor.optim.lr",
    "weight_decay": "*.actor.optim.weight_decay",
    ("_betas", _pair): "*.actor.optim.betas",
    ("_warmup_steps", _finite): "warmup_steps *.actor.optim.lr_warmup_steps",
    ("_warmup_share", float): (
        "warmup_ratio actor_rollout_ref.actor.optim.lr_warmup_steps_ratio worker.actor.optim.lr_warmup_ratio"
    ),
    "_course": "actor_rollout_ref.actor.optim.warmup_style *.actor.optim.lr_scheduler_type",  # the first is older
    ("_lowest_rate", float): "*.actor.optim.min_lr_ratio",
    ("_cycles", float): "actor_rollout_ref.actor.optim.num_cycles",
    "max_grad_norm": (
        "actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.optim.clip_grad worker.actor.max_grad_norm"
    ),
    ("advantage_estimator", _ESTIMATOR): "algorithm.adv_estimator",
    "_by_std": "algorithm.norm_adv_by_std_in_grpo",
    ("scale_rewards", lambda value: {True: "group", False: "none"}.get(value, value)): "scale_rewards",
    ("_loss", _named(vanilla="")): "actor_rollout_ref.actor.policy_loss.loss_mode",
    ("_loss", _named(default="", gspo_token="gspo")): "worker.actor.loss_type",  # which have one gradient
    ("_mean", _MEAN): "actor_rollout_ref.actor.loss_agg_mode",
    ("_mean", _named(token="dapo", seq="grpo")): "worker.actor.loss_avg_mode",
    ("_low", float): "*.actor.clip_ratio_low",
    ("_high", float): "*.actor.clip_ratio_high",
    ("_low_and_high", float): "actor_rollout_ref.actor.clip_ratio",
    ("_dual", float): "actor_rollout_ref.actor.clip_ratio_c worker.actor.clip_ratio_dual",
    "entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
    ("_no_kl", bool): "algorithm.disable_kl",
    ("_kl_in_loss", bool): "actor_rollout_ref.actor.use_kl_loss algorithm.use_kl_loss",
    ("_kl_in_reward", bool): "algorithm.use_kl_in_reward",
    ("_kl_loss_coef", float): "actor_rollout_ref.actor.kl_loss_coef",
    ("_kl_loss_type", _KL): "actor_rollout_ref.actor.kl_loss_type",
    ("_kl_coef", float): "algorithm.kl_ctrl.kl_coef algorithm.kl_coef",
    ("_kl_penalty", _KL): "algorithm.kl_penalty",
    "_kl_control": "algorithm.kl_ctrl.type algorithm.kl_type",
    ("_kl_target", float): "algorithm.kl_ctrl.target_kl algorithm.kl_target",
    "_eval_strategy": "eval_strategy evaluation_strategy",
    "_eval_steps": "eval_steps",
    ("_eval_freq", int): "trainer.test_freq trainer.val_freq",
    "log_eval_completions": "trainer.log_val_generations trainer.val_generations_to_log",
    "_save_strategy": "save_strategy",
    "_save_steps": "save_steps",
    ("_save_freq", int): "trainer.save_freq",
    # -1 is all, as 0 is here
    ("save_total_limit", lambda value: max(0, int(value))): "trainer.max_actor_ckpt_to_keep trainer.save_limit",
    "output_dir": "trainer.default_local_dir trainer.save_checkpoint_path",
}
_SIMPLE_GRPO: dict[str | Rule, str] = {
    "model_name_or_path": "model_path",
    ("_micro_batches", _count): "all_steps",
    ("_micro_saves", _count): "save_steps",
    ("_micro_steps", _count): "gen_update_steps",
    ("num_generations", _count): "num_pre_Q",
    "epsilon": "clip_param",
    ("ref_servers", lambda url: [url]): "ref_server",
    "learning_rate": "lr",
    "temperature": "temperature",
    "max_completion_length": "max_tokens",
    ("_accumulation", _count): "gradient_accumulation_steps",
    ("_sequences", _count): "train_batch_size",
}


def _rules(names: dict[str | Rule, str]) -> dict[str, Rule]:
    """Return the rule of each name. The first of several names for one part counts."""
    pairs = [(rule if isinstance(rule, tuple) else (rule, None), theirs) for rule, theirs in names.items()]
    return {name: rule for rule, theirs in pairs for name in theirs.split()}


def _with_dots(star: str, other: str) -> dict[str, Rule]:
    rules = {name: rule for name, rule in _rules(_NAMES).items() if "." in name and not name.startswith(other)}
    return {name.replace("*", star): rule for name, rule in rules.items()}


TABLES: dict[str, dict[str, Rule]] = {
    "trl": {name: rule for name, rule in _rules(_NAMES).items() if "." not in name},
    "verl": _with_dots(star="actor_rollout_ref", other="worker."),
    "easyr1": _with_dots(star="worker", other="actor_rollout_ref."),
    "simple_grpo": _rules(_SIMPLE_GRPO),
}

_OF_VERL = {
    "system_prompt": "",
    "learning_rate": 1e-6,
    "weight_decay": 0.01,
    "num_generations": 1,
    "save_total_limit": 0,
}
# The value of a setting there that a file does not name, if it is another one here. Not so EasyR1's
# trust_remote_code: code that comes with a model is run if a file says so.
DEFAULTS: dict[str, Settings] = {
    "trl": {
        **{"beta": 0.0, "loss_type": "dapo", "lr_scheduler_type": "linear", "adam_beta2": 0.999, "system_prompt": ""},
        **{"learning_rate": 1e-6, "dataset_prompt_column": "prompt", "dataset_answer_column": ""},
        **{"save_total_limit": 0, "use_bias_correction_kl": True, "hub_strategy": "every_save"},
    },
    "verl": {**_OF_VERL, "advantage_estimator": "gae", "dataset_answer_column": "reward_model.ground_truth"},
    "easyr1": _OF_VERL,
    "simple_grpo": {"warmup_steps": 0, "adam_beta2": 0.999, "max_grad_norm": 0.0},
}
OTHER_MEANINGS = {"log_level"}  # names that TRL has for something else

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
