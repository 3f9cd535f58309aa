"""Settings of the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo.config.errors import require
from grpo.config.fields import Section, option

_RATE = 1e-6  # TRL's
_LORA_RATE = 1e-5  # LoRA wants ten times as much, or more (Schulman et al. 2025, "LoRA Without Regret")
_PROMPTS = 48  # 1, 2, 3, 4, 6 and 8 ranks share them equally


@dataclass
class TrainingSection(Section):
    """The settings of the policy's updates."""

    HEADING = "training"

    max_steps: int = option(500, "number of optimizer updates", above=0, common=True)
    prompts_per_step: int | None = option(
        None,
        "prompts per update over all ranks, each with num_generations completions; unset is the multiple of the ranks "
        "that is nearest to 48, and in a run that is continued the number that it had",
        common=True,
        above=0,
    )
    steps_per_generation: int = option(
        1, "updates that one round of generation feeds, each with prompts of its own", above=0
    )
    num_iterations: int = option(1, "times that each round's completions are trained on", above=0)
    micro_batch_tokens: int = option(
        16384,
        "tokens in one forward and backward pass, a shared prompt counted once: lower it if memory runs out",
        above=0,
        common=True,
    )
    learning_rate: float | None = option(
        None,
        "AdamW's peak learning rate; unset is 1e-6, or 1e-5 with use_peft, and in a run that is continued the one that "
        "it had",
        common=True,
        above=0,
    )
    lr_scheduler_type: Literal["constant_with_warmup", "linear", "cosine"] = option(
        "constant_with_warmup", "course of the learning rate after its linear warm-up"
    )
    warmup_steps: int = option(10, "updates over which the learning rate rises linearly from 0", at_least=0)
    optim: Literal["adamw_torch", "adamw_8bit"] = option(
        "adamw_torch",
        "optimizer; adamw_8bit keeps AdamW's moments in 8 bits, by bitsandbytes, in a quarter of the memory",
    )
    adam_beta1: float = option(0.9, "decay of AdamW's mean of the gradients", at_least=0, below=1)
    adam_beta2: float = option(0.99, "decay of AdamW's mean of the squared gradients", at_least=0, below=1)
    weight_decay: float = option(0.0, "AdamW's weight decay, of all weights but biases and those of norms", at_least=0)
    max_grad_norm: float = option(
        1.0, "larger gradients are scaled down to this norm; 0 switches clipping off", at_least=0
    )
    gradient_checkpointing: bool = option(
        True,
        "recompute activations in the backward pass: less memory, more time",
        off="keep activations for the backward pass: more memory, less time",
    )
    deepspeed: str = option(
        "ds_config.json", "JSON file with DeepSpeed's own settings; the trainer fills in what says auto there"
    )

    def fill_in_unset(self, recorded: Mapping[str, Any], world_size: int, is_lora: bool) -> None:
        """Give unset settings the value that the run to continue had, or their default."""
        if self.prompts_per_step is None:
            nearest = max(1, round(_PROMPTS / world_size)) * world_size
            self.prompts_per_step = recorded.get("prompts_per_step", nearest)
        if self.learning_rate is None:
            self.learning_rate = float(recorded.get("learning_rate", _LORA_RATE if is_lora else _RATE))

    @property
    def updates_per_round(self) -> int:
        """Return the number of updates that one round of generation feeds."""
        return self.steps_per_generation * self.num_iterations

    def steps_of_round(self, number: int) -> range:
        """Return the steps (from 0) that train on what round `number` (from 0) draws, for the first time."""
        first = number * self.steps_per_generation
        return range(first, first + self.steps_per_generation)

    def check_ranks(self, world_size: int) -> None:
        """Refuse a global batch that cannot be shared equally. Raises ConfigError."""
        if self.prompts_per_step is None:
            return  # it will fit
        rest = self.prompts_per_step % world_size
        lower, upper = self.prompts_per_step - rest, self.prompts_per_step - rest + world_size
        require(
            rest == 0,
            "prompts_per_step",
            self.prompts_per_step,
            f"{world_size} ranks cannot share it equally: use {f'{lower} or ' if lower else ''}{upper}, or another "
            "number of ranks",
        )
