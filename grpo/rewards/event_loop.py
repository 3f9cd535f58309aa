"""The event loop of all async code of the user's in a process: what such code keeps, such as a client's connections,
belongs to one loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future

_first = threading.Lock()  # two threads at a time would each make a loop


def run_in_loop(coroutine: Coroutine) -> Future:
    """Run the coroutine in the loop's thread; return the future of what it returns. From any thread."""
    with _first:
        loop = _get_event_loop()
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


@functools.cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run_forever() -> None:
        while True:
            # A task that raises one of these ends the loop, too: run it again for the other tasks.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run_forever, name="user's async code", daemon=True).start()
    return loop
