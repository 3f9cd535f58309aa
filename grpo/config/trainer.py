"""Every setting of `grpo_ref_split.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from grpo.config.connection import ConnectionSection, ReferenceSection
from grpo.config.errors import require
from grpo.config.fields import option, require_finite
from grpo.config.generation import AnsweringConfig
from grpo.config.loss import LossSection
from grpo.config.model import AdapterSection


@dataclass
class RolloutSection:
    _argument_group_name = "rollouts and rewards"

    num_generations: int = option(8, "completions per prompt, the group whose rewards are compared")
    max_resample: int = option(
        0, "times that prompts whose groups are without signal are replaced by others before an update (DAPO); 0: never"
    )
    reward_funcs: list[str] = option(
        ["correctness_reward", "format_reward"],
        "functions of reward.py, path/to/file.py:function, reward models (org/model on the hub, ./folder), or URLs of "
        "servers with --task reward",
    )
    reward_weights: Optional[list[float]] = option(None, "one weight a reward function; unset weighs each 1")
    soft_punish_cache: int = option(
        0, "tokens before max_completion_length over which a reward falls from 0 to -1 (DAPO's overlong punishment)"
    )
    reward_timeout: Optional[float] = option(
        None,
        "seconds a reward function may take for a completion: it is called in other processes, on one completion at a "
        "time, and killed if it hangs; unset calls it in the trainer",
    )
    reward_fallback: float = option(0.0, "reward of a completion on which a function hangs or ends its process")


@dataclass
class TrainingSection:
    _argument_group_name = "training"

    max_steps: int = option(500, "optimizer updates")
    prompts_per_step: int = option(56, "prompts per update over all ranks; times num_generations completions")
    steps_per_generation: int = option(1, "updates that one round of generation feeds, each with prompts of its own")
    num_iterations: int = option(1, "times that each round's completions are trained on")
    micro_batch_tokens: int = option(
        16384, "tokens in one forward and backward, a shared prompt counted once: lower it if memory runs out"
    )
    learning_rate: float = option(1e-6, "AdamW's peak learning rate")
    lr_scheduler_type: Literal["constant_with_warmup", "linear", "cosine"] = option(
        "constant_with_warmup", "what follows the linear warm-up"
    )
    warmup_steps: int = option(10, "updates over which the learning rate rises linearly from 0")
    optim: Literal["adamw_torch", "adamw_8bit"] = option(
        "adamw_torch", "AdamW; with adamw_8bit its moments are in 8 bits, by bitsandbytes: a quarter of their memory"
    )
    adam_beta1: float = option(0.9, "AdamW")
    adam_beta2: float = option(0.99, "AdamW")
    adam_epsilon: float = option(1e-8, "AdamW")
    weight_decay: float = option(0.0, "AdamW's, of all but biases and the weights of norms")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0 switches clipping off")
    max_bad_steps: int = option(
        5,
        "the run ends after so many steps in a row that teach nothing: loss or gradient not finite (the step is "
        "skipped), every reward None, or every completion masked",
    )
    gradient_checkpointing: bool = option(True, "recompute activations in the backward pass: less memory, more time")
    deepspeed: str = option("ds_config.json", "DeepSpeed's engine knobs; 'auto' there is filled from these fields")


@dataclass
class RecordSection:
    _argument_group_name = "evaluation and records"

    eval_steps: int = option(50, "evaluate every so many updates, and before the first and after the last; 0 is never")
    eval_samples: int = option(256, "held-out problems, the first of the test split; 0 is all")
    save_steps: int = option(100, "save a checkpoint every so many updates, to use or continue from; 0 is never")
    save_total_limit: int = option(2, "newest checkpoints to keep, beside the best by evaluation; 0 keeps all")
    resume_from_checkpoint: Optional[str] = option(
        None, "continue from this folder checkpoint-STEP, or with 'last' from the newest in output_dir, if there is any"
    )
    output_dir: Optional[str] = option(None, "folder of the run, made if missing; unset is runs/DATE-TIME")
    report_to: list[str] = option(
        ["tensorboard"], "any of tensorboard, wandb, or none; tensorboard is skipped where it is not installed"
    )
    dry_run: bool = option(
        False, "check every setting, print a step's shape and the memory that it needs, load no weights, and end"
    )


@dataclass
class TrainerConfig(
    RecordSection,
    ReferenceSection,
    AdapterSection,
    ConnectionSection,
    TrainingSection,
    LossSection,
    RolloutSection,
    AnsweringConfig,
):
    """All that `grpo_ref_split.py` reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights is None:
            self.reward_weights = [1.0] * len(self.reward_funcs)
        if self.ref_servers is None:
            self.ref_servers = [f"http://127.0.0.1:{self.port}"]
        self.ref_servers = [url.rstrip("/") for url in self.ref_servers]
        self._check()

    def _check(self) -> None:
        require_finite(self)
        self._read_template_kwargs()
        self._check_samples()
        require(
            self.num_generations >= 2,
            "num_generations",
            self.num_generations,
            "a group of one has no relative advantage: use 2 or more",
        )
        require(
            self.temperature > 0,
            "temperature",
            self.temperature,
            "training needs sampling: use a number above 0, such as 1.0",
        )
        for name in (
            "max_prompt_length",
            "max_completion_length",
            "sequences_per_generate",
            "prompts_per_step",
            "steps_per_generation",
            "num_iterations",
            "micro_batch_tokens",
            "max_steps",
            "max_bad_steps",
            "learning_rate",
            "adam_epsilon",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "vespo_lambda_pos",
            "vespo_lambda_neg",
            "kl_target",
            "kl_horizon",
            "reward_timeout",
            "importance_sampling_clip_max",
            "off_policy_mask_threshold",
            "lora_r",
            "lora_alpha",
            "ref_request_timeout",
            "ref_deadline",
        ):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "use a number above 0")
        for name in (
            "beta",
            "epsilon",
            "epsilon_high",
            "reward_tolerance",
            "entropy_coef",
            "entropy_coef_min",
            "entropy_coef_max",
            "entropy_coef_delta",
            "entropy_target",
            "router_aux_loss_coef",
            "vespo_k_pos",
            "vespo_k_neg",
            "importance_sampling_clip_min",
            "max_resample",
            "soft_punish_cache",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "eval_steps",
            "eval_samples",
            "save_steps",
            "save_total_limit",
            "seed",
            "ref_startup_timeout",
            "ref_update_steps",
        ):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "use 0 or more")
        require(self.seed < 2**31, "seed", self.seed, "use a number below 2147483648")
        require(self.epsilon < 1, "epsilon", self.epsilon, "use a number below 1, such as 0.2")
        self._check_loss()
        require(
            self.soft_punish_cache <= self.max_completion_length,
            "soft_punish_cache",
            self.soft_punish_cache,
            f"use max_completion_length={self.max_completion_length} or less",
        )
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "use a number from 0 to below 1")
        require(
            len(self.reward_weights) == len(self.reward_funcs),
            "reward_weights",
            self.reward_weights,
            f"give {len(self.reward_funcs)} weights, one for each of {' '.join(self.reward_funcs)}",
        )
        for url in self.ref_servers:
            require(url.startswith(("http://", "https://")), "ref_servers", url, "write it as http://HOST:PORT")
        require(len(set(self.ref_servers)) == len(self.ref_servers), "ref_servers", self.ref_servers, "name each once")
        require(
            self.ref_ca_file is None or Path(self.ref_ca_file).is_file(),
            "ref_ca_file",
            self.ref_ca_file,
            "there is no such file: name the PEM file of the authority that signed the server's certificate",
        )
        require(
            self.ref_update_steps == 0 or (self.beta > 0 and self.ref == "server"),
            "ref_update_steps",
            self.ref_update_steps,
            "there is no reference server to update: use 0, or a beta above 0 and ref server",
        )
        updates = self.updates_per_round
        require(
            self.ref_update_steps % updates == 0,
            "ref_update_steps",
            self.ref_update_steps,
            f"a round of generation feeds {updates} updates, all with the same reference: use a multiple of {updates}",
        )
        require(
            0 < self.ref_mixup_alpha <= 1,
            "ref_mixup_alpha",
            self.ref_mixup_alpha,
            "use a number above 0, and 1 at most",
        )
        for name in self.report_to:
            require(name in ("tensorboard", "wandb", "none"), "report_to", name, "use tensorboard, wandb or none")
        self._check_adapter()
        require(
            self.port != 0 or self.beta == 0 or self.ref == "adapter_off",
            "port",
            self.port,
            "the trainer cannot know which port the server was given: name it",
        )

    def _check_adapter(self) -> None:
        require(
            self.quantization != "8bit",
            "quantization",
            self.quantization,
            "activations go in 8 bits too, so that a log-prob would depend on the rest of its batch: use 4bit",
        )
        require(
            self.quantization == "none" or self.use_peft,
            "quantization",
            self.quantization,
            "weights in 4 bits cannot be trained: add use_peft, which trains an adapter on them, or use none",
        )
        require(
            self.quantization == "none" or self.ref_update_steps == 0,
            "ref_update_steps",
            self.ref_update_steps,
            "weights in 4 bits cannot be replaced on a server: use 0, or quantization none",
        )
        for name, idle in (
            ("ref", "server"),
            ("merge_on_save", False),
            ("use_rslora", False),
            ("use_dora", False),
            ("lora_target_modules", None),
        ):
            value = getattr(self, name)
            require(
                self.use_peft or value == idle,
                name,
                value,
                "there is no adapter without use_peft: add it, or leave this out",
            )
        require(
            self.lora_dropout == 0,
            "lora_dropout",
            self.lora_dropout,
            "log-probs would be those of another distribution than was sampled from: use 0, or leave it out",
        )

    @property
    def updates_per_round(self) -> int:
        """That one round of generation feeds."""
        return self.steps_per_generation * self.num_iterations

    def check_ranks(self, world_size: int) -> None:
        """Refuse a global batch that cannot be shared equally. Raises ConfigError."""
        rest = self.prompts_per_step % world_size
        lower, upper = self.prompts_per_step - rest, self.prompts_per_step - rest + world_size
        require(
            rest == 0,
            "prompts_per_step",
            self.prompts_per_step,
            f"{world_size} ranks cannot share it equally: use {f'{lower} or ' if lower else ''}{upper}",
        )
