"""A run's rewards, in training and in evaluation: those of its functions and its environment, their weights, and which
are verdicts."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from grpo.algorithm.advantages import is_unjudged, soft_overlong_punishment
from grpo.client.server_errors import ServerError, ServersLost
from grpo.config.errors import ConfigError, RewardError
from grpo.config.loss_settings import RewardedConfig
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import Key, user_code
from grpo.data.records import Example, Rollout
from grpo.model.reward_model import try_template
from grpo.rewards.compute import RewardScorer, compute_rewards, start_functions
from grpo.rewards.functions import Logged, TrainerState, with_calls
from grpo.run.collective import raise_together
from grpo.wire.rewards import Message

log = logging.getLogger(__name__)


def score_rollouts(
    functions: dict[str, Callable],
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    state: TrainerState,
    *,
    logged: Logged | None = None,
    key: Key = (),
) -> np.ndarray:
    """Compute the rewards of rollouts, of one example each: float64 [len(functions), len(rollouts)], NaN for a function
    that does not apply. The functions log to `logged`; their random numbers follow from `key`. Raises as
    compute_rewards.

    As in TRL, a prompt that is a list of messages in the dataset, and its completion, are given as lists of messages. A
    prompt that is text is given as the model reads it, its chat template applied, and its completion as text. Of an
    agent's episode the list of its messages is given. `prompt_texts` is the text of prompts of both kinds, which TRL
    lacks. Reward models are given the whole conversation.
    """
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    columns["completion_ids"] = [rollout.completion_ids for rollout in rollouts]
    columns["prompt_texts"] = [example.prompt for example in examples]
    pairs = [*zip(examples, rollouts, strict=True)]
    prompts = [example.conversation or example.prompt for example in examples]
    completions = [
        _messages(rollout) if example.conversation or rollout.branches is not None else rollout.text
        for example, rollout in pairs
    ]
    conversations = [_converse(example, rollout) for example, rollout in pairs]
    with user_code(*key):
        return compute_rewards(
            functions,
            prompts=prompts,
            completions=completions,
            columns=columns,
            conversations=conversations,
            state=state,
            logged=logged,
            key=key,
        )


def try_rewards(
    config: TrainerConfig, rewards: dict[str, Callable | str], tokenizer: PreTrainedTokenizerBase, example: Example
) -> None:
    """Call each function of `load_reward_funcs` once on two completions of the example, its gold answer (without one
    its prompt) and an empty one, and log its rewards. Of a reward model, not loaded yet, the chat template alone is
    tried. Raises RewardError, ConfigError."""
    functions, pool = start_functions(rewards, config, workers=1)
    text, what = (example.gold, "gold answer") if example.gold else (example.prompt, "text")
    answer = Rollout(
        completion_ids=tokenizer(text, add_special_tokens=False)["input_ids"],
        finished=True,
        text=text,
        sampling_logprobs=[],
        policy_version=0,
        branches=[] if config.agent else None,
    )
    empty = replace(answer, completion_ids=[tokenizer.eos_token_id], text="")
    for reward in rewards.values():
        if isinstance(reward, str) and "://" not in reward:
            try_template(config, reward, _converse(example, answer))
    folder = os.getcwd()
    try:
        values = score_rollouts(functions, [example] * 2, [answer, empty], TrainerState(0, config.max_steps))
    finally:
        os.chdir(folder)  # a function may change it, and settings may have paths that begin there
        if pool is not None:
            pool.close()
    for name, pair in zip(functions, values.tolist(), strict=True):
        given, to_empty = ("None" if np.isnan(value) else value for value in pair)
        text = "%s gives %s for the %s of the first prompt, %s for an empty completion"
        log.info(text, name, given, what, to_empty)


def _messages(rollout: Rollout) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": rollout.text}] if rollout.outcome is None else rollout.outcome.messages


def _converse(example: Example, rollout: Rollout) -> list[Message]:
    """Return the prompt's chat with the completion, in messages of role and content alone, as reward servers take them.
    If the prompt ends with the begin of an assistant's message, the completion is its rest."""
    answered = [_plain(message) for message in _messages(rollout)]
    known = [] if rollout.branches is not None else example.messages
    chat = [_plain(message) for message in known]
    if chat and chat[-1]["role"] == "assistant":
        whole = chat[-1] | {"content": chat[-1]["content"] + answered[0]["content"]}
        return [*chat[:-1], whole, *answered[1:]]
    return [*chat, *answered]


def _plain(message: dict[str, Any]) -> Message:
    return {"role": message["role"], "content": with_calls(message["content"], message)}


