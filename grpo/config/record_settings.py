"""Settings of a run's folder: what is saved and evaluated, and how often."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo.config.command_line import load_yaml
from grpo.config.errors import require
from grpo.config.fields import Section, option
from grpo.config.user_code import check_file

TRACKERS = ("tensorboard", "wandb", "trackio", "swanlab", "mlflow", "none")


@dataclass
class RecordSection(Section):
    HEADING = "evaluation and records"

    eval_steps: int = option(
        50, "updates between evaluations, beside first and last; 0: none", at_least=-1, common=True
    )
    log_eval_completions: int = option(32, "greedy answers of an evaluation in completions.jsonl", at_least=-1)
    eval_samples: int = option(256, "problems to ask, the first of the test split; 0 is all", at_least=-1)
    metric_for_best_model: str | None = option(
        None,
        "metric of the best checkpoint, the higher the better: accuracy, reward, rewards/NAME/mean and others; unset "
        "is accuracy, or reward without a verdict",
        needs="eval_steps above 0",
    )
    load_best_model_at_end: bool = option(
        False, "save the best checkpoint's model as the run's, if it beats the last step's", needs="eval_steps above 0"
    )
    save_steps: int = option(100, "updates between checkpoints; 0 is never", at_least=-1, common=True)
    save_total_limit: int = option(2, "newest checkpoints to keep, beside the best; 0 keeps all", at_least=-1)
    save_system_prompt: bool = option(False, "save system_prompt in the chat template too, for programs such as vLLM")
    push_to_hub: bool = option(False, "push the final model to the hub, with the token of 'hf auth login' or HF_TOKEN")
    hub_strategy: Literal["end", "every_save"] = option(
        "end", "every_save pushes the model of each checkpoint too", needs="push_to_hub"
    )
    hub_model_id: str | None = option(None, "repository to push to; unset: the run's name", needs="push_to_hub")
    hub_private_repo: bool = option(False, "make it private; unset: the owner's settings", needs="push_to_hub")
    resume_from_checkpoint: str | None = option(None, "folder checkpoint-STEP, or last, to continue from", common=True)
    output_dir: str | None = option(None, "folder of the run, made if missing; unset is runs/DATE-TIME", common=True)
    report_to: list[str] = option(["tensorboard"], f"where metrics go too: {', '.join(TRACKERS)}")
    callback: str | None = option(
        None, "function that is called after each step: path/to/file.py:function (docs/runs.md)"
    )
    dry_run: bool = option(False, "check all, print a step's shape and memory, load no weights, and end", common=True)

    def __post_init__(self) -> None:
        for field in fields(RecordSection):
            if getattr(self, field.name) == -1:  # other trainers' word for never, or for all
                setattr(self, field.name, 0)
        super().__post_init__()
        has_run = self.resume_from_checkpoint != "last" or self.output_dir is not None
        self.check(has_run, resume_from_checkpoint="of which run? set output_dir to its folder")
        has_checkpoints = self.save_steps > 0 or not self.load_best_model_at_end
        self.check(has_checkpoints, load_best_model_at_end="no checkpoint is saved: set save_steps above 0")
        for name in self.report_to:
            require(name in TRACKERS, "report_to", name, f"use {', '.join(TRACKERS)}")
        if self.callback is not None:
            check_file("callback", self.callback)


def settings_in(run: Path) -> dict[str, Any]:
    """Return the settings in the config.yaml of a run's folder; none if it is not there, or damaged."""
    try:
        settings = load_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}
