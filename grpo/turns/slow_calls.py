"""A log line a minute about code of the user's that runs in this process and does not come to its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""seconds from one look at the calls to the next, and those that a call may take before it is named"""


class SlowCalls:
    """The calls that run now. A thread of their own looks at them: what they block may be the event loop."""

    def __init__(self, timeout: float | None):
        """`timeout` is `tool_timeout`, which ends no code that blocks the event loop."""
        self._remedy = (
            "nothing ends them: set tool_timeout"
            if timeout is None
            else f"tool_timeout={timeout:g} ends no async tool that blocks the event loop: let it await, or write it "
            "without async"
        )
        self._running: dict[object, tuple[str, float]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="slow calls", daemon=True).start()

    @contextmanager
    def noted(self, task: str, *arguments: Any) -> Iterator[None]:
        """Take a task of grpo/turns/session.py for one that runs, as long as the block lasts."""
        key = object()
        self._running[key] = (arguments[0] if task in ("tool", "method") else task), time.monotonic()
        try:
            yield
        finally:
            del self._running[key]

    def close(self) -> None:
        """Look at them no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PATIENCE):
            now = time.monotonic()
            slow = [
                f"{name} (for {now - began:.0f} s)"
                for name, began in [*self._running.values()]
                if now - began >= PATIENCE
            ]
            if slow:
                more = f", and {len(slow) - 3} more" if len(slow) > 3 else ""
                # An error, not a warning: ranks other than the first show nothing less.
                log.error("these have not answered yet: %s%s; %s", ", ".join(slow[:3]), more, self._remedy)
