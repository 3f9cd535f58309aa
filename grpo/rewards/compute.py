"""Finds the rewards that the configuration names, starts them, and computes the rewards of a batch.

format_reward             a function of reward.py; with other tags, format_reward(reasoning, answer)
path/to/file.py:brevity   a function of another file
org/model, ./folder       a reward model, loaded in the trainer; the name has a slash
http://machine:59876      a reward model on a server of its own: python ref_server.py --task reward
judge:rubric.yaml         another model's verdict, by the OpenAI API
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import numpy as np
import torch

from grpo.config.errors import ConfigError, RewardError
from grpo.config.loss_settings import JUDGE
from grpo.config.programs import EvaluateConfig
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import Key
from grpo.model.reward_model import PADDED, describe_reward, load_reward_model, sequence_scores, tokenize
from grpo.rewards.functions import (
    Logged,
    RewardBatch,
    RewardPool,
    RewardScorer,
    TrainerState,
    add_deadline,
    await_call,
    call_function,
    invalid_reward,
    is_reward,
    is_scorer,
    load_function,
    make_error,
    text_of,
)
from grpo.rewards.judge import Judge
from grpo.usercode.prints import PRINTS
from grpo.usercode.process import count_processes, run_in_loop
from grpo.wire.refusals import ProtocolError
from grpo.wire.rewards import Message

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def load_reward_funcs(names: Sequence[str]) -> dict[str, Callable | str]:
    """Return the rewards of `reward_funcs`, in its order, by the name that each is logged under. A function is
    imported. A reward model is its folder, hub id or URL, and its name the last part of that. Raises ConfigError if a
    file, function or folder is missing, or a name stands twice."""
    rewards: dict[str, Callable | str] = {}
    for name in names:
        label, reward = _find_reward(name)
        if label in rewards:
            raise ConfigError(f"reward_funcs={name!r}: there is a {label!r} already: remove or rename one")
        rewards[label] = reward
    return rewards


def start_rewards(
    rewards: dict[str, Callable | str], config: TrainerConfig | EvaluateConfig, device: torch.device, run: str = ""
) -> tuple[dict[str, Callable | RewardScorer], RewardPool | None]:
    """Load models, wait for servers, start processes; return the rewards ready for use, and the processes' pool. `run`
    is shown on the servers' pages. Raises what RewardModel and RewardClient raise."""
    started: dict[str, Callable | RewardScorer] = {}
    functions, pool = start_functions(rewards, config, count_processes())
    for label, reward in rewards.items():
        if isinstance(reward, str) and reward.startswith(("http://", "https://")):
            from grpo.client.reference import RewardClient

            started[label] = client = RewardClient(config, reward, run)
            client.wait_ready()
        elif isinstance(reward, str):
            started[label] = RewardModel(config, reward, device)
        else:
            started[label] = functions[label]
    return started, pool


def start_functions(
    rewards: dict[str, Callable | str], config: TrainerConfig, workers: int
) -> tuple[dict[str, Callable], RewardPool | None]:
    """Return the functions of `load_reward_funcs` as the run calls them, and the pool of `reward_timeout`. A judge has
    deadlines of its own."""
    functions = {label: reward for label, reward in rewards.items() if not isinstance(reward, str)}
    if config.reward_timeout is None:
        return functions, None
    names = dict(zip(rewards, config.reward_funcs, strict=True))
    pooled = [names[label] for label, function in functions.items() if _is_blocking(function)]
    pool = RewardPool(pooled, config.reward_timeout, workers) if pooled else None
    for label, function in functions.items():
        if _is_blocking(function):
            functions[label] = pool.make_function(names[label])
        elif not isinstance(function, Judge):
            functions[label] = add_deadline(label, function, config.reward_timeout)
    return functions, pool


