"""The configuration of `python -m grpo.evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from grpo.config.connection import ClientConfig
from grpo.config.errors import require
from grpo.config.fields import Section, option
from grpo.config.generation import LOCAL_SAMPLERS
from grpo.config.rewards import RewardedConfig


@dataclass
class EvaluateSection(Section):
    """The settings of grpo.evaluate alone."""

    HEADING = "extent and output"

    sampler: Literal["continuous", "generate", "pool"] = option(
        "continuous", f"{LOCAL_SAMPLERS}; pool, in a file of the trainer's, is continuous: no worker is asked here"
    )
    eval_samples: int = option(0, "how many problems to ask, the first of the split; 0 is all", at_least=0, common=True)
    output: str | None = option(
        None,
        "folder to make: every completion with its verdict, the metrics, and the settings they come from",
        common=True,
    )
    micro_batch_tokens: int = option(
        16384, "tokens that a reward model in this process scores at once: lower it if memory runs out", above=0
    )


@dataclass
class EvaluateConfig(EvaluateSection, ClientConfig, RewardedConfig):
    """Every setting of `python -m grpo.evaluate`."""

    SHORT: ClassVar = {"model": "model_name_or_path", "dataset": "dataset_name", "split": "dataset_test_split"}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, "temperature", self.temperature, "use a number above 0")
