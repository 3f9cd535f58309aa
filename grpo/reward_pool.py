"""Reward functions in processes of their own, each call with a deadline: for rewards that run what a model wrote.

Nothing but a signal ends code that hangs in C (a catastrophic regular expression holds the GIL for ever), so a call
that overruns has its process killed, with all that it started, and another takes its place. The processes are started
from the command line, like reward.py's own, and not by `multiprocessing` or a library over it: that would import the
trainer's script, with torch and DeepSpeed, into each of them.

    trainer -> worker    pickle: (number, place of the function, prompts, completions, columns), of one completion
    worker -> trainer    a line of JSON with that number: where foreign code ran, nothing is taken that could run here
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo.reward_functions import RewardError, attempt, is_reward, load_function, no_reward, quote, row

log = logging.getLogger(__name__)

_START_SECONDS = 300.0  # to import the functions' files, which may be slow; no completion pays for it
_LOGGED_CHARACTERS = 80

# The trainer's standing order: when its end of the pipe closes, however it ended, no process of the pool stays behind,
# not even one that hangs. A number is the group of a process that was started, and again when it was ended.
_KEEPER = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class RewardPool:
    """Worker processes that call reward functions on one completion at a time. It is closed with the interpreter."""

    def __init__(self, names: list[str], timeout: float, fallback: float, workers: int):
        """`names` as in `reward_funcs`. `timeout`: seconds a call may take; `fallback`: its reward where it is over."""
        self._names, self._timeout, self._fallback = names, timeout, fallback
        keeper = [sys.executable, "-S", "-c", _KEEPER]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        self._workers = [_Worker(names, self._keep) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        atexit.register(self.close)

    def function(self, name: str) -> Callable:
        """The function of this name, to be awaited: its rewards are in the order of the completions.

        Raises RewardError where it raises, or returns what is no reward.
        """
        place, label = self._names.index(name), name.rpartition(":")[2]

        async def rewards(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
            calls = [
                self._threads.submit(self._call, place, label, row(i, prompts, completions, columns))
                for i in range(len(completions))
            ]
            try:
                return await asyncio.gather(*map(asyncio.wrap_future, calls))
            finally:
                for call in calls:
                    call.cancel()

        return rewards

    def close(self) -> None:
        atexit.unregister(self.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # what is still called will not end by itself
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.end()
        self._keeper.stdin.close()
        self._keeper.wait()

    def _keep(self, group: int) -> None:
        self._keeper.stdin.write(b"%d\n" % group)

    def _call(self, place: int, label: str, task: tuple) -> float | None:
        completion = task[1][0]
        worker = self._idle.get()  # there are as many as threads
        try:
            reply = worker.ask((place, *task), self._timeout)
        except _Lost as lost:
            # An error, not a warning: of all ranks but the first nothing less is shown.
            shown = quote(completion, _LOGGED_CHARACTERS)
            log.error("reward function %r %s on %s: that earns %g", label, lost, shown, self._fallback)
            return self._fallback
        finally:
            self._idle.put(worker)
        if "raised" in reply:
            cause = RuntimeError(f"in a worker process:\n{reply['traceback']}")
            raise RewardError(f"Reward function {label!r} failed on {quote(completion)}: {reply['raised']}") from cause
        if "returned" in reply:
            raise no_reward(label, reply["returned"], completion)
        return reply["reward"]


class _Lost(Exception):
    """A call that will not be answered. The message follows the function's name in a sentence."""


