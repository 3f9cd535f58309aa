"""Waiting for a pool and its workers: how long, and what is said meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo.client.base import BETWEEN_LINES, FIRST_LINE
from grpo.client.errors import RequestFailure, ServerError

log = logging.getLogger(__name__)

SHOWN = 8
"""workers that a line names at most, those that the pool heard last"""


class GroupDeadline:
    """The time that a rank still waits for groups: it moves on with each that the pool gets."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._drawn: int | None = None
        self.move_on()

    def move_on(self) -> None:
        self._end = time.monotonic() + self.seconds

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def wants_status(self) -> bool:
        """Tell whether is_over has something to find out."""
        return self._drawn is None or self.seconds_left() <= 0

    def is_over(self, status: dict[str, Any]) -> bool:
        """Tell whether the time has passed without a group of any rank: workers draw one rank's after another's."""
        drawn = sum(row["drawn"] for row in status.get("rounds", []))
        if drawn != self._drawn:
            self.move_on()
        self._drawn = drawn
        return self.seconds_left() <= 0


@contextmanager
def logged_wait(what: str, url: str, status: Callable[[], dict[str, Any]], round_number: int) -> Iterator[None]:
    """Log what is waited for, after 5 s and then each 15 s, while the block lasts."""
    ended = threading.Event()

    def write_lines() -> None:
        began, pause = time.monotonic(), FIRST_LINE
        while not ended.wait(pause):
            pause = BETWEEN_LINES
            try:
                text = describe_wait(status(), url, round_number)
            except RequestFailure as failure:
                text = f"{url} {failure}"
            except ServerError as error:
                text = str(error)
            if not ended.is_set():
                log.info("%s: waiting since %.0f s: %s", what, time.monotonic() - began, text)

    threading.Thread(target=write_lines, name="pool-wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def describe_wait(status: dict[str, Any], url: str, round_number: int) -> str:
    """Say how many groups of a round are drawn, and what the pool's workers do."""
    rows = [row for row in status.get("rounds", []) if row["round"] == round_number]
    groups = "".join(f"{row['drawn']} of {row['tasks']} groups are drawn; " for row in rows)
    return groups + describe_workers(status, url)


def describe_workers(status: dict[str, Any], url: str) -> str:
    """Say of each worker of a pool what it does, and what it said last; where there is none, how to start one."""
    workers = status.get("workers", [])
    if not workers:
        return f"no worker asks this pool: start one with 'python generate.py --pool {url}', on any machine"
    shown = [
        f"{worker['name']}{' on ' * bool(worker['card'])}{worker['card']} is {worker['state']}"
        + (f" ({worker['message']})" if worker["message"] else "")
        + f", version {worker['version']}, {worker['last_seen']:.0f} s ago"
        + (f", last refused: {worker['reason']}" if worker["reason"] else "")
        for worker in workers[:SHOWN]
    ]
    return "; ".join(shown) + (f"; and {len(workers) - SHOWN} more" if len(workers) > SHOWN else "")
