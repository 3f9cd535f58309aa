"""Find the rewards that the configuration names, and have them judge a batch.

format_reward             a function of reward.py
path/to/file.py:brevity   a function of another file
org/model, ./folder       a reward model, loaded in the trainer: one slash at least
http://machine:59876      a reward model on a server of its own: python ref_server.py --task reward
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.rewards.functions import (
    RewardError,
    arguments,
    attempt,
    first_to_fail,
    is_reward,
    load_function,
    no_reward,
    one_each,
    quote,
    row,
)
from grpo.rewards.prints import PRINTS
from grpo.rewards.worker_pool import RewardPool
from grpo.wire.rewards import Message

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@runtime_checkable
class RewardScorer(Protocol):
    """A reward model, here or on a server: what it is given are conversations, and no columns of a dataset."""

    def score(self, conversations: list[list[Message]]) -> list[float]:
        """One score each; or this is to be awaited."""


def load_reward_funcs(names: Sequence[str]) -> dict[str, Callable | str]:
    """What `reward_funcs` names, in its order, by the name that each is logged under.

    Functions are imported. A reward model is still its folder, hub id or URL: `start_rewards` loads it. It is logged
    under the last part of that, or the URL's host and port.

    Raises ConfigError if there is no such file, function or folder, or if two have the same name.
    """
    found: dict[str, Callable | str] = {}
    for name in names:
        label, reward = _find(name)
        if label in found:
            raise ConfigError(
                f"reward_funcs names {label!r} twice, the second time as {name!r}: "
                "remove or rename one, because each reward is logged under this name."
            )
        found[label] = reward
    return found


def start_rewards(
    found: dict[str, Callable | str], config: TrainerConfig, device: torch.device
) -> dict[str, Callable | RewardScorer]:
    """What `load_reward_funcs` found, ready to judge: models loaded, servers waited for, processes started.

    Raises ConfigError for a model that is none, ServerError for a server that cannot serve this run.
    """
    started: dict[str, Callable | RewardScorer] = {}
    by_label = dict(zip(found, config.reward_funcs, strict=True))
    pool = None
    if config.reward_timeout is not None and (own := [by_label[one] for one in found if _is_blocking(found[one])]):
        pool = RewardPool(own, config.reward_timeout, config.reward_fallback, _workers())
    for label, reward in found.items():
        if isinstance(reward, str) and reward.startswith(("http://", "https://")):
            from grpo.client.reward import RewardClient

            started[label] = client = RewardClient(config, reward)
            client.wait_ready()
        elif isinstance(reward, str):
            from grpo.rewards.local_model import RewardModel

            started[label] = RewardModel.load(config, reward, device)
        elif config.reward_timeout is None:
            started[label] = reward
        elif pool is not None and _is_blocking(reward):
            started[label] = pool.function(by_label[label])
        else:
            started[label] = _with_deadline(label, reward, config.reward_timeout, config.reward_fallback)
    return started


@PRINTS.batch()
def compute_rewards(
    functions: dict[str, Callable | RewardScorer],
    prompts: list[str],
    completions: list[str],
    columns: dict[str, list],
    messages: Sequence[list[Message]] = (),
) -> np.ndarray:
    """Call each function once on the whole batch, with the dataset's columns as keyword arguments.

    Reward models are given `messages`, each prompt's chat, with the completion as the assistant's next. What is to be
    awaited (async functions, reward models on servers, functions in worker processes) goes on together, and while the
    others run one after the other.

    Returns float64 [len(functions), len(completions)], NaN where a function returned None: it does not apply there.
    Raises RewardError, with the function's name and the completion at fault, if a function raises, or returns the wrong
    number of rewards or a reward that is not a finite number.
    """
    batch = prompts, completions, columns
    conversations = [
        _answered(before, completion) for before, completion in zip(messages, completions, strict=bool(messages))
    ]
    awaited = {name: function for name, function in functions.items() if not _is_blocking(function)}
    together = _submit(_await_all(awaited.values(), batch, conversations)) if awaited else None
    try:
        returned = {
            name: one_each(function.score(conversations), completions)
            if isinstance(function, RewardScorer)
            else attempt(function, *batch)
            for name, function in functions.items()
            if name not in awaited
        }
        if together is not None:
            returned |= zip(awaited, together.result(), strict=True)
    finally:
        if together is not None:
            together.cancel()
    rewards = np.full((len(functions), len(completions)), np.nan)
    for values, (name, function) in zip(rewards, functions.items(), strict=True):
        if isinstance(error := returned[name], BaseException):
            if isinstance(function, RewardScorer) or isinstance(error, RewardError):
                raise error
            blocking = function if _is_blocking(function) else _made_blocking(function)
            raise RewardError(
                f"Reward function {name!r} failed {first_to_fail(blocking, *batch)}: {error!r}"
            ) from error
        for i, reward in enumerate(returned[name]):
            if not is_reward(reward):
                raise no_reward(name, repr(reward), completions[i])
            values[i] = np.nan if reward is None else reward
    return rewards


def _answered(messages: list[Message], completion: str) -> list[Message]:
    """The chat with the completion: the assistant's next message, or the rest of its last one."""
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + completion}]
    return [*messages, {"role": "assistant", "content": completion}]


