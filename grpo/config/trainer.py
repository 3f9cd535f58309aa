"""Every setting of `grpo_ref_split.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo.config.connection import ReferenceConfig
from grpo.config.errors import require
from grpo.config.fields import require_finite
from grpo.config.generation import AnsweringConfig, PolicyConfig, RolloutSection
from grpo.config.loss import LossSection
from grpo.config.records import RecordSection
from grpo.config.rewards import RewardSection
from grpo.config.training import TrainingSection


@dataclass
class TrainerConfig(
    RecordSection,
    ReferenceConfig,
    PolicyConfig,
    TrainingSection,
    LossSection,
    RewardSection,
    RolloutSection,
    AnsweringConfig,
):
    """All that `grpo_ref_split.py` reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights is None:
            self.reward_weights = [1.0] * len(self.reward_funcs)
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