class RewardsLost(RewardError):
    """The failure of a reward, a tool or an environment on some rank. Every rank raises it at the same place."""


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise RewardsLost on every rank if one could not draw or reward. All ranks call it together; in the block each
    works alone, but for calls that raise ServersLost."""
    lost = None
    try:
        yield
    except ServersLost:
        raise
    except (RewardError, ServerError) as error:
        lost = error
    raise_together(lost, RewardsLost)


class Rewarder:
    """A run's rewards with their weights: those of its functions, then its environment's, then the punishment."""

    def __init__(self, rewards: Mapping[str, Any], started: dict[str, Callable | RewardScorer], config: RewardedConfig):
        """`rewards` are those of join_rewards, `started` those of the functions as start_rewards returns them."""
        self._started, self.config, weights = started, config, [*config.reward_weights]
        self._of_environment = [name for name in rewards if name not in started]
        self.names = reward_names(rewards, config)
        givers = [rewards[name] for name in self._of_environment]  # a class's own `weight` is another thing
        weights += [1.0 if isinstance(giver, type) else giver.weight for giver in givers]
        self.weights = torch.tensor(weights + [1.0] * (len(self.names) - len(weights)), dtype=torch.float64)
        self.signal_weights = self.weights.clone()  # a group's lengths alone do not make it worth training on
        if config.soft_punish_cache:
            self.signal_weights[-1] = 0.0
        self.verdicts = verdicts(rewards)
        self.full_rewards = full_rewards(rewards)

    def compute(
        self,
        examples: Sequence[Example],
        rollouts: Sequence[Rollout],
        state: TrainerState,
        *,
        logged: Logged | None = None,
        key: Key = (),
    ) -> torch.Tensor:
        """Compute the rewards of rollouts: float64 [names, rollouts], NaN for a reward that does not apply. Random
        numbers follow from the run's seed, the step in `state`, and `key`, which no other batch of the step has. The
        punishment for length counts the tokens of answers too, and applies only beside another reward. Raises
        RewardError, ServerError."""
        config, key = self.config, (self.config.seed, state.global_step, *key)
        by_function = torch.from_numpy(score_rollouts(self._started, examples, rollouts, state, logged=logged, key=key))
        given = [{} if rollout.outcome is None else rollout.outcome.rewards for rollout in rollouts]
        for name in self._of_environment:
            row = torch.tensor([[rewards.get(name, np.nan) for rewards in given]], dtype=torch.float64)
            by_function = torch.cat([by_function, row])
        if config.soft_punish_cache:
            lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
            punishment = soft_overlong_punishment(lengths, config.max_completion_length, config.soft_punish_cache)
            punishment = punishment.masked_fill(is_unjudged(by_function, self.weights[:-1]), torch.nan)
            by_function = torch.cat([by_function, punishment.unsqueeze(0)])
        return by_function

    def is_correct(self, by_function: np.ndarray) -> np.ndarray:
        """Tell which completions are right, from [functions, ...]: bool [...]. All verdicts that apply must be above 0;
        a completion that none applies to is not right."""
        rewards = by_function[[self.names.index(name) for name in self.verdicts]]
        return (rewards > 0).any(axis=0) & ((rewards > 0) | np.isnan(rewards)).all(axis=0)

    def has_format(self, by_function: np.ndarray) -> np.ndarray:
        """Tell which completions earn every full reward that a function declares: [functions, ...] -> bool [...]."""
        rows = [self.names.index(name) for name in self.full_rewards]
        full = np.array([*self.full_rewards.values()]).reshape(-1, *[1] * (by_function.ndim - 1))
        return (by_function[rows] == full).all(axis=0)


def join_rewards(loaded: Mapping[str, Callable | str], of_environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the giver of each reward by name: a function, as load_reward_funcs returns it, or the environment's class.
    Raises ConfigError if both have the same name."""
    if both := sorted({*loaded} & {*of_environment}):
        raise ConfigError(
            f"reward_funcs={both[0]!r}: environment or agent gives a reward of this name too: rename one, because each "
            "is logged under its name"
        )
    return {**loaded, **of_environment}


def reward_names(rewards: Mapping[str, Any], config: RewardedConfig) -> list[str]:
    """Return the names under which rewards are logged: those of join_rewards, and the overlong punishment's."""
    return [*rewards, *(["soft_overlong_punishment"] if config.soft_punish_cache else [])]


def verdicts(rewards: Mapping[str, Any]) -> list[str]:
    """Return the names of those that declare `is_verdict = True`: above 0 an answer is right, which accuracy counts."""
    return [name for name, giver in rewards.items() if getattr(giver, "is_verdict", False)]


def full_rewards(rewards: Mapping[str, Any]) -> dict[str, float]:
    """Return the `full_reward` of each that declares one: evaluation counts the answers that earn it."""
    return {name: giver.full_reward for name, giver in rewards.items() if hasattr(giver, "full_reward")}