def _find(name: str) -> tuple[str, Callable | str]:
    """(what it is logged under, the function or where the model is)"""
    if name.startswith(("http://", "https://")):
        url = name.rstrip("/")
        return url.partition("://")[2], url
    if ":" in name or "/" not in name:
        return name.rpartition(":")[2], load_function(name)
    if name.endswith(".py"):
        raise ConfigError(f"reward_funcs names {name!r}, a file: name its function too, as {name}:function.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"reward_funcs names {name!r}, a folder without a config.json: name one that save_pretrained wrote."
            )
        return folder.resolve().name, str(folder)
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"reward_funcs names {name!r}, and there is no such folder: name a folder with a reward model, a hub id as "
            "org/model, or a function as path/to/file.py:function."
        )
    return name.partition("/")[2], name


def _is_blocking(reward: Callable | RewardScorer | str) -> bool:
    """Whether it is simply called; otherwise it is to be awaited, or no function yet."""
    if isinstance(reward, str):
        return False
    call = reward.score if isinstance(reward, RewardScorer) else reward
    # An object may have an async __call__.
    return not any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))


def _workers() -> int:
    """As many processes as this rank has cores, but two at least: one that hangs must not hold up the others."""
    return max(2, min(16, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", "1"))))


async def _await_all(
    functions: Sequence[Callable | RewardScorer],
    batch: tuple[list[str], list[str], dict],
    conversations: list[list[Message]],
) -> list[list | BaseException]:
    """What each returned or raised."""

    async def one(function: Callable | RewardScorer) -> list:
        prompts, completions, columns = batch
        if isinstance(function, RewardScorer):
            return one_each(await function.score(conversations), completions)
        return one_each(await function(**arguments(prompts, completions, columns)), completions)

    return await asyncio.gather(*map(one, functions), return_exceptions=True)


def _with_deadline(label: str, function: Callable, seconds: float, fallback: float) -> Callable:
    """An async function called on each completion by itself, in this process. What is too late earns the fallback."""

    async def on_one(prompts: list[str], completions: list[str], columns: dict[str, list]) -> float | None:
        call = asyncio.ensure_future(function(**arguments(prompts, completions, columns)))
        # Not wait_for: a TimeoutError of the function's own is an error like any other.
        done, _ = await asyncio.wait([call], timeout=seconds)
        if not done:
            call.cancel()
            log.error("%r gave no answer within %g s on %s: %g", label, seconds, quote(completions[0], 80), fallback)
            return fallback
        try:
            return one_each(call.result(), completions)[0]
        except BaseException as error:  # the user's code may raise anything
            raise RewardError(f"Reward function {label!r} failed on {quote(completions[0])}: {error!r}") from error

    async def rewards(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
        each = (row(i, prompts, completions, columns) for i in range(len(completions)))
        return await asyncio.gather(*(on_one(*one) for one in each))

    return rewards


def _made_blocking(function: Callable) -> Callable:
    return lambda **columns: _submit(function(**columns)).result()


def _submit(coroutine) -> Future:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one event loop of a run: what a function keeps, such as a client's connections, belongs to a loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            # A task that raises one of these has it as its result, and ends the loop too: others wait in it.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return loop
