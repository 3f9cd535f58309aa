"""Calls the user's code in other processes, with deadlines: such code may run a model's programs.

Only a signal ends code that hangs in C (a catastrophic regular expression holds the GIL for ever). So a late call's
process is killed, with all its descendants, and replaced. `multiprocessing` would import the trainer's script, with
torch and DeepSpeed, into each of them. Their side is grpo/usercode/child.py.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from grpo.config.errors import RewardError, cores_here
from grpo.usercode.prints import PRINTS

_START_SECONDS = 300.0  # to import the user's files; not a part of a call's deadline
END_SECONDS = 30.0  # to kill all descendants
SLICE = 0.25  # seconds of a wait at a time
_LATE_CHUNKS = 64  # of an answer, read after its deadline; more is a flood


def count_processes() -> int:
    """Return one process per core of this rank, and two at least: one call may hang."""
    return max(2, min(16, cores_here()))


def awake_since(began: float) -> float:
    """Return how long a wait of at most SLICE took, twice that at most: where this process is stopped or gets no
    processor, the user's code may have had none either, and its answer may lie here unread."""
    return min(time.monotonic() - began, 2 * SLICE)


class CallLost(Exception):
    """A call without a reply. The message follows the function's name in a sentence."""


class UserProcess:
    """A process that answers one task at a time. A new process replaces one that is lost."""

    def __init__(self, make_service: Callable, arguments: tuple, names: Sequence[str], folder: str):
        """Start a process that imports `make_service`, and calls it with `arguments`; its object has `answer`. `names`:
        the user's names of the code, for messages; `folder`: the working directory of all replacements."""
        self._service, self._names, self._folder = pickle.dumps((make_service, arguments)), names, folder
        self._calls = 0
        self._is_ended = False
        self._start()

    def call(self, task: tuple, seconds: float) -> dict[str, Any]:
        """Return the service's reply to a task. Raises CallLost if none comes in time, RewardError if no process
        starts, CancelledError after `end`."""
        if not self._ready:
            self._wait_ready()
        self._calls += 1
        body = pickle.dumps((self._calls, *task))
        try:
            self._left, view = seconds, memoryview(body)
            while view:
                view = view[self._attempt(self._socket.send, view) :]
            reply = json.loads(self._read_line())
            if not isinstance(reply, dict) or reply.get("number") != self._calls:
                raise ValueError(reply)
        except TimeoutError:
            how = f"gave no answer within {seconds:g} s"
        except ValueError:
            how = "wrote where its process replies"
        except (OSError, EOFError):
            how = self._explain_end()
        else:
            return reply
        self.stop()
        if self._is_ended:
            raise CancelledError
        self._start()
        raise CallLost(how)

    def replace_if_ended(self) -> None:
        if self._process.poll() is not None or self._is_closed():
            self.stop()
            self._start()

    def _is_closed(self) -> bool:
        """Return whether the worker's end of the socket is closed, which is so before the guard has ended."""
        try:
            self._socket.settimeout(0)
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def end(self) -> None:
        """Kill it without replacement. A call that waits for it, in any thread, is cancelled."""
        self._is_ended = True
        self._process.stdin.close()

    def stop(self) -> None:
        self._process.stdin.close()  # the guard then kills the worker and all its descendants
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped, or a process survives SIGKILL
            self._process.kill()
            self._process.wait()
        self._printer.join(1.0)  # another user's process may survive and hold the pipe
        self._socket.close()

    def _start(self) -> None:
        self._socket, worker_end = socket.socketpair()
        paths = [path for path in sys.path if isinstance(path, str)]  # Python ignores others
        imports = f"import sys; sys.path[:] = {paths!r}; from grpo.usercode.child import run_worker"
        code = f"{imports}; run_worker({worker_end.fileno()})"
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[worker_end.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer
                cwd=self._folder,
                # Several processes that compute must not each take all cores.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._printer = threading.Thread(target=PRINTS.read_all, args=[self._process.stdout], daemon=True)
        self._printer.start()
        self._ready = False
        self._socket.settimeout(_START_SECONDS)
        self._socket.sendall(self._service)

    def _wait_ready(self) -> None:
        try:
            self._left = _START_SECONDS
            reply = json.loads(self._read_line())
        except (OSError, EOFError, ValueError) as error:
            is_slow = isinstance(error, TimeoutError)
            how = f"was not ready in {_START_SECONDS:.0f} s" if is_slow else self._explain_end()
            self.stop()
            raise RewardError(f"a worker process for {' '.join(self._names)} {how} as it imported your files") from None
        if "raised" in reply:
            raise RewardError(f"a worker process could not load {' '.join(self._names)}: {reply['raised']}")
        self._ready = True

    def _attempt(self, action: Callable, argument: Any) -> Any:
        """Do an action that the socket may block. Raises TimeoutError once no second of the call is left."""
        while True:
            began = time.monotonic()
            self._socket.settimeout(max(1e-3, min(self._left, SLICE)))
            try:
                return action(argument)
            except TimeoutError:
                if self._left <= 0:
                    raise
            finally:
                self._left -= awake_since(began)

    def _read_line(self) -> bytes:
        """Read a line. Raises TimeoutError if it does not come in time, EOFError at the end."""
        chunks, late = [b""], 0
        while b"\n" not in chunks[-1]:
            if not (chunk := self._attempt(self._socket.recv, 65536)):
                raise EOFError
            chunks.append(chunk)
            late += self._left <= 0
            if late > _LATE_CHUNKS:
                raise TimeoutError
        return b"".join(chunks).partition(b"\n")[0]

    def _explain_end(self) -> str:
        """Describe the end of a process that closed its socket."""
        try:
            code = self._process.wait(1.0)  # its sockets close a moment before it is gone
        except subprocess.TimeoutExpired:
            return "lost its process (it closed its connection)"
        number = -code if code < 0 else code - 128
        reason = signal.Signals(number).name if number in [*signal.Signals] else f"exit code {code}"
        return f"lost its process ({reason})"


async def ended_within(seconds: float | None, call: Coroutine) -> asyncio.Task:
    """Return the call as a task that has ended. Raises CallLost after `seconds`."""
    task, left = asyncio.ensure_future(call), math.inf if seconds is None else seconds
    while not task.done():
        if left <= 0:
            task.cancel()
            raise CallLost(f"gave no answer within {seconds:g} s")
        began = time.monotonic()
        # Not wait_for: a TimeoutError that the user's code raises is an error like any other.
        await asyncio.wait([task], timeout=min(left, SLICE))
        left -= awake_since(began)
    return task


_first = threading.Lock()


def run_in_loop(coroutine: Coroutine) -> Future:
    """Run the coroutine in the one loop of all async code of the user's, which may keep connections between calls."""
    with _first:  # two threads at a time would each make a loop
        return asyncio.run_coroutine_threadsafe(coroutine, _get_event_loop())


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


class ProcessPool:
    """Processes of one service, started when needed, and `threads` that wait for calls. A program closes it before its
    end, or Python waits for the running calls."""

    def __init__(self, service: tuple[Callable, tuple, Sequence[str]], timeout: float, threads: int, started: int = 0):
        """`service`: the first arguments of UserProcess; `timeout`: seconds of a call; `started`: processes to start
        now, which import the user's files before they are needed."""
        self.timeout = timeout
        self._service, self._folder = service, os.getcwd()
        self._lock = threading.Lock()
        self._all = [self._start() for _ in range(started)]
        self._idle = deque(self._all)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="user's code")
        self._is_closed = False

    async def run(self, call: Callable, *arguments: Any) -> Any:
        """Make a blocking call in one of the threads."""
        return await asyncio.wrap_future(self._threads.submit(call, *arguments))

    def call(self, *task: Any) -> dict[str, Any]:
        """Return the reply to a task, from any process. Raises as UserProcess.call."""
        process = self.take()
        try:
            return process.call(task, self.timeout)
        finally:
            self.give_back(process)

    def take(self) -> UserProcess:
        """Return a process for one caller, until it gives it back."""
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if self._idle:
                process = self._idle.popleft()
                process.replace_if_ended()  # the system may have killed it: memory
                return process
            process = self._start()
            self._all.append(process)
            return process

    def _start(self) -> UserProcess:
        make_service, arguments, names = self._service
        return UserProcess(make_service, arguments, names, self._folder)

    def give_back(self, process: UserProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """Kill the processes with all descendants. Calls are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.end()  # a call that hangs would not end by itself
        self._threads.shutdown(wait=True)
        for process in self._all:
            process.stop()