class _Worker:
    """A process that answers one task at a time. One that is lost is replaced at once."""

    def __init__(self, names: list[str], keep: Callable[[int], None]):
        self._names, self._keep = names, keep
        self._asked = 0
        self._start()

    def ask(self, task: tuple, seconds: float) -> dict[str, Any]:
        """The reply to a task. Raises _Lost where there is none in time, RewardError where no process can begin."""
        if not self._ready:
            self._wait_ready()
        self._asked += 1
        body = pickle.dumps((self._asked, *task))
        try:
            end = time.monotonic() + seconds
            self._socket.settimeout(seconds)
            self._socket.sendall(body)
            reply = json.loads(self._line(end))
            if not isinstance(reply, dict) or reply.get("number") != self._asked:
                raise ValueError(reply)
        except TimeoutError:
            self.end()
            lost = _Lost(f"gave no answer within {seconds:g} s")
        except ValueError:
            self.end()
            lost = _Lost("wrote where its process replies")
        except (OSError, EOFError):
            lost = _Lost(self._end_and_tell())
        else:
            return reply
        self._start()
        raise lost

    def kill(self) -> None:
        """Kill it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._keep(self._process.pid)
        self._socket.close()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from grpo.reward_pool import work; work({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(  # a group of its own: Ctrl-C is for the trainer, SIGKILL for all of it
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,  # code that asks for input must not wait for some
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Many processes that compute must not each take all cores.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._keep(self._process.pid)
        self._ready, self._received = False, b""
        self._socket.settimeout(_START_SECONDS)
        self._socket.sendall(pickle.dumps(self._names))

    def _wait_ready(self) -> None:
        try:
            reply = json.loads(self._line(time.monotonic() + _START_SECONDS))
        except (OSError, EOFError, ValueError):
            raise RewardError(
                f"a worker process for {' '.join(self._names)} {self._end_and_tell()} before it could begin: see what "
                "it printed; the files of reward functions are imported there"
            ) from None
        if "raised" in reply:
            raise RewardError(
                f"a worker process could not load {' '.join(self._names)}: {reply['raised']}: their files are imported "
                "there too, not only in the trainer"
            )
        self._ready = True

    def _line(self, end: float) -> bytes:
        """What stands before the next line end. Raises TimeoutError at `end`, EOFError where nothing more can come."""
        while b"\n" not in self._received:
            self._socket.settimeout(max(1e-3, end - time.monotonic()))
            if not (chunk := self._socket.recv(65536)):
                raise EOFError
            self._received += chunk
            if time.monotonic() > end:
                raise TimeoutError
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end_and_tell(self) -> str:
        try:
            code = self._process.wait(0.5)  # its sockets close a moment before it is gone
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        self.end()
        return f"lost its process ({how})"


def work(descriptor: int) -> None:
    """What a worker process does: answer tasks until the trainer's end of the socket closes."""
    # The deepspeed launcher sends SIGTERM to all below it, while the trainer has a step to finish. A handler, and not
    # SIG_IGN: what the user's code starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Where memory runs out, the system shall end this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with socket.socket(fileno=descriptor) as trainer, trainer.makefile("rb") as tasks:

        def say(reply: dict[str, Any]) -> None:
            trainer.sendall(json.dumps(reply).encode() + b"\n")

        try:
            functions = [load_function(name) for name in pickle.load(tasks)]
        except Exception as error:  # the user's file may raise anything
            say(_raised(error))
            return
        say({})
        own = os.getpid()
        while True:
            try:
                number, place, *task = pickle.load(tasks)
            except EOFError:
                return
            reply = _answer(functions[place], *task)
            if os.getpid() != own:
                os._exit(0)  # the foreign code forked, and this is its child
            say({"number": number, **reply})


def _answer(function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]) -> dict[str, Any]:
    returned = attempt(function, prompts, completions, columns)
    if isinstance(returned, BaseException):
        if isinstance(returned, Exception) and not isinstance(returned, MemoryError):
            return _raised(returned)
        raise returned  # like a hang an event of running foreign code, not a mistake: it costs the process
    (reward,) = returned
    if not is_reward(reward):
        return {"returned": repr(reward)}
    return {"reward": None if reward is None else float(reward)}


def _raised(error: Exception) -> dict[str, Any]:
    return {"raised": repr(error), "traceback": "".join(traceback.format_exception(error))}
