"""Find the reward functions that the configuration names, and call them on a batch."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from grpo.config import ConfigError, TrainerConfig
from grpo.reward_functions import (
    RewardError,
    attempt,
    first_to_fail,
    is_reward,
    load_function,
    no_reward,
    one_each,
    quote,
    row,
)
from grpo.reward_pool import RewardPool

log = logging.getLogger(__name__)


def load_reward_funcs(names: Sequence[str]) -> dict[str, Callable]:
    """The functions in the order of `names`, keyed by function name.

    Raises ConfigError if there is no such file or function, or if two names have the same key.
    """
    functions: dict[str, Callable] = {}
    for name in names:
        label = name.rpartition(":")[2]
        if label in functions:
            raise ConfigError(
                f"reward_funcs names {label!r} twice, the second time as {name!r}: "
                "remove or rename one, because each reward is logged under this name."
            )
        functions[label] = load_function(name)
    return functions


def start_rewards(functions: dict[str, Callable], config: TrainerConfig) -> dict[str, Callable]:
    """What `load_reward_funcs` found, each with its deadline where `reward_timeout` sets one."""
    if config.reward_timeout is None:
        return functions
    by_label = dict(zip(functions, config.reward_funcs, strict=True))
    started: dict[str, Callable] = {}
    pool = None
    if own := [by_label[label] for label, function in functions.items() if _is_blocking(function)]:
        pool = RewardPool(own, config.reward_timeout, config.reward_fallback, _workers())
    for label, function in functions.items():
        if pool is not None and _is_blocking(function):
            started[label] = pool.function(by_label[label])
        else:
            started[label] = _with_deadline(label, function, config.reward_timeout, config.reward_fallback)
    return started


def compute_rewards(
    functions: dict[str, Callable], prompts: list[str], completions: list[str], columns: dict[str, list]
) -> np.ndarray:
    """Call each function once on the whole batch, with the dataset's columns as keyword arguments.

    What is to be awaited (async functions, functions in worker processes) goes on together, and while the others run
    one after the other.

    Returns float64 [len(functions), len(completions)], NaN where a function returned None: it does not apply there.
    Raises RewardError, with the function's name and the completion at fault, if a function raises, or returns the wrong
    number of rewards or a reward that is not a finite number.
    """
    batch = prompts, completions, columns
    awaited = {name: function for name, function in functions.items() if not _is_blocking(function)}
    together = _submit(_await_all(awaited.values(), *batch)) if awaited else None
    try:
        returned = {name: attempt(function, *batch) for name, function in functions.items() if name not in awaited}
        if together is not None:
            returned |= zip(awaited, together.result(), strict=True)
    finally:
        if together is not None:
            together.cancel()
    rewards = np.full((len(functions), len(completions)), np.nan)
    for values, (name, function) in zip(rewards, functions.items(), strict=True):
        if isinstance(error := returned[name], Exception):
            if isinstance(error, RewardError):
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


def _is_blocking(function: Callable) -> bool:
    """Whether it is simply called; otherwise it is to be awaited."""
    # An object may have an async __call__.
    return not any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _workers() -> int:
    """As many processes as this rank has cores, but two at least: one that hangs must not hold up the others."""
    return max(2, min(16, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", "1"))))


async def _await_all(
    functions: Sequence[Callable], prompts: list[str], completions: list[str], columns: dict[str, list]
) -> list[list | BaseException]:
    """What each returned or raised."""

    async def one(function: Callable) -> list:
        return one_each(await function(prompts=prompts, completions=completions, **columns), completions)

    return await asyncio.gather(*map(one, functions), return_exceptions=True)


def _with_deadline(label: str, function: Callable, seconds: float, fallback: float) -> Callable:
    """An async function called on each completion by itself, in this process. What is too late earns the fallback."""

    async def on_one(prompts: list[str], completions: list[str], columns: dict[str, list]) -> float | None:
        call = asyncio.ensure_future(function(prompts=prompts, completions=completions, **columns))
        # Not wait_for: a TimeoutError of the function's own is an error like any other.
        done, _ = await asyncio.wait([call], timeout=seconds)
        if not done:
            call.cancel()
            log.error("%r gave no answer within %g s on %s: %g", label, seconds, quote(completions[0], 80), fallback)
            return fallback
        try:
            return one_each(call.result(), completions)[0]
        except Exception as error:  # the user's code may raise anything
            raise RewardError(f"Reward function {label!r} failed on {quote(completions[0])}: {error!r}") from error

    async def rewards(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
        each = (row(i, prompts, completions, columns) for i in range(len(completions)))
        return await asyncio.gather(*(on_one(*one) for one in each))

    return rewards


def _made_blocking(function: Callable) -> Callable:
    return lambda **arguments: _submit(function(**arguments)).result()


def _submit(coroutine) -> Future:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one event loop of a run: what a function keeps, such as a client's connections, belongs to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
