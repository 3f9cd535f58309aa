"""Runs the user's programs for episodes, each in a process of its own: the trainer's side of grpo/agents/host.py."""

import base64
import contextlib
import datetime
import decimal
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError, RewardError, one_line
from grpo.usercode.prints import PRINTS
from grpo.usercode.process import END_SECONDS, SLICE, awake_since
from grpo.wire.json_fields import is_number

HOST_LOST = "host lost"  # the failure of the programs that run when their host ends
_START_SECONDS = 300.0  # to import the user's file
_STARTS = 3  # at once, before the run ends
_SHOWN = 4000  # characters of what a host printed last
_WANTED = 'a number, true, false, null, or {"reward": 1.0, "passed": true, "parts": {"name": 0.5}}'


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program returned. No reward is no verdict."""

    reward: float | None
    passed: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a program: its answer, or a failure: its kind, and the traceback or the last prints."""

    answer: Answer | None = None
    failure: str = ""
    text: str = ""


class AgentProgram:
    """A program that runs. Its `result` comes when all that it started is gone."""

    def __init__(self, number: int, now: Callable[[], float]) -> None:
        self.number = number
        self.result: Future[Ending] = Future()
        self.result.set_running_or_notify_cancel()  # a reader of it cannot cancel it
        self.failure, self.killed = "", math.inf  # why and when it was killed
        self._lock, self._now = threading.RLock(), now
        self._requests, self._spent, self._since = 0, 0.0, now()

    def pause(self) -> None:
        """Stop its time while one of its requests is answered. Others may begin before that ends."""
        with self._lock:
            self._spent = self.spent()
            self._requests += 1

    def resume(self) -> None:
        """Let its time run if no other request of it is left."""
        with self._lock:
            self._requests -= 1
            self._since = self._now()

    def spent(self) -> float:
        """Return the seconds outside its requests."""
        with self._lock:
            return self._spent if self._requests else self._spent + self._now() - self._since


