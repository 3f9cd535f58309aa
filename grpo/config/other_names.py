"""Names the settings of TRL, verl, EasyR1 and simple_GRPO as they are called here, and their defaults.

Names are of TRL 1.16's GRPOConfig, verl's verl/trainer/config/_generated_ppo_trainer.yaml, EasyR1's
examples/config.yaml and simple_GRPO's grpo_vllm_one.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
Rule = str | tuple[str, Callable[[Any], Any]]
"""our name for a setting, or a part of one; with a function that makes our value, or None if there is no such"""


def _named(**ours: str) -> Callable[[Any], str]:
    """Give a word our name; others pass, and are refused when a run is launched."""
    return lambda word: ours.get(str(word).replace("-", "_"), str(word))


def _words(value: Any) -> list[str]:
    return value if isinstance(value, list) else [word.strip() for word in str(value).split(",") if word.strip()]


def _most(value: Any) -> int:
    return max(0, int(value))  # -1 is all, as 0 is here


def _count(value: Any) -> int:
    if int(value) < 1:
        raise ValueError("use 1 or more")
    return int(value)


def _above_0(value: Any) -> int | None:
    return int(value) if int(value) > 0 else None


def _pair(value: Any) -> list[float]:
    first, second = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    return [float(first), float(second)]


_ESTIMATOR = (
    "advantage_estimator",
    _named(
        reinforce_plus_plus="reinforce++",
        reinforce_plus_plus_baseline="reinforce++_baseline",
        grpo_passk="passk",
        grpo_vectorized="grpo",
        rloo_vectorized="rloo",
    ),
)
_KL = _named(**{"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"})
_ORDER = ("dataset_order", lambda value: "shuffled" if value else "as_is")
_PICTURES = ("dataset_image_column", lambda name: None if name in ("image", "images") else name)  # found without a name
_OPTIMIZER = _named(adamw_torch_fused="adamw_torch", adamw_bnb_8bit="adamw_8bit", paged_adamw_8bit="adamw_8bit")

# The first key of several for one part counts.
_TRL: dict[str, Rule] = {
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "r": "lora_r",
    "target_modules": ("lora_target_modules", _words),
    "lora_target_modules": ("lora_target_modules", _words),
    "load_in_4bit": ("quantization", lambda value: "4bit" if value else None),
    "load_in_8bit": ("quantization", lambda value: "8bit" if value else None),
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "bf16": ("dtype", lambda value: "bfloat16" if value else "float32"),
    "optim": ("optim", _OPTIMIZER),
    "max_steps": ("_max_steps", int),
    "num_train_epochs": ("_epochs", float),
    "num_generations": ("num_generations", _count),
    "warmup_steps": ("_warmup_steps", float),
    "warmup_ratio": ("_warmup_share", float),
    "per_device_train_batch_size": ("_sequences", _count),
    "gradient_accumulation_steps": ("_accumulation", _count),
    "steps_per_generation": ("_micro_steps", _count),  # of accumulation there, and updates here
    "scale_rewards": ("scale_rewards", lambda value: {True: "group", False: "none"}.get(value, value)),
    "shuffle_dataset": _ORDER,
    "save_strategy": "_save_strategy",
    "save_steps": "_save_steps",
    "eval_strategy": "_eval_strategy",
    "evaluation_strategy": "_eval_strategy",
    "eval_steps": "_eval_steps",
}
_VERL: dict[str, Rule] = {
    "data.train_files": "_train",
    "data.val_files": "_held_out",
    "data.prompt_key": "dataset_prompt_column",
    "data.image_key": _PICTURES,
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_completion_length",
    "data.train_batch_size": ("_round", _count),
    "data.shuffle": _ORDER,
    "data.seed": "data_seed",
    "data.apply_chat_template_kwargs": "chat_template_kwargs",
    "actor_rollout_ref.model.path": "model_name_or_path",
    "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": ("_rank", int),
    "actor_rollout_ref.model.lora_alpha": ("_alpha", int),
    "actor_rollout_ref.model.target_modules": ("_modules", _words),
    "actor_rollout_ref.actor.freeze_vision_tower": "freeze_vision_tower",
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("_mini_batch", _count),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_epochs": ("num_iterations", _count),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "sequence_parallel_size",
    "actor_rollout_ref.actor.clip_ratio_low": ("_low", float),
    "actor_rollout_ref.actor.clip_ratio_high": ("_high", float),
    "actor_rollout_ref.actor.clip_ratio": ("_low_and_high", float),
    "actor_rollout_ref.actor.clip_ratio_c": ("_dual", float),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("_loss", _named(vanilla="")),
    "actor_rollout_ref.actor.loss_agg_mode": (
        "_mean",
        _named(token_mean="dapo", seq_mean_token_mean="grpo", seq_mean_token_sum_norm="dr_grpo"),
    ),
    "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
    "actor_rollout_ref.actor.optim.clip_grad": "max_grad_norm",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": ("_kl_in_loss", bool),
    "actor_rollout_ref.actor.kl_loss_coef": ("_kl_loss_coef", float),
    "actor_rollout_ref.actor.kl_loss_type": ("_kl_loss_type", _KL),
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ("_warmup_steps", float),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": ("_warmup_share", float),
    "actor_rollout_ref.actor.optim.warmup_style": "_course",  # an older name
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "_course",
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("_lowest_rate", float),
    "actor_rollout_ref.actor.optim.num_cycles": ("_cycles", float),
    "actor_rollout_ref.actor.optim.betas": ("_betas", _pair),
    "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
    "actor_rollout_ref.rollout.n": ("num_generations", _count),
    "actor_rollout_ref.rollout.temperature": "temperature",
    "algorithm.adv_estimator": _ESTIMATOR,
    "algorithm.norm_adv_by_std_in_grpo": "_by_std",
    "algorithm.use_kl_in_reward": ("_kl_in_reward", bool),
    "algorithm.kl_penalty": ("_kl_penalty", _KL),
    "algorithm.kl_ctrl.type": "_kl_control",
    "algorithm.kl_ctrl.kl_coef": ("_kl_coef", float),
    "algorithm.kl_ctrl.target_kl": ("_kl_target", float),
    "custom_reward_function.path": "_reward_file",
    "custom_reward_function.name": "_reward",
    "reward.custom_reward_function.path": "_reward_file",
    "reward.custom_reward_function.name": "_reward",
    "trainer.total_training_steps": ("_max_steps", int),
    "trainer.total_epochs": ("_epochs", float),
    "trainer.save_freq": ("_save_freq", int),
    "trainer.test_freq": ("_eval_freq", int),
    "trainer.log_val_generations": "log_eval_completions",
    "trainer.default_local_dir": "output_dir",
    "trainer.max_actor_ckpt_to_keep": ("save_total_limit", _most),
}
_EASYR1: dict[str, Rule] = {
    **{name: rule for name, rule in _VERL.items() if name.startswith("data.")},
    "data.answer_key": "dataset_answer_column",
    "data.system_prompt": "system_prompt",
    "data.rollout_batch_size": ("_round", _count),
    "algorithm.adv_estimator": _ESTIMATOR,
    "algorithm.disable_kl": ("_no_kl", bool),
    "algorithm.use_kl_loss": ("_kl_in_loss", bool),
    "algorithm.kl_penalty": ("_kl_penalty", _KL),
    "algorithm.kl_coef": ("_kl_coef", float),
    "algorithm.kl_type": "_kl_control",
    "algorithm.kl_target": ("_kl_target", float),
    "worker.actor.model.model_path": "model_name_or_path",
    "worker.actor.model.trust_remote_code": "trust_remote_code",
    "worker.actor.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "worker.actor.model.freeze_vision_tower": "freeze_vision_tower",
    "worker.actor.model.lora.rank": ("_rank", int),
    "worker.actor.model.lora.alpha": ("_alpha", int),
    "worker.actor.model.lora.target_modules": ("_modules", _words),
    "worker.actor.global_batch_size": ("_mini_batch", _count),
    "worker.actor.ppo_epochs": ("num_iterations", _count),
    "worker.actor.ulysses_size": "sequence_parallel_size",
    "worker.actor.ulysses_sequence_parallel_size": "sequence_parallel_size",  # an older name
    "worker.actor.max_grad_norm": "max_grad_norm",
    "worker.actor.clip_ratio_low": ("_low", float),
    "worker.actor.clip_ratio_high": ("_high", float),
    "worker.actor.clip_ratio_dual": ("_dual", float),
    "worker.actor.loss_type": ("_loss", _named(default="", gspo_token="gspo")),  # which have one gradient
    "worker.actor.loss_avg_mode": ("_mean", _named(token="dapo", seq="grpo")),
    "worker.actor.optim.lr": "learning_rate",
    "worker.actor.optim.strategy": ("optim", lambda name: "adamw_torch" if name == "adamw" else None),
    "worker.actor.optim.lr_warmup_steps": ("_warmup_steps", float),
    "worker.actor.optim.lr_warmup_ratio": ("_warmup_share", float),
    "worker.actor.optim.lr_scheduler_type": "_course",
    "worker.actor.optim.min_lr_ratio": ("_lowest_rate", float),
    "worker.actor.optim.betas": ("_betas", _pair),
    "worker.actor.optim.weight_decay": "weight_decay",
    "worker.reward.reward_function": "_reward",
    "worker.reward.score_function": "_reward",  # an older name
    "worker.rollout.n": ("num_generations", _count),
    "worker.rollout.seed": "seed",
    "worker.rollout.limit_images": ("max_pictures", _above_0),
    "worker.rollout.temperature": "temperature",
    "trainer.max_steps": ("_max_steps", int),
    "trainer.total_epochs": ("_epochs", float),
    "trainer.total_episodes": ("_epochs", float),  # an older name
    "trainer.val_freq": ("_eval_freq", int),
    "trainer.val_generations_to_log": "log_eval_completions",
    "trainer.save_freq": ("_save_freq", int),
    "trainer.save_limit": ("save_total_limit", _most),
    "trainer.save_checkpoint_path": "output_dir",
}
_SIMPLE_GRPO: dict[str, Rule] = {
    "model_path": "model_name_or_path",
    "all_steps": ("_micro_batches", _count),
    "gen_update_steps": ("_micro_steps", _count),
    "num_pre_Q": ("num_generations", _count),
    "clip_param": "epsilon",
    "ref_server": ("ref_servers", lambda url: [url]),
    "lr": "learning_rate",
    "temperature": "temperature",
    "max_tokens": "max_completion_length",
    "gradient_accumulation_steps": ("_accumulation", _count),
    "train_batch_size": ("_sequences", _count),
}
TABLES = {"trl": _TRL, "verl": _VERL, "easyr1": _EASYR1, "simple_grpo": _SIMPLE_GRPO}

_OF_VERL = {
    "system_prompt": "",
    "learning_rate": 1e-6,
    "weight_decay": 0.01,
    "num_generations": 1,
    "save_total_limit": 0,
}
# What a setting is there where a file does not name it, if it is something else here. Not so EasyR1's
# trust_remote_code: code that comes with a model is run if a file says so.
DEFAULTS: dict[str, Settings] = {
    "trl": {
        **{"beta": 0.0, "loss_type": "dapo", "lr_scheduler_type": "linear", "adam_beta2": 0.999, "system_prompt": ""},
        **{"learning_rate": 1e-6, "dataset_prompt_column": "prompt", "dataset_answer_column": ""},
        **{"save_total_limit": 0, "use_bias_correction_kl": True, "hub_strategy": "every_save"},
    },
    "verl": {**_OF_VERL, "advantage_estimator": "gae", "dataset_answer_column": "reward_model.ground_truth"},
    "easyr1": _OF_VERL,
    "simple_grpo": {"warmup_steps": 0},
}
MAPPINGS = {"data.apply_chat_template_kwargs"}  # settings whose entries a command may give one by one
OTHER_MEANINGS = {"log_level"}  # names that TRL has for something else
