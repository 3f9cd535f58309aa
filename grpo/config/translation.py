"""Translates settings of TRL, verl, EasyR1 and simple_GRPO into ours (`grpo init --from`).

Names are of TRL 1.16's GRPOConfig, verl's verl/trainer/config/_generated_ppo_trainer.yaml, EasyR1's
examples/config.yaml and simple_GRPO's grpo_vllm_one.py. A name that begins with _ is a part of a setting: `_join` makes
settings of all parts.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo.config.command_line import load_yaml
from grpo.config.errors import ConfigError, one_line
from grpo.config.instead import INSTEAD

Rule = str | Callable[[Any], dict[str, Any]]  # our name for a setting, or a function of its value that returns ours


def _data(value: Any) -> dict[str, Any]:
    """Read `hub/name@split` (EasyR1), or a file, whose folder is the dataset if it is called train."""
    name, _, split = str(value[0] if isinstance(value, list) else value).partition("@")
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    dataset = {"dataset_name": str(path.parent if path.stem == "train" else path)}
    return dataset | ({"dataset_train_split": split} if split else {})


def _held_out(value: Any) -> dict[str, Any]:
    split = str(value).partition("@")[2]
    return {"dataset_test_split": split} if split else {}


def _steps(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: max(0, int(value))}  # -1 is never


def _unless_no(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: 0} if str(value).lower() in ("no", "false") else {}  # YAML reads no as False


def _choice(name: str, **ours: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: ours.get(str(value).replace("-", "_"), str(value))}


_ESTIMATOR = _choice(
    "advantage_estimator",
    reinforce_plus_plus="reinforce++",
    reinforce_plus_plus_baseline="reinforce++_baseline",
    grpo_passk="passk",
)
_KL = _choice("kl_estimator", low_var_kl="k3", kl="k1", mse="k2")

_TRL: dict[str, Rule] = {
    "model": "model_name_or_path",
    "train_dataset": _data,
    "r": lambda value: {"use_peft": True, "lora_r": value, "_lora_alpha": 8},
    "target_modules": "lora_target_modules",
    "per_device_train_batch_size": "_sequences",
    "gradient_accumulation_steps": "_accumulation",
    "steps_per_generation": "_micro_steps",  # of accumulation there, and updates here
    "bf16": lambda value: {"dtype": "bfloat16"} if value else {},
    "warmup_ratio": "warmup_steps",
    "scale_rewards": lambda value: {"scale_rewards": {True: "group", False: "none"}.get(value, value)},
    "shuffle_dataset": lambda value: {} if value else {"dataset_order": "as_is"},
    "save_strategy": _unless_no("save_steps"),
    "eval_strategy": _unless_no("eval_steps"),
}
_VERL: dict[str, Rule] = {
    "data.train_files": _data,
    "data.val_files": _held_out,
    "data.prompt_key": "dataset_prompt_column",
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_completion_length",
    "data.train_batch_size": "_round",
    "actor_rollout_ref.model.path": "model_name_or_path",
    "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": lambda value: {"use_peft": True, "lora_r": value} if int(value) else {},
    "actor_rollout_ref.model.lora_alpha": "_lora_alpha",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "prompts_per_step",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
    "actor_rollout_ref.actor.clip_ratio": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_low": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "epsilon_high",
    "actor_rollout_ref.actor.clip_ratio_c": "delta",
    "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": "_kl_in_loss",
    "actor_rollout_ref.actor.kl_loss_coef": "_kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type": _KL,
    "actor_rollout_ref.actor.loss_agg_mode": _choice(
        "loss_type", token_mean="dapo", seq_mean_token_mean="grpo", seq_mean_token_sum_norm="dr_grpo"
    ),
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _steps("warmup_steps"),
    "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
    "actor_rollout_ref.rollout.n": "num_generations",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "algorithm.adv_estimator": _ESTIMATOR,
    "algorithm.norm_adv_by_std_in_grpo": lambda value: {} if value else {"scale_rewards": "none"},
    "algorithm.use_kl_in_reward": "kl_in_reward",
    "algorithm.kl_ctrl.kl_coef": "_kl_coef",
    "trainer.total_training_steps": "max_steps",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.save_freq": _steps("save_steps"),
    "trainer.test_freq": _steps("eval_steps"),
}
_EASYR1: dict[str, Rule] = {
    **{name: rule for name, rule in _VERL.items() if name.startswith("data.")},
    "data.answer_key": "dataset_answer_column",
    "data.system_prompt": "system_prompt",
    "data.seed": "seed",
    "data.rollout_batch_size": "_round",
    "algorithm.adv_estimator": _ESTIMATOR,
    "algorithm.disable_kl": "_no_kl",
    "algorithm.use_kl_loss": lambda value: {} if value else {"kl_in_reward": True},
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_coef": "_kl_coef",
    "worker.actor.model.model_path": "model_name_or_path",
    "worker.actor.model.trust_remote_code": "trust_remote_code",
    "worker.actor.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "worker.actor.model.freeze_vision_tower": "_freeze",
    "worker.actor.global_batch_size": "prompts_per_step",
    "worker.actor.max_grad_norm": "max_grad_norm",
    "worker.actor.clip_ratio_low": "epsilon",
    "worker.actor.clip_ratio_high": "epsilon_high",
    "worker.actor.clip_ratio_dual": "delta",
    "worker.actor.loss_avg_mode": _choice("loss_type", token="dapo", seq="grpo"),
    "worker.actor.optim.lr": "learning_rate",
    "worker.actor.optim.weight_decay": "weight_decay",
    "worker.rollout.n": "num_generations",
    "worker.rollout.limit_images": lambda value: {"max_pictures": value} if int(value) else {},
    "worker.rollout.temperature": "temperature",
    "trainer.max_steps": "max_steps",
    "trainer.total_episodes": "num_train_epochs",
    "trainer.val_freq": _steps("eval_steps"),
    "trainer.val_generations_to_log": "log_eval_completions",
    "trainer.save_freq": _steps("save_steps"),
    "trainer.save_limit": lambda value: {"save_total_limit": value} if int(value) > 0 else {},
}
_SIMPLE_GRPO: dict[str, Rule] = {
    "model_path": "model_name_or_path",
    "all_steps": "_micro_batches",
    "gen_update_steps": "_micro_steps",
    "num_pre_Q": "num_generations",
    "clip_param": "epsilon",
    "ref_server": lambda value: {"ref_servers": [value]},
    "lr": "learning_rate",
    "temperature": "temperature",
    "max_tokens": "max_completion_length",
    "gradient_accumulation_steps": "_accumulation",
    "train_batch_size": "_sequences",
}
_OF_VERL: dict[str, Any] = {
    **{"system_prompt": "", "loss_type": "dapo", "delta": 3.0, "learning_rate": 1e-6, "warmup_steps": 0},
    **{"weight_decay": 0.01, "adam_beta2": 0.999},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "trl": {
        **{"beta": 0.0, "loss_type": "dapo", "lr_scheduler_type": "linear", "warmup_steps": 0, "adam_beta2": 0.999},
        **{"num_train_epochs": 3.0, "system_prompt": "", "learning_rate": 1e-6, "prompt_format": "raw"},
        **{"dataset_prompt_column": "prompt", "dataset_answer_column": ""},
        **{"save_steps": 500, "save_total_limit": 0, "eval_steps": 0},
    },
    "verl": {**_OF_VERL, "num_train_epochs": 30, "dataset_answer_column": "reward_model.ground_truth"},
    "easyr1": {**_OF_VERL, "num_train_epochs": 15, "epsilon_high": 0.3},
    "simple_grpo": {"warmup_steps": 0},
}  # what a setting is there where a file does not name it, if it is something else here
TABLES = {"trl": _TRL, "verl": _VERL, "easyr1": _EASYR1, "simple_grpo": _SIMPLE_GRPO}


def translate(trainer: str, path: Path, known: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read another trainer's YAML, Python script or shell command. Return settings of `known` names, and what has no
    counterpart, with a hint or "". Raises ConfigError if the file cannot be read, or has nothing of that trainer."""
    table, parts, left = TABLES[trainer], {}, {}
    ours = known if trainer in ("trl", "simple_grpo") else ()
    try:
        for name, value in _given(path, table, {*table, *ours}):
            rule = table.get(name) or (name if name in ours else None)
            if rule is None and value is not False:
                left.setdefault(name, INSTEAD.get(name.rpartition(".")[2], ""))
            elif rule is not None and _is_unknown(path, value):
                left.setdefault(name, f"only the script knows {value}: write its value")
            elif rule is not None:
                found = {rule: value} if isinstance(rule, str) else rule(value)
                parts |= {key: value for key, value in found.items() if key not in parts}  # the first of several
        if trainer == "trl":
            left["per_device_train_batch_size"] = "prompts_per_step is of one process: multiply it by their number"
        if not parts:
            raise ConfigError(f"from='{path}': it has no setting of {trainer}: name another file")
        return _join(trainer, parts), left
    except OSError as error:
        raise ConfigError(f"from='{path}': {error.strerror}: name the file of {trainer}'s settings") from error
    except (SyntaxError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"from='{path}': it cannot be read ({one_line(error)}): correct it") from error


