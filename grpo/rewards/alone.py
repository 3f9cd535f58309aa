"""Functions that are called on each completion alone, as `reward_timeout` has it: a batch of calls, and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from grpo.rewards.functions import (
    Batch,
    Logged,
    Misuse,
    begin_call,
    check_returned,
    log_lost_call,
    make_error,
    text_of,
)


def call_each_alone(compute_reward: Callable[[Batch, Logged], Awaitable[float | None]]) -> Callable:
    """Return an async function for `begin_call` that calls this one on each completion, as a batch of one, all at the
    same time.

    What the calls log is logged for the whole batch: a column is null where a call has none.
    """

    async def rewards(batch: Batch, logged: Logged) -> list[float | None]:
        logs = [Logged() for _ in batch.completions]
        calls = [asyncio.ensure_future(compute_reward(batch.select(i), alone)) for i, alone in enumerate(logs)]
        try:
            values = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        for column in dict.fromkeys(column for alone in logs for column in alone.extra):
            logged.log_extra(column, [alone.extra.get(column, [None])[0] for alone in logs])
        for alone in logs:
            for name, logged_values in alone.metrics.items():
                for value in logged_values:
                    logged.log_metric(name, value)
        return values

    rewards.takes_batch = True
    return rewards


def add_deadline(label: str, function: Callable, seconds: float, fallback: float) -> Callable:
    """Return an async function that calls this one on each completion alone, in this process.

    A call that takes longer than `seconds` is cancelled; its completion gets the reward `fallback`.
    """

    async def compute_reward(batch: Batch, logged: Logged) -> float | None:
        (completion,) = map(text_of, batch.completions)
        try:
            call = asyncio.ensure_future(begin_call(function, batch, logged))
        except Misuse as error:
            raise make_error(label, error) from error
        # Not wait_for: a TimeoutError that the function raises is an error like any other.
        done, _ = await asyncio.wait([call], timeout=seconds)
        if not done:
            call.cancel()
            log_lost_call(label, f"gave no answer within {seconds:g} s", completion, fallback)
            return fallback
        try:
            return check_returned(call.result(), batch, logged)[0]
        except BaseException as error:  # the user's code may raise anything
            raise make_error(label, error, completion) from error

    return call_each_alone(compute_reward)
