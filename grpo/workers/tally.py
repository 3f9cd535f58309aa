"""What a worker has drawn: for its log, and for the pool's page."""

from __future__ import annotations

import threading
import time
from collections import deque

from grpo.wire.rollouts import Drawn

SUMMARY_SECONDS = 60.0


class Tally:
    """Groups and tokens, in all and of the last minute. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._groups = self._tokens = 0
        self._last: deque[tuple[float, int]] = deque()
        """time and tokens of the groups of the last minute"""

    def add(self, drawn: Drawn) -> None:
        with self._lock:
            self._groups, self._tokens = self._groups + 1, self._tokens + drawn.tokens
            self._last.append((time.monotonic(), drawn.tokens))

    def tokens_per_second(self) -> float:
        """Return the mean of the last minute, or of the time since the start."""
        return self._of_last_minute()[1] / self._seconds()

    def summary(self) -> str:
        """Return a line on the last minute; "" where nothing was drawn."""
        groups, tokens = self._of_last_minute()
        return f"last {SUMMARY_SECONDS:.0f} s: {_line(groups, tokens, self._seconds())}" if groups else ""

    def whole(self) -> str:
        """Return a line on everything; "" where nothing was drawn."""
        return _line(self._groups, self._tokens, time.monotonic() - self._began) if self._groups else ""

    def _seconds(self) -> float:
        return max(1e-3, min(SUMMARY_SECONDS, time.monotonic() - self._began))

    def _of_last_minute(self) -> tuple[int, int]:
        with self._lock:
            while self._last and self._last[0][0] < time.monotonic() - SUMMARY_SECONDS:
                self._last.popleft()
            return len(self._last), sum(tokens for _, tokens in self._last)


def _line(groups: int, tokens: int, seconds: float) -> str:
    return f"{groups} groups, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
