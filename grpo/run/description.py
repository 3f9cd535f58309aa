"""Describes a run by data, settings and versions, and compares a checkpoint with the run that resumes it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import MISSING, asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.wire.health import fingerprint
from grpo.wire.picture_files import EncodedPicture, key_of, pictures_of

LIBRARIES = "torch", "transformers", "deepspeed"

# The settings that may differ when a run resumes. They change no number, or (the second line) only its rounding.
FREE = {
    *("model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "dry_run"),
    *("micro_batch_tokens", "gradient_checkpointing", "sequences_per_generate"),
    *("sampler", "pool", "pool_deadline", "replay"),
    *("save_steps", "save_total_limit", "report_to", "merge_on_save", "save_system_prompt", "deepspeed"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
    *("eval_steps", "eval_samples", "num_generations_eval", "metric_for_best_model"),
    *("ref_servers", "host", "port", "token_file", "ref_ca_file", "allow_other_reference"),
    *("ref_startup_timeout", "ref_request_timeout", "ref_deadline", "reward_timeout", "tool_timeout"),
}

# The settings that may name a Python file of the user's, as path/to/file.py:function.
USER_FILES = {"reward_funcs", "tools", "environment", "loss_type", "advantage_estimator"}


class RunDescription:
    """The description of a run that every rank has before a model is loaded."""

    def __init__(self, config: TrainerConfig, examples: list[Example], ranks: int):
        self._config = config
        # Two prompts of one text may have different pictures.
        prompts = [key_of(row.prompt_ids).hex() if pictures_of(row.prompt_ids) else row.prompt for row in examples]
        in_few_bits = config.quantization != "none" or config.optim == "adamw_8bit"
        self.fields: dict[str, Any] = {
            "ranks": ranks,
            "prompts": [len(prompts), fingerprint(prompts)],
            # The arguments of rewards and environments, with the gold answers.
            "columns": {name: _sum_of_column(examples, name) for name in (examples[0].columns if examples else ())},
            "settings": {name: value for name, value in asdict(config).items() if name not in FREE},
            "directory": os.getcwd(),
            "versions": {name: version(name) for name in (*LIBRARIES, *(["bitsandbytes"] if in_few_bits else []))},
        }
        """the part that a checkpoint keeps, for JSON"""

    def identity(self, model: str) -> str:
        """Return 16 hex digits of model, prompts and settings: equal for every start of a run, different between runs
        with different completions. `model` is the fingerprint of the initial policy. Columns are left out: others give
        the policy other bits, and the rollouts of a version with other bits are not used."""
        # A default is left out, so that a setting that is added later changes no run's.
        defaults = self._defaults()
        settings = {name: value for name, value in self.fields["settings"].items() if value != defaults[name]}
        if self._longer_changes_nothing():
            settings.pop("max_steps", None)
        return fingerprint(model, self.fields["prompts"], settings)

    def check(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """Raise ConfigError if the checkpoint, whose progress.json is `saved`, has other data or settings."""
        # Settings first: some change the prompts. A setting that is newer than the checkpoint had its default.
        before = self._defaults() | saved["settings"]
        directory = saved.get("directory", self.fields["directory"])  # an older checkpoint does not have it
        for name in sorted(saved["settings"].keys() | self.fields["settings"].keys()):
            if name == "max_steps" and self._longer_changes_nothing():
                continue
            now = self.fields["settings"].get(name)
            if name in USER_FILES and _absolute(before[name], directory) == _absolute(now, self.fields["directory"]):
                continue
            check_same(checkpoint, name, before[name], now, "leave it as it was")
        remedy = "set dataset_name to the same data, or begin a new run"
        check_same(checkpoint, "the prompts' count and sum", saved["prompts"], self.fields["prompts"], remedy)
        columns_now = self.fields["columns"]
        columns = saved.get("columns", columns_now)  # an older checkpoint has none
        for name in sorted(columns.keys() | columns_now.keys()):
            check_same(checkpoint, f"the sum of the column {name!r}", columns.get(name), columns_now.get(name), remedy)
        if saved["ranks"] != self.fields["ranks"] and self._config.optim == "adamw_8bit":
            raise ConfigError(
                f"resume_from_checkpoint='{checkpoint}': it is of {saved['ranks']} ranks, and AdamW's moments in 8 "
                f"bits cannot be rearranged for {self.fields['ranks']}: start it with {saved['ranks']}"
            )

    def _longer_changes_nothing(self) -> bool:
        """Tell whether the steps are the same with another max_steps: the learning rate does not depend on it."""
        return self._config.lr_scheduler_type.startswith("constant")

    def _defaults(self) -> dict[str, Any]:
        """Return each setting's default; of a list [], as only lists with that default are newer than a checkpoint."""
        return {field.name: [] if field.default is MISSING else field.default for field in fields(self._config)}


def check_same(checkpoint: Path, what: str, before: Any, now: Any, remedy: str) -> None:
    """Raise ConfigError if the checkpoint's value and the run's differ."""
    if before != now:
        raise ConfigError(
            f"resume_from_checkpoint='{checkpoint}': {what} is {before!r} there and {now!r} here: {remedy}"
        )


def _absolute(names: str | list[str] | None, directory: str) -> str | list[str] | None:
    if isinstance(names, list):
        return [_absolute(name, directory) for name in names]
    return os.path.realpath(os.path.join(directory, names)) if names and ".py:" in names else names


def _sum_of_column(examples: list[Example], name: str) -> str:
    """Return a fingerprint of a column's values that is the same in every process."""
    values = [example.columns.get(name) for example in examples]
    return fingerprint(json.dumps(values, sort_keys=True, default=_as_text).encode())


def _as_text(value: Any) -> str:
    if isinstance(value, EncodedPicture):
        value = value.file
    if hasattr(value, "tobytes"):  # an array of numpy, or a PIL image
        value = value.tobytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # an address differs between processes
