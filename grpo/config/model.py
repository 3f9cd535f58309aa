"""Settings of the model and its adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.config.fields import Section, option


@dataclass
class SharedConfig(Section):
    """The settings of the model, for every program."""

    HEADING = "model"

    model_name_or_path: str = option(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "hub id or local folder, of a model or a LoRA adapter: the trainer's first weights, the server's frozen ones, "
        "those to evaluate or talk to",
        common=True,
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the weights")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "type of the weights and of the forward pass; auto is bfloat16 on a GPU from Ampere on, else float32"
    )
    min_pixels: int | None = option(
        None, "smaller pictures are enlarged to so many pixels; unset is the model's own setting", above=0
    )
    max_pixels: int | None = option(
        None, "larger pictures are made smaller, to so many pixels; unset is the model's own setting", above=0
    )
    quantization: Literal["none", "8bit", "4bit"] = option(
        "none",
        "keep all linear layers but the head in 8 or 4 bits, by bitsandbytes: less memory, and a slightly different "
        "model. The trainer takes 4bit alone, under an adapter (QLoRA)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_name_or_path.startswith("~"):
            self.model_name_or_path = str(Path(self.model_name_or_path).expanduser())


@dataclass
class VisionSection(Section):
    """The settings of a vision-language model's training."""

    HEADING = "vision tower"

    freeze_vision_tower: bool = option(
        False,
        "train the language model alone: the vision tower and what projects its output (Qwen's merger) stay as they "
        "are, and an adapter has no layers in them",
        off="train the vision tower too",
    )


@dataclass
class AdapterSection(Section):
    """The settings of a LoRA adapter."""

    HEADING = "LoRA (needs peft)"

    use_peft: bool = option(
        False,
        "train a LoRA adapter, not the whole model: a new one, or the one that model_name_or_path names",
        common=True,
    )
    lora_r: int = option(
        16, "rank of a new adapter; one that model_name_or_path names keeps its own settings", needs="use_peft", above=0
    )
    lora_alpha: int = option(
        32, "the product of the adapter's two matrices is scaled by lora_alpha / lora_r", needs="use_peft", above=0
    )
    lora_target_modules: list[str] | None = option(
        None,
        "names of the layers that get an adapter, or all-linear; unset is peft's choice for this kind of model, and "
        "all-linear where it has none, as for models with a vision tower",
        needs="use_peft",
    )
    use_rslora: bool = option(
        False, "scale that product by lora_alpha / sqrt(lora_r) instead (rsLoRA)", needs="use_peft"
    )
    use_dora: bool = option(
        False, "DoRA: train a magnitude for each output of a layer beside LoRA's direction", needs="use_peft"
    )
    merge_on_save: bool = option(
        False, "save whole models, the adapter merged into the base, instead of adapters", needs="use_peft"
    )
