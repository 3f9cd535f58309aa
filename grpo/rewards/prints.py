"""What reward functions print: shown up to a limit for each batch, counted beyond it. A log must not fill the disk."""

from __future__ import annotations

import codecs
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any, TextIO

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 65536
"""for each batch, of all functions of a rank together"""


class Prints:
    """Passes on what is printed in this process, and in those of a RewardPool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left, self._more = SHOWN_CHARACTERS, 0

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Bound what `print` writes from here on, and say at the end what was left out since the last batch."""
        try:
            with contextlib.redirect_stdout(_Bounded(sys.stdout, self)):
                yield
        finally:
            with self._lock:
                more, self._left, self._more = self._more, SHOWN_CHARACTERS, 0
            if more:
                # An error, not a warning: of all ranks but the first nothing less is shown.
                log.error("reward functions printed %d characters more for this batch: they are left out", more)

    def write(self, text: str, stream: TextIO) -> None:
        with self._lock:
            shown = text[: self._left]
            self._left -= len(shown)
            self._more += len(text) - len(shown)
        if shown:
            stream.write(shown)

    def read_all(self, pipe: IO[bytes]) -> None:
        """Pass on what a process prints, until it and all that it started have ended."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while chunk := pipe.read1(65536):
                self.write(decoder.decode(chunk), sys.stderr)


class _Bounded:
    """A stream whose text goes through Prints."""

    def __init__(self, stream: TextIO, prints: Prints) -> None:
        self._stream, self._prints = stream, prints

    def write(self, text: str) -> int:
        self._prints.write(text, self._stream)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


PRINTS = Prints()
