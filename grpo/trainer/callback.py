"""Calls the user's `callback` after each step. It may log, and ask to save or to stop:

def callback(step, metrics, completions, **kwargs):
    if metrics.get("eval_accuracy", 0) > 0.9:
        return "stop"

`metrics` is the step's row of metrics.jsonl, `completions` a list of all that the step trained on, of all ranks, with
the fields of completions.jsonl. It is called on rank 0 alone. "save" saves a checkpoint, "stop" ends the run after this
step as if it were the last; None asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from grpo.config.errors import RewardError
from grpo.config.user_code import user_code
from grpo.data.records import StepBatch
from grpo.rewards.functions import format_user_stack
from grpo.run.collective import from_first, gather
from grpo.trainer.rewarding import fail_together
from grpo.trainer.setup import Run
from grpo.trainer.step_result import StepResult

ASKED = "save", "stop", None


def call_back(run: Run, step: int, batch: StepBatch, result: StepResult) -> str | None:
    """Return what the callback asks for, on every rank; None without one. All ranks call it together. Raises
    RewardsLost if it raises, or returns something else."""
    callback = run.inputs.callback
    if callback is None:
        return None
    completions = list(chain.from_iterable(gather(batch.to_lines(run.rewarder.names))))
    asked = None
    with fail_together():
        if run.recorder is not None:
            asked = _call(callback, step, result.metrics, completions)
    return from_first(asked)


def _call(callback: Callable, step: int, metrics: dict, completions: list[dict]) -> str | None:
    try:
        with user_code("callback", step):
            asked = callback(step=step, metrics=dict(metrics), completions=completions)
    except Exception as error:  # the user's code may raise anything
        message = f"callback raised {type(error).__name__} after step {step}: {error}"
        raise RewardError(message, format_user_stack(error)) from error
    if asked not in ASKED:
        raise RewardError(f"callback returned {asked!r} after step {step}: return 'save', 'stop' or None")
    return asked