class AgentPrograms:
    """The programs of a run. All methods may be called in any thread."""

    def __init__(
        self, agent: str, url: str, *, python: str | None = None, timeout: float, memory: float | None = None
    ) -> None:
        """Start the host here. `agent`: path/to/file.py:function, or command: and its words; `url`: the API's, with
        /v1; `python`: another interpreter; `timeout`: the seconds that a program may take outside its requests;
        `memory`: the GiB that it may take, with all that it starts.

        Raises ConfigError if the agent cannot be loaded, RewardError if the host ends meanwhile.
        """
        self._agent, self._timeout, self._clock = agent, timeout, _Clock()
        host = str(Path(__file__).resolve().with_name("host.py"))
        self._command, self._folder = [python or sys.executable, host, url, agent, str(memory or 0)], os.getcwd()
        self._numbers, self._starting, self._closed = itertools.count(), threading.Lock(), threading.Event()
        self._start()
        threading.Thread(target=self._watch, name="programs' time", daemon=True).start()

    def make_plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row for JSON. Raises ConfigError if JSON cannot hold it."""
        plain = {}
        for name, value in row.items():
            try:
                plain[name] = _to_json(value)
            except TypeError as error:
                how = f"programs get rows as JSON, which holds no {error}: leave the column {name!r} out of the dataset"
                raise ConfigError(f"agent={self._agent!r}: {how}") from None
        return plain

    def begin(self, row: Mapping[str, Any], key: str, seed: int) -> AgentProgram:
        """Start a program with a row of the dataset, the key of its requests, and the seed, below 2^32, of its random
        numbers.

        Raises ConfigError if JSON cannot hold the row, RewardError if no host starts, CancelledError after `close`.
        """
        program = AgentProgram(next(self._numbers), self._clock.now)
        order = {"begin": program.number, "row": self.make_plain(row), "key": key, "seed": seed}
        while True:
            with self._starting:
                if self._host.is_lost:
                    self._start()
                host = self._host
            if host.begin(program, order):
                return program

    def kill(self, program: AgentProgram, failure: str) -> None:
        """Kill a program with all that it started. Its result is the failure of the first kill."""
        if not program.failure:
            program.failure, program.killed = failure, self._clock.now()
        self._host.send({"kill": program.number})  # another host knows no such number

    def close(self) -> None:
        """Kill all programs; their failure is "stopped"."""
        self._closed.set()
        self._host.stop("stopped")

    def _start(self) -> None:
        refusal = f"agent={self._agent!r}: "
        for _ in range(_STARTS):
            try:
                host = self._host = _Host(self._command, self._folder)
            except OSError as error:
                how = f"the interpreter {self._command[0]} cannot be started ({error.strerror}): name another"
                raise ConfigError(refusal + how) from None
            if self._closed.is_set():
                host.stop("stopped")
                raise CancelledError
            try:
                refused = host.ready.result(_START_SECONDS)
            except TimeoutError:
                host.stop("")
                how = f"its process was not ready in {_START_SECONDS:.0f} s as it imported your file"
                raise RewardError(refusal + how, host.printed) from None
            if refused:
                raise ConfigError(refusal + refused)
            if not host.is_lost:
                return
        how = f"its process ended {_STARTS} times as it imported your file (exit code {host.process.wait()})"
        raise RewardError(f"{refusal}{how}: {one_line(host.printed[-300:])}", host.printed)

    def _watch(self) -> None:
        """Kill the programs whose time is over, until `close`."""
        while not self._closed.wait(SLICE):
            for program in self._host.running():
                if program.spent() > self._timeout and not program.failure:
                    self.kill(program, "timeout")
                if self._clock.now() > program.killed + END_SECONDS:  # the system holds it, as a lost disk does
                    self._host.end(program.number, {})


class _Clock:
    """Counts seconds, at most those of `awake_since` between two looks, which `_watch` takes."""

    def __init__(self) -> None:
        self._lock, self._counted, self._looked = threading.Lock(), 0.0, time.monotonic()

    def now(self) -> float:
        with self._lock:
            self._counted += awake_since(self._looked)
            self._looked = time.monotonic()
            return self._counted


class _Host:
    """A process of grpo/agents/host.py, and the programs in it."""

    def __init__(self, command: list[str], folder: str) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # Programs must not each take all cores. Sets have the same order when a run resumes.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **os.environ}
        # What is installed beside the interpreter, as verifiers' uv, is found last.
        environment["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(command[0])])
        # Ctrl-C is for the trainer.
        self.process = subprocess.Popen(command, **pipes, start_new_session=True, cwd=folder, env=environment)
        self.ready: Future[str] = Future()  # why the agent cannot be run, or ""
        self.is_lost, self.printed = False, ""
        self._failure = HOST_LOST  # of the programs that its end ends
        self._running: dict[int, AgentProgram] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        prints = self.process.stderr, self._keep
        self._printer = threading.Thread(target=PRINTS.read_all, args=prints, name="programs' prints", daemon=True)
        self._printer.start()
        self._reader = threading.Thread(target=self._read, name="programs' ends", daemon=True)
        self._reader.start()

    def begin(self, program: AgentProgram, order: dict[str, Any]) -> bool:
        """Start a program; return False if this process has ended before."""
        with self._lock:
            if self.is_lost:
                return False
            self._running[program.number] = program
        self.send(order)
        return True

    def send(self, order: dict[str, Any]) -> None:
        # If the process has ended, the reader ends its programs.
        with self._sending, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def running(self) -> list[AgentProgram]:
        with self._lock:
            return [*self._running.values()]

    def end(self, number: int, report: dict[str, str]) -> None:
        """Give a program its result, of the host's report."""
        with self._lock:
            program = self._running.pop(number, None)
        if program is not None:
            failure = {"failure": program.failure} if program.failure else {}
            program.result.set_result(_read_ending(report | failure))

    def stop(self, failure: str) -> None:
        """Kill everything. This is the failure of the programs that run."""
        self._failure = failure
        if self._sending.acquire(timeout=1.0):  # else the process has stopped, and reads no orders
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            self._sending.release()
            self._reader.join(END_SECONDS)
        self.process.kill()
        self._reader.join(END_SECONDS)

    def _keep(self, text: str) -> None:
        self.printed = (self.printed + text)[-_SHOWN:]

    def _read(self) -> None:
        try:
            with self.process.stdout as lines:
                for line in lines:
                    report = json.loads(line)
                    if "number" in report:
                        self.end(report["number"], report)
                    else:
                        self.ready.set_result(report.get("refused", ""))
        finally:
            self.process.kill()
            self.process.wait()
            self._printer.join(1.0)
            with self._lock:
                self.is_lost = True
            for program in self.running():
                self.end(program.number, {"failure": self._failure, "text": self.printed})
            if not self.ready.done():
                self.ready.set_result("")
            with self._sending, contextlib.suppress(OSError):
                self.process.stdin.close()


def _read_ending(report: dict[str, str]) -> Ending:
    if "failure" in report:
        return Ending(failure=report["failure"], text=report.get("text", ""))
    try:
        return Ending(answer=_read_answer(json.loads(report["answer"])))
    except (ValueError, RecursionError):
        text = f"its answer was {one_line(report['answer'])}: return, or print as JSON in the last line, {_WANTED}"
        return Ending(failure="unreadable reward", text=text)


def _read_answer(value: Any) -> Answer:
    """Make an answer of the value that a program returned. Raises ValueError if it is none."""
    if not isinstance(value, dict):
        value = {"reward": value, "passed": value if isinstance(value, bool) else None}
    passed, parts = value.get("passed"), value.get("parts", {})
    is_known = "reward" in value and value.keys() <= {"reward", "passed", "parts"}
    if not is_known or not isinstance(passed, bool | None) or not isinstance(parts, dict):
        raise ValueError
    reward = None if value["reward"] is None else _read_number(value["reward"])
    return Answer(reward=reward, passed=passed, parts={name: _read_number(part) for name, part in parts.items()})


def _read_number(value: Any) -> float:
    if not isinstance(value, bool) and not is_number(value):
        raise ValueError
    return float(value)


def _to_json(value: Any) -> Any:
    """Return a value of a dataset for JSON: dates as ISO 8601, bytes as base64, seconds, lists; NaN is null. Raises
    TypeError, with the name of its type, of any other, as a picture."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [*map(_to_json, value)]
    if isinstance(value, float | decimal.Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if hasattr(value, "tolist"):  # of NumPy or torch
        return _to_json(value.tolist())
    raise TypeError(type(value).__name__)
