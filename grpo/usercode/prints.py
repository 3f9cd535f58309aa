"""Shows the prints of the user's code, up to a limit per batch, and counts the rest: a log must not fill the disk."""

import codecs
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, TextIO

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 65536  # the limit per batch and rank


class Prints:
    """The prints of reward functions, tools and environments, in this process and in those started for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left, self._dropped = SHOWN_CHARACTERS, 0
        self._limited, self.stdout = 0, sys.stdout
        # Never freed: another thread's print() may be writing to it when the last call ends, and holds no reference,
        # which would crash (python/cpython#130163).
        self._limiting = _LimitedStream(self)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Limit the prints inside; log at the end how much was left out."""
        try:
            with self.limited():
                yield
        finally:
            self.end_batch()

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Limit the prints of all threads while one or more are inside."""
        with self._lock:
            # The user's code may have put the limiting one back after its call.
            if self._limited == 0 and sys.stdout is not self._limiting:
                self.stdout, sys.stdout = sys.stdout, self._limiting
            self._limited += 1
        try:
            yield
        finally:
            with self._lock:
                self._limited -= 1
                if self._limited == 0:
                    sys.stdout = self.stdout

    def end_batch(self) -> None:
        """Begin another batch; log how much was left out."""
        with self._lock:
            dropped, self._left, self._dropped = self._dropped, SHOWN_CHARACTERS, 0
        if dropped:
            # An error: ranks other than the first show no warnings.
            message = "reward functions and tools printed %d more characters for this batch: they are left out"
            log.error(message, dropped)

    def write(self, text: str, stream: TextIO) -> None:
        """Write the part of the text within the limit."""
        with self._lock:
            shown = text[: self._left]
            self._left -= len(shown)
            self._dropped += len(text) - len(shown)
        if shown:
            stream.write(shown)

    def read_all(self, pipe: IO[bytes], keep: Callable[[str], None] = lambda text: None) -> None:
        """Write a process's prints, each of which `keep` is given, until it and all its descendants have ended."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while chunk := pipe.read1(65536):
                text = decoder.decode(chunk)
                keep(text)
                self.write(text, sys.stderr)


class _LimitedStream:
    """A stream whose text goes through Prints to the stdout that it stands for."""

    def __init__(self, prints: Prints) -> None:
        self._prints = prints

    def write(self, text: str) -> int:
        self._prints.write(text, self._prints.stdout)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prints.stdout, name)


PRINTS = Prints()
