"""Gives reward functions what they judge, as TRL does: prompts, completions, token ids and the dataset's columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from grpo.rewards.compute import compute_rewards
from grpo.rewards.functions import Logged, TrainerState
from grpo.rollouts.records import Example, Rollout


def score_rollouts(
    functions: dict[str, Callable],
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    state: TrainerState,
    logged: Logged | None = None,
) -> np.ndarray:
    """Compute the rewards of rollouts of these examples, one example for each rollout. `logged` takes up what the
    functions log.

    A prompt that is a list of messages in the dataset, and its completion, are given as lists of messages, as TRL does.
    A prompt that is text is given as the model reads it, its chat template applied. `prompt_texts` is that text of both
    kinds, which TRL does not have.

    Returns float64 [len(functions), len(rollouts)], NaN where a function does not apply. Raises as compute_rewards.
    """
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    columns["completion_ids"] = [rollout.completion_ids for rollout in rollouts]
    columns["prompt_texts"] = [example.prompt for example in examples]
    return compute_rewards(
        functions,
        [example.conversation or example.prompt for example in examples],
        [
            [{"role": "assistant", "content": rollout.text}] if example.conversation else rollout.text
            for example, rollout in zip(examples, rollouts, strict=True)
        ],
        columns,
        [example.messages for example in examples],
        state,
        logged,
    )