@PRINTS.batch()
def compute_rewards(
    functions: dict[str, Callable | RewardScorer],
    prompts: list[str] | list[list[Message]],
    completions: list[str] | list[list[Message]],
    columns: dict[str, list],
    *,
    conversations: Sequence[list[Message]] = (),
    state: TrainerState | None = None,
    logged: Logged | None = None,
    key: Key = (),
) -> np.ndarray:
    """Call each function once on the whole batch; `columns` are more lists with a value for each completion.

    Reward models score `conversations`, each prompt's chat with the completion. Async functions, reward models on
    servers and functions in worker processes run at the same time, the others one after the other. `logged` receives
    their logs, in their order. `key` seeds the random numbers in worker processes.

    Returns float64 [len(functions), len(completions)], NaN for None: the function does not apply. Raises RewardError if
    a function raises, or returns something else than a finite number or None for each completion.
    """
    batch = RewardBatch(
        prompts=prompts,
        completions=completions,
        columns=columns,
        state=state or TrainerState(),
        key=key,
        conversations=conversations,
    )
    logs = {name: Logged() for name in functions}
    blocking = [name for name, function in functions.items() if _is_blocking(function)]
    awaited = [name for name in functions if name not in blocking]
    pending = run_in_loop(_await_all([await_call(functions[name], batch, logs[name]) for name in awaited]))
    try:
        returned = {name: call_function(functions[name], batch, logs[name]) for name in blocking}
        returned |= zip(awaited, pending.result(), strict=True)
    finally:
        pending.cancel()
    rewards = np.full((len(functions), len(completions)), np.nan)
    for values, (name, function) in zip(rewards, functions.items(), strict=True):
        if isinstance(error := returned[name], BaseException):
            if is_scorer(function) or isinstance(error, RewardError):
                raise error
            raise make_error(name, function, error, batch) from error
        for i, reward in enumerate(returned[name]):
            if not is_reward(reward):
                raise invalid_reward(name, reward, text_of(completions[i]))
            values[i] = np.nan if reward is None else reward
    for of_function in logs.values() if logged is not None else ():
        logged.add(of_function)
    return rewards


def _find_reward(name: str) -> tuple[str, Callable | str]:
    """Return the name that a reward is logged under, and the function, or the model's folder, hub id or URL."""
    if name.startswith(JUDGE):
        judge = Judge(Path(name.removeprefix(JUDGE)))
        return judge.__name__, judge
    if name.startswith(("http://", "https://")):
        url = name.rstrip("/")
        return url.partition("://")[2], url
    if ":" in name or "/" not in name:
        return name.rpartition(":")[2].partition("(")[0], load_function(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve().name, str(folder)
    if name.endswith(".py") or not _HUB_ID.fullmatch(name):
        remedy = "name a reward model's folder, a hub id as org/model, or a function as path/to/file.py:function"
        raise ConfigError(f"reward_funcs={name!r}: no such folder: {remedy}")
    return name.partition("/")[2], name


def _is_blocking(reward: Callable | RewardScorer) -> bool:
    """Return True for a plain function or method, False for an async one."""
    call = reward.score if is_scorer(reward) else reward
    # An object may have an async __call__.
    return not any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))


async def _await_all(calls: Sequence[Coroutine]) -> list[list | BaseException]:
    return await asyncio.gather(*calls, return_exceptions=True)


class RewardModel:
    """A frozen reward model on the rank's device. Its batches are as large as an update's."""

    def __init__(self, config: TrainerConfig | EvaluateConfig, name: str, device: torch.device):
        """Load the model. Raises ConfigError if `name`, a folder or hub id, is no reward model."""
        self._name, self._batch_tokens = name, config.micro_batch_tokens
        self._model, self._tokenizer = load_reward_model(config, "reward_funcs", name, device)
        self._max_length = describe_reward(self._model, self._tokenizer, name).max_length

    def score(self, conversations: list[list[Message]]) -> list[float]:
        """Return one float32 per conversation. Raises RewardError if the model cannot take one."""
        try:
            texts = list(tokenize(self._tokenizer, conversations, self._max_length))
        except ProtocolError as error:
            raise RewardError(f"the reward model {self._name} cannot score a completion: {error}") from error
        scores = np.zeros(len(texts), np.float32)
        for rows in PADDED.cut([(text, []) for text in texts], self._batch_tokens):
            scores[rows] = sequence_scores(self._model, [texts[row] for row in rows])
        return scores.tolist()
