"""Gives reward functions what they judge, as TRL does: prompts, completions, token ids and the dataset's columns."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import Key, user_code
from grpo.rewards.compute import compute_rewards, start_functions
from grpo.rewards.functions import Logged, TrainerState
from grpo.rollouts.records import Example, Rollout
from grpo.wire.rewards import Message

log = logging.getLogger(__name__)


def score_rollouts(
    functions: dict[str, Callable],
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    state: TrainerState,
    logged: Logged | None = None,
    key: Key = (),
) -> np.ndarray:
    """Compute the rewards of rollouts of these examples, one example for each rollout. `logged` takes up what the
    functions log; their random numbers follow from `key`.

    A prompt that is a list of messages in the dataset, and its completion, are given as lists of messages, as TRL does;
    with tools or an environment the completion has several. A prompt that is text is given as the model reads it, its
    chat template applied, and its completion as what the model wrote. `prompt_texts` is that text of both kinds, which
    TRL does not have. Reward models are given the whole conversation.

    Returns float64 [len(functions), len(rollouts)], NaN where a function does not apply. Raises as compute_rewards.
    """
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    columns["completion_ids"] = [rollout.completion_ids for rollout in rollouts]
    columns["prompt_texts"] = [example.prompt for example in examples]
    with user_code(*key):
        return compute_rewards(
            functions,
            [example.conversation or example.prompt for example in examples],
            [
                _messages(rollout) if example.conversation else rollout.text
                for example, rollout in zip(examples, rollouts, strict=True)
            ],
            columns,
            [_converse(example, rollout) for example, rollout in zip(examples, rollouts, strict=True)],
            state,
            logged,
            key,
        )


def try_rewards(
    config: TrainerConfig,
    rewards: dict[str, Callable | str],
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
) -> None:
    """Call each function of `load_reward_funcs` once, as the run will, on two completions of the example, its gold
    answer (without one its prompt) and an empty one, and log what it gives. A mistake shows here, not after minutes of
    sampling.

    Reward models are left out: none is loaded yet. Raises RewardError.
    """
    functions, pool = start_functions(rewards, config, workers=1)
    folder = os.getcwd()
    text, what = (example.gold, "gold answer") if example.gold else (example.prompt, "text")
    answer = Rollout(tokenizer(text, add_special_tokens=False)["input_ids"], True, text, [], 0)
    empty = Rollout([tokenizer.eos_token_id], True, "", [], 0)
    try:
        values = score_rollouts(functions, [example] * 2, [answer, empty], TrainerState(0, config.max_steps))
    finally:
        os.chdir(folder)  # a function may change it, and settings may have paths that begin there
        if pool is not None:
            pool.close()
    for name, pair in zip(functions, values.tolist(), strict=True):
        shown = ["None" if np.isnan(value) else value for value in pair]
        log.info(
            "%s gives %s for the %s of the first prompt, %s for an empty completion", name, shown[0], what, shown[1]
        )


def _messages(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the completion as chat messages."""
    return [{"role": "assistant", "content": rollout.text}] if rollout.outcome is None else rollout.outcome.messages


def _converse(example: Example, rollout: Rollout) -> list[Message]:
    """Return the prompt's chat with the completion, in messages of role and content alone, as reward servers take them.

    A call of a tool is a line of JSON in its message's content. Where the prompt ends with what the assistant had
    begun, the completion is the rest of it.
    """
    answered = [{"role": message["role"], "content": _content(message)} for message in _messages(rollout)]
    chat = example.messages
    if chat and chat[-1]["role"] == "assistant":
        whole = chat[-1] | {"content": chat[-1]["content"] + answered[0]["content"]}
        return [*chat[:-1], whole, *answered[1:]]
    return [*chat, *answered]


def _content(message: dict[str, Any]) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])
