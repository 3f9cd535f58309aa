"""A worker's tools and environment. Their code is chosen at the worker's start; it must agree with the run.

For a run without them, neither the user's code nor a heavy library is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.config.errors import ConfigError
from grpo.config.programs import WorkerConfig, WorkerTurnsConfig
from grpo.config.sampling_settings import SharedConfig
from grpo.pool.protocol import RunInfo, Task
from grpo.wire.tool_outcomes import SETTINGS, RunTools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo.data.records import Example
    from grpo.tools.dialogue import UserResponder


class WorkerTools:
    """Answers the policy on this worker: a responder (grpo/data/responder.py) for the tasks of a pool."""

    def __init__(self, turns: UserResponder, tokenizer: PreTrainedTokenizerBase):
        self._turns, self._tokenizer, self.begin = turns, tokenizer, turns.begin

    def make_example(self, task: Task) -> Example:
        from grpo.data.records import Example

        prompt = self._tokenizer.decode([*task.prompt_ids], skip_special_tokens=False)
        return Example(task.group, prompt, task.prompt_ids, json.loads(task.columns or "{}"))

    def close(self) -> None:
        self._turns.close()


def check_given(config: WorkerConfig, run: RunInfo) -> None:
    """Raise ConfigError if only the worker or only the run has tools or an environment."""
    wanted = None if run.turns is None else run.turns.environment
    if (config.environment and config.environment.rpartition(":")[2]) != wanted:
        remedy = "leave it out" if wanted is None else f"name its file, path/to/file.py:{wanted}, as the trainer does"
        raise ConfigError(f"environment={config.environment!r}: that of run {run.name} is {wanted}: {remedy}")
    names = run.turns.tools if run.turns else []
    if wanted is None and bool(config.tools) != bool(names):
        has = f"run {run.name} has {', '.join(names) or 'none'}"
        raise ConfigError(f"tools={config.tools!r}: {has}: name the files of its tools, as the trainer does")


def open_turns(config: WorkerConfig, run: RunInfo, folder: Path) -> WorkerTools | None:
    """Start the worker's tools and environment with the run's settings; None for a run without. `folder` has the run's
    tokenizer. Raises ConfigError if they cannot be used, or differ from the run's."""
    if run.turns is None:
        return None
    from grpo.model.load import load_tokenizer
    from grpo.tools.dialogue import start_turns

    settings = {name: getattr(run.turns, name) for name in SETTINGS}
    ours = {name: getattr(config, name) for name in ("tools", "environment", "tool_timeout")}
    tokenizer = load_tokenizer(SharedConfig(model_name_or_path=str(folder), trust_remote_code=config.trust_remote_code))
    turns = start_turns(WorkerTurnsConfig(**ours, **settings), tokenizer, run.eos_token_ids)
    check_found(config, run, RunTools.of(turns.tools, config.environment, [*turns.rewards], **settings))
    return WorkerTools(turns, tokenizer)


def check_found(config: WorkerConfig, run: RunInfo, found: RunTools) -> None:
    """Raise ConfigError if a worker's tools and environment differ from the run's."""
    ours, runs = ((tools.tools, tools.schemas, tools.rewards) for tools in (found, run.turns))
    if ours != runs:
        field = "tools" if config.tools else "environment"
        kinds = "functions, SHA-256 of their schemas (type hints and docstrings) and rewards"
        difference = f"{kinds} are {ours}, and in run {run.name} {runs}"
        raise ConfigError(f"{field}={getattr(config, field)!r}: {difference}: take the files that the trainer has")
