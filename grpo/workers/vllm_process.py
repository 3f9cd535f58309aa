"""vLLM's server as a process of this machine: started, watched while it starts, and ended with the worker."""

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

from grpo.config.console import free_port
from grpo.config.errors import one_line
from grpo.workers.engine import EngineError

START_SECONDS = 1800.0  # a large model from a slow disk, and what vLLM compiles
ADMIN_SECONDS = 900.0  # for what may read a large model's weights from a slow disk
_END_SECONDS = 20.0  # in which vLLM removes its shared memory
# The first line of the guard's input is the process group, its end the worker's: a pipe closes however a process ends.
_GUARD = 'read group; cat; kill -TERM "-$group"; sleep 10; kill -KILL "-$group"'
_LOG_BYTES = 1 << 20
# A line of the log that has an error, without what vLLM's logger puts before it; warnings print tracebacks too.
_ERROR = re.compile(
    r"^(?!.*\b(?:DEBUG|INFO|WARNING) \d).*?((?:\w+\.)*\w*(?:Error|Exception|error): .*\S)", re.MULTILINE
)
# Each process of vLLM's has an error of its own when another one has ended by one.
_CONSEQUENCES = re.compile(r"EngineDeadError|Engine core init|Engine core proc|Worker failed|WorkerProc init")


class VllmServer:
    """vLLM's server in a process group of its own, on a free port of 127.0.0.1, and the guard that ends it with the
    worker: the kernel would tell only the server of the worker's death (PR_SET_PDEATHSIG), and not vLLM's processes
    below it, which would keep the card's memory. Any thread may call all methods."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        """Start `command` with --host and --port; its output is added to `log`. Raises EngineError if that cannot be
        written."""
        try:
            output = open(log, "ab")  # noqa: SIM115 is closed below
        except OSError as error:
            raise EngineError(f"{log}: {error.strerror}") from error
        port = free_port()
        self._url, self._log = f"http://127.0.0.1:{port}", log
        self._lock, self._has_group, self._ended_by_us = threading.Lock(), True, ""
        self._log_begins = log.stat().st_size
        # The guard outlives the worker by seconds, and so must not hold the worker's output open.
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._guard = subprocess.Popen(["sh", "-c", _GUARD], start_new_session=True, **streams)
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        with output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self._server = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        self._guard.stdin.write(b"%d\n" % self._server.pid)
        self._guard.stdin.flush()

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises EngineError if it ends before, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self.has_ended(0.2):
            with suppress(requests.RequestException):
                if self._request("GET", "/health", 10.0).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM was not ready after {START_SECONDS:.0f} s; its log is {self._log}")
        raise EngineError(self._describe_end())

    def post(self, path: str, body: object = None, seconds: float | None = ADMIN_SECONDS) -> dict[str, Any]:
        """Return the JSON object of an answer; empty without a body. Waits for ever if `seconds` is None."""
        content = self.send("POST", path, body, seconds)
        with answer_of(path):
            return json.loads(content) if content else {}

    def send(self, method: str, path: str, body: object = None, seconds: float | None = ADMIN_SECONDS) -> bytes:
        """Return the body of an answer, which need not be JSON. Raises EngineError for another status than 200."""
        try:
            answer = self._request(method, path, seconds, body)
            if answer.status_code == 200:
                return answer.content
            failure = f"vLLM answered {answer.status_code}: {one_line(answer.text)}"
        except requests.RequestException as error:
            failure = type(error).__name__
        # It may just be ending, which is the reason then.
        raise EngineError(self._describe_end() if self.has_ended(3.0) else f"{path}: {failure}; its log is {self._log}")

    def count_tokens(self) -> float | None:
        """Return how many tokens the server has read and drawn; None if it does not answer. NaN, which differs from
        itself, if it does not count them (--disable-log-stats)."""
        try:
            lines = self._request("GET", "/metrics", 10.0).text.splitlines()
        except requests.RequestException:
            return None
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)]
        return sum(counts) if counts else math.nan

    def has_ended(self, seconds: float) -> bool:
        """Tell whether the server has ended, or ends within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(seconds)
        return self._server.poll() is not None

    def reason(self) -> str:
        """Return the first error in the log that no other error caused, shortened; "" without any."""
        with open(self._log, "rb") as file:
            file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            errors = _ERROR.findall(file.read().decode(errors="replace"))
        causes = [error for error in errors if not _CONSEQUENCES.search(error)]
        return one_line((causes or errors or [""])[0])

    def end(self, reason: str = "") -> None:
        """End the server and every process below it, for `reason`. Any number of times."""
        with self._lock:
            if not self._has_group:
                return
            self._ended_by_us = reason
            self._has_group = False  # once: the number may become another group's
            # All of them: the last one removes the others' shared memory, also where the server was killed.
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGTERM)
            deadline = time.monotonic() + _END_SECONDS
            while _is_running(self._server.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._guard.kill()
            self._guard.communicate()

    def _request(self, method: str, path: str, seconds: float | None, json: object = None) -> requests.Response:
        """Send a request. Raises requests.RequestException, also if the server is silent for `seconds`."""
        with requests.Session() as session:
            session.trust_env = False  # no proxy stands between this machine and itself
            # A connection is for one request: vLLM closes one that is idle for 5 s, perhaps while the next one is sent.
            session.headers["Connection"] = "close"
            return session.request(method, self._url + path, json=json, timeout=(10.0, seconds))

    def _describe_end(self) -> str:
        """Return how the server ended and why, from the reason of `end` or the log."""
        code, why = self._server.returncode, self._ended_by_us
        if not why:
            reason = self.reason()
            why = f"vLLM was killed by signal {-code}" if code < 0 else f"vLLM ended with code {code}"
            why += f": {reason}" if reason else ""
        return f"{why}; its log is {self._log}"


def _is_running(group: int) -> bool:
    """Tell whether a process of a group runs. Zombies do not; a container may keep them for ever."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group, *_ = file.read_text().rpartition(")")[2].split()
            if int(process_group) == group and state != "Z":
                return True
    return False


@contextmanager
def answer_of(path: str) -> Iterator[None]:
    """Turn errors of reading an answer, which another version of vLLM may give, into an EngineError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{path}: an answer that this version does not know ({error!r})") from error