class _Expression(str):
    """A Python expression that is no constant."""


def _is_unknown(path: Path, value: Any) -> bool:
    """Tell whether a value is known to the script or shell alone, or to what reads the YAML file. In Python $ is a
    letter."""
    if path.suffix == ".py":
        return isinstance(value, _Expression)
    return isinstance(value, str) and ("${" if path.suffix in (".yaml", ".yml") else "$") in value


def _join(trainer: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Make settings of what other trainers say in several parts, and of their defaults."""
    settings = _DEFAULTS.get(trainer, {}) | {name: part for name, part in parts.items() if not name.startswith("_")}
    if int(settings.get("max_steps", 0)) > 0:  # which wins there
        settings.pop("num_train_epochs", None)
    elif "num_train_epochs" in settings:
        settings.pop("max_steps", None)
    passes = int(parts.get("_accumulation", 1))
    if trainer == "trl":
        parts.setdefault("_sequences", 8)
    if "_sequences" in parts:  # of a process
        group = int(settings.get("num_generations", 8))
        settings["prompts_per_step"] = max(1, int(parts["_sequences"]) * passes // group)
    if "_micro_batches" in parts:
        settings["max_steps"] = int(parts["_micro_batches"]) // passes
    if (updates := int(parts.get("_micro_steps", passes)) // passes) > 1:
        settings["steps_per_generation"] = updates
    if "_round" in parts:
        updates = int(parts["_round"]) // int(settings.setdefault("prompts_per_step", parts["_round"]))
        settings |= {"steps_per_generation": updates} if updates > 1 else {}
    if trainer == "verl" and parts.get("_kl_in_loss"):
        settings["beta"] = float(parts.get("_kl_loss_coef", 0.001))
    elif trainer == "verl":
        settings["beta"] = float(parts.get("_kl_coef", 0.001)) if settings.get("kl_in_reward") else 0.0
    elif trainer == "easyr1":
        settings["beta"] = 0.0 if parts.get("_no_kl") else float(parts.get("_kl_coef", 0.001))
    if not settings.get("beta", 1.0):  # they would have no effect, and are refused
        settings.pop("kl_estimator", None)
        settings.pop("kl_in_reward", None)
    if trainer == "trl" and settings["beta"]:
        settings.setdefault("use_bias_correction_kl", True)  # its default, which has no effect without a KL
    if settings.get("use_peft"):
        settings.setdefault("lora_alpha", parts.get("_lora_alpha", 32 if trainer == "trl" else 16))
    if parts.get("_freeze"):
        settings["freeze_vision_tower"] = True
    return settings


def _given(path: Path, wanted: Collection[str], known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings in a file: the leaves of YAML, and mappings of known names, the constants of Python, the
    `a.b=c` of a shell command."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python_constants(ast.parse(text), wanted)
    elif path.suffix in (".yaml", ".yml"):
        yield from _leaves("", load_yaml(text) or {}, known)
    else:
        for name, word in re.findall(r"(?<!\S)['\"]?\+*([A-Za-z_]\w*(?:\.\w+)+)=('[^']*'|\"[^\"]*\"|\S+)", text):
            value = os.path.expandvars(word.strip("'\""))
            if (value := value if "$" in value else load_yaml(value)) is not None:
                yield name, value


def _leaves(prefix: str, tree: dict[str, Any], known: Collection[str]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in known:
            yield from _leaves(f"{prefix}{name}.", value, known)
        elif value is not None:
            yield f"{prefix}{name}", value


def _python_constants(tree: ast.Module, wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield constants of the module and keywords of the trainer's classes; of other calls and dictionaries only the
    wanted names."""
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for name, value in constants.items():
        yield from _constant(name, value, constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_config = call in ("GRPOConfig", "GRPOTrainer", "LoraConfig")
            for each in node.keywords:
                if each.arg and (is_config or each.arg in wanted):
                    yield from _constant(each.arg, each.value, constants, is_config)
            if call == "LoraConfig":
                yield "r", 8  # unless the keyword came before
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (name := getattr(key, "value", None)) in wanted:
                    yield from _constant(name, value, constants)


def _constant(
    name: str, value: ast.expr, constants: dict[str, ast.expr], or_expression: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield a setting, if it is a constant of the script, or else if wanted as an expression."""
    try:
        constant = ast.literal_eval(constants.get(getattr(value, "id", ""), value))
    except ValueError:
        if or_expression:
            yield name, _Expression(ast.unparse(value))
        return
    if constant is not None and (or_expression or not isinstance(constant, dict)):
        yield name, list(constant) if isinstance(constant, tuple) else constant
