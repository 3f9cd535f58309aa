"""The configuration of `grpo_ref_split.py`, and the checks that relate its sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo.config.connection import ReferenceConfig
from grpo.config.errors import rank_count, require
from grpo.config.generation import PolicyConfig, RolloutSection
from grpo.config.loss import LossSection
from grpo.config.pool import PoolSection
from grpo.config.records import RecordSection
from grpo.config.rewards import RewardedConfig
from grpo.config.training import TrainingSection

_BATCH = "use prompts_per_step and micro_batch_tokens"
_DRAWN = "leave it out: the loss scores the full distribution, so that is drawn from"


@dataclass
class TrainerConfig(
    RecordSection,
    ReferenceConfig,
    PolicyConfig,
    TrainingSection,
    LossSection,
    RolloutSection,
    PoolSection,
    RewardedConfig,
):
    """Every setting of `grpo_ref_split.py`."""

    SHORT: ClassVar = {"model": "model_name_or_path", "dataset": "dataset_name"}
    UNCOMMON: ClassVar = {"dataset_test_split", "num_generations_eval", "temperature", "port", "token_file"}
    """settings that most people touch in other programs, and the short `--help` of this one leaves out"""
    INSTEAD: ClassVar = {
        "bf16": "use dtype",
        "fp16": "use dtype",
        "per_device_train_batch_size": _BATCH,
        "gradient_accumulation_steps": _BATCH,
        "generation_batch_size": "use prompts_per_step and steps_per_generation",
        "per_device_eval_batch_size": "use sequences_per_generate",
        "num_train_epochs": "use max_steps",
        "max_new_tokens": "use max_completion_length",
        "top_p": _DRAWN,
        "top_k": _DRAWN,
        "min_p": _DRAWN,
        "repetition_penalty": _DRAWN,
        "use_vllm": "use sampler pool, and draw with python generate.py --engine vllm",
        "load_in_4bit": "use quantization",
        "load_in_8bit": "use quantization",
        "sync_ref_model": "use ref_update_steps",
        "run_name": "use output_dir, whose last part names the run",
        "logging_steps": "leave it out: every step is recorded",
        "log_completions": "leave it out: completions.jsonl has some of every step",
        "hub_token": "set the environment variable HF_TOKEN",
        "estimate": "use dry_run, or python ref_server.py --estimate",
    }
    """what to do for settings of TRL's, and of the reference server, that are none here"""

    def __post_init__(self) -> None:
        recorded = self.recorded_settings()
        if self.importance_sampling_mode is None:
            default = "token_truncate" if self.sampler == "pool" else "none"
            self.importance_sampling_mode = recorded.get("importance_sampling_mode", default)
        super().__post_init__()
        self.fill_in_unset(recorded, rank_count(), self.use_peft)
        self.check_ranks(rank_count())
        require(
            self.temperature > 0,
            "temperature",
            self.temperature,
            "training needs sampling: use a number above 0, such as 1.0",
        )
        require(
            self.system_prompt != "" or not self.save_system_prompt,
            "save_system_prompt",
            self.save_system_prompt,
            "system_prompt is empty: leave this out",
        )
        require(
            self.ref == "server" or self.use_peft,
            "ref",
            self.ref,
            "there is no adapter without use_peft: add it, or leave this out",
        )
        self._check_estimator_rounds()
        self._check_reference_updates()
        require(
            self.port != 0 or self.beta == 0 or self.ref == "adapter_off",
            "port",
            self.port,
            "the trainer cannot know which port the server was given: name it",
        )

    def version_of_round(self, number: int) -> int:
        """Return the updates that the policy has had that draws round `number`, both from 0."""
        return max(0, number - self.max_policy_lag) * self.updates_per_round

    def _check_estimator_rounds(self) -> None:
        estimator = self.advantage_estimator
        needs_group = estimator not in ("reinforce++", "remax") and ":" not in estimator
        require(
            self.num_generations > 1 or not needs_group,
            "num_generations",
            self.num_generations,
            f"advantage_estimator {estimator} compares the completions of a prompt with each other: use 2 or more, or "
            "reinforce++ or remax, which need no group",
        )
        require(
            self.groups_have_signal or self.max_resample == 0,
            "max_resample",
            self.max_resample,
            f"with advantage_estimator {estimator} equal rewards of a group may teach something, so none is replaced: "
            "use 0",
        )
        require(
            estimator != "remax" or self.sampler != "pool",
            "advantage_estimator",
            estimator,
            "workers of a pool draw no greedy completion to compare with: use sampler continuous or generate, or rloo",
        )

    def _check_reference_updates(self) -> None:
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
            self.ref_update_steps == 0 or self.quantization == "none",
            "ref_update_steps",
            self.ref_update_steps,
            "weights in 4 bits cannot be replaced on a server: use 0, or quantization none",
        )
