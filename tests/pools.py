"""A pool of rollouts to test with, and what a trainer tells it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode
from wsgiref.util import setup_testing_defaults

import numpy as np
import torch
from conftest import ENVIRONMENT, REPOSITORY, Server, running_server
from faulty_server import code_for, shorten_leases
from safetensors.numpy import save
from servers import status, wait_until
from stored import PROBE, run_info, sha, weights
from trainer_runs import start
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo.config.server import ServerConfig
from grpo.model.load import eos_token_ids
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.pictures import PictureProcessor, Vision
from grpo.model.weights_file import named_weights, write_weights
from grpo.pool.client import PoolClient
from grpo.pool.delta import make_delta, sha256_of
from grpo.pool.pool_service import PoolService
from grpo.pool.protocol import GroupResult, Lease, Probe, Task, Version
from grpo.pool.task_tensors import decode_drawn, decode_tasks, encode_drawn
from ref_server import make_app

RUN = run_info(name="runs/test", num_generations=4, max_completion_length=12, temperature=0.8)
BYTES = {"Content-Type": "application/octet-stream"}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [15], [5, 9], [20, 21, 22]]


def running_pool(folder: Path, *options: str, **server) -> AbstractContextManager[Server]:
    """Start a pool of rollouts with the file run.sqlite of a folder."""
    arguments = ["--task", "rollouts", "--pool_file", str(folder / "run.sqlite"), *options]
    return running_server(None, folder, *arguments, **server)


class Pool:
    """A pool's application in this process."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.start()
        self.weights = {}  # SHA-256 of each version's weights, as put last

    def start(self):
        self.service = PoolService(self.config)
        self.service.load()
        self.app = make_app(self.service)

    def ask(self, method, path, body=b"", headers=None, is_gone=lambda: False, **query) -> SimpleNamespace:
        if path.islower() and not path.startswith("/"):
            path = f"/v1/rollouts/{path}"
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": urlencode(query)}
        environ |= {"waitress.client_disconnected": is_gone, "REMOTE_ADDR": "127.0.0.1"}
        if method == "POST":
            environ |= {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
        for name, value in (headers or {} if method == "GET" else headers or BYTES).items():
            environ[name.upper().replace("-", "_") if name == "Content-Type" else f"HTTP_{name.upper()}"] = value
        setup_testing_defaults(environ)
        began = []
        body = b"".join(self.app(environ, lambda line, headers, exc_info=None: began.extend((line, dict(headers)))))
        answer = SimpleNamespace(status=int(began[0][:3]), headers=began[1], body=body)
        if answer.status >= 400:
            answer.refusal = answer.status, *json.loads(body)["error"].values()
        return answer

    def get(self, path, **rest):
        return self.ask("GET", path, **rest)

    def post(self, path, body=b"", **rest):
        return self.ask("POST", path, body, **rest)

    def put_file(self, data: bytes) -> None:
        answer = self.post("files", data, sha256=sha(data), size=len(data), offset=0)
        assert json.loads(answer.body) == {"received": len(data)}

    def put_version(self, number: int, salt: int = 0) -> Version:
        data = weights(number + salt)
        self.put_file(data)
        version = Version(
            version=number, sha256=sha(data), size=len(data), whole=True, base=None, delta=None, probe=PROBE
        )
        assert self.post("versions", version.to_json()).status == 200
        self.weights[number] = version.sha256
        return version

    def lease(self, name="w", room=1, holds=(), wait=0.0, **rest) -> list[Task]:
        answer = self.post(
            "lease", Lease(worker=name, room=room, holds=[[*key] for key in holds], wait=wait).to_json(), **rest
        )
        assert answer.status == 200, answer.refusal
        return decode_tasks(answer.body, RUN.vocab_size)

    def results(self, *groups, name="w", weights=None) -> SimpleNamespace:
        """Send groups as drawn by these weights, by default by those that are there."""
        weights = self.weights if weights is None else weights
        return self.post("results", encode_drawn(groups, weights.items()), worker=name)

    def send(self, *groups, **rest) -> list[str]:
        answer = self.results(*groups, **rest)
        assert answer.status == 200, answer.refusal
        return json.loads(answer.body)["results"]

    def take(self, *keys, wait=0.0, **rest):
        answer = self.post("groups", json.dumps({"groups": keys, "wait": wait}).encode(), **rest)
        assert answer.status == 200, answer.refusal
        return decode_drawn(answer.body)

    def status(self) -> dict:
        return json.loads(self.get("/status").body)


def score(
    model: PreTrainedModel,
    prompt: list[int],
    completions: list[list[int]],
    temperature: float,
    processor: PictureProcessor | None = None,
) -> list[list]:
    """Return the log-probs of each completion's ids."""
    vision = None if processor is None else Vision(processor, model)
    batch = Batcher(0, packs=False, vision=vision).make([(prompt, ids) for ids in completions], "cpu")
    with torch.no_grad():
        values = token_logprobs(model, batch, temperature)[0]
    return [part.tolist() for part in values.split([len(ids) for ids in completions])]


def distances(
    task: Task,
    group: GroupResult,
    temperature: float,
    policies: Mapping[int, PreTrainedModel],
    processor: PictureProcessor | None = None,
) -> list[float]:
    """Return how far each completion's log-probs are, at most, from those of the versions that its tokens name."""
    scores = {
        number: score(policy, task.prompt_ids, group.completions, temperature, processor)
        for number, policy in policies.items()
    }
    rows = enumerate(zip(group.logprobs, group.versions, group.masks, strict=True))
    return [
        max(
            abs(scores[version][row][place] - logprob)
            for place, (logprob, version, is_drawn) in enumerate(zip(*columns, strict=True))
            if is_drawn
        )
        for row, columns in rows
    ]


class Trainer:
    """A trainer as a pool sees one: its policy changes when a test says so."""

    def __init__(self, client: PoolClient, model_folder: Path, folder: Path, **changes):
        """`changes` are fields of RunInfo."""
        folder.mkdir(exist_ok=True)
        self.client, self.folder, self.number = client, folder, -1
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        files = [path for path in model_folder.iterdir() if path.suffix != ".safetensors"]
        packed = save({path.name: np.frombuffer(path.read_bytes(), np.uint8) for path in files})
        sha256 = hashlib.sha256(packed).hexdigest()
        ends = eos_token_ids(self.model, self.tokenizer)
        of_model = {"vocab_size": self.model.config.vocab_size, "eos_token_ids": ends, "model_files": sha256}
        self.run = replace(RUN, **of_model | changes)
        client.put_run(self.run)
        client.send_file(packed, sha256)

    def learn(self, seed: int) -> None:
        """Change some of the weights a little."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += 0.05 * torch.randn_like(weight) * (torch.rand_like(weight) < 0.05)

    def publish(self, number: int, whole: bool = True, delta: bool = False) -> Version:
        """Send the policy as this version, as a whole file or as the delta from the last version, or both."""
        new, old, between = (self.folder / name for name in ("new", "old", "between"))
        sha256, base, delta_sha256 = write_weights(new, named_weights(self.model)), None, None
        if delta:
            make_delta(old, new, delta=between, limit=new.stat().st_size)
            base, delta_sha256 = self.number, sha256_of(between)
            self.client.send_file(between, delta_sha256)
        if whole:
            self.client.send_file(new, sha256)
        version = Version(
            version=number,
            sha256=sha256,
            size=new.stat().st_size,
            whole=whole,
            base=base,
            delta=delta_sha256,
            probe=self.probe(),
        )
        self.client.put_version(version)
        shutil.move(new, old)
        self.number = number
        return version

    def probe(self) -> Probe:
        prompt, completion = [5, 6, 7], [8, 9, 10, 11, 12, 13]
        (logprobs,) = score(self.model, prompt, [completion], 1.0)
        return Probe(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)

    def put_tasks(self, version: int, groups: range, attempt: int = 0) -> list[Task]:
        tasks = [
            Task(group=group, attempt=attempt, version=version, prompt_ids=PROMPTS[group % len(PROMPTS)])
            for group in groups
        ]
        self.client.put_tasks(tasks)
        return tasks

    def wait(self, tasks: list[Task], seconds: float = 30.0) -> list:
        """Return what was drawn of the tasks, in their order, once all of it is."""
        drawn, deadline = {}, time.monotonic() + seconds
        while len(drawn) < len(tasks):
            missing = [task.key for task in tasks if task.key not in drawn]
            found = self.client.take(missing, min(seconds, 30.0))
            assert found or time.monotonic() < deadline, f"not all after {seconds} s: {missing}"
            drawn |= {group.key: group for group in found}
        return [drawn[task.key] for task in tasks]


# Of real runs: their processes, and what a pool's file holds.


class Worker:
    """A `generate.py` process that keeps its weights and its log in a folder."""

    def __init__(self, url: str, folder: Path, name: str, *options: str):
        self.url, self.folder, self.name, self.log = url, folder, name, folder / f"{name}.log"
        words = ["generate.py", "--engine", "transformers", "--pool", url, "--name", name, *options]
        with open(self.log, "a") as output:
            command = [sys.executable, "-u", *words, "--weights_folder", str(folder / name)]
            pipes = {"stdout": output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, **pipes)

    def end(self, number: int = signal.SIGKILL) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def workers(url: str, folder: Path, *names: str):
    """Workers on their way, in a list: what is in it at the end is ended."""
    running = [Worker(url, folder, name) for name in names]
    try:
        yield running
    finally:
        for worker in running:
            worker.end()


def draw_by_workers(words: Callable[[str], list[str]], folder: Path, mine: Sequence[str], end: Callable) -> str:
    """Run a trainer to its good end, whose words follow from the pool's address. One worker lacks the run's code, and
    ends; one has it by the options `mine`, and is given to `end` in the middle of a round; another takes its place.
    Return what the first one wrote."""
    with running_pool(folder, code=code_for(shorten_leases, 10.0)) as served, ExitStack() as running:
        process = start(*words(served.url))
        running.callback(process.kill)
        workers = [Worker(served.url, folder, "none"), Worker(served.url, folder, "a", *mine)]
        for worker in workers:
            running.callback(worker.end)
        wait_until(lambda: any(row["drawn"] for row in status(served)["rounds"]), 120, process)
        end(workers[1])
        running.callback(Worker(served.url, folder, "b", *mine).end)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert workers[0].process.wait(timeout=60) == 2
    return workers[0].log.read_text()


def drawn(folder: Path) -> list[tuple]:
    """Every task with its completions, as the pool's file has them."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as file:
        columns = "group_id, attempt, version, prompt_ids, drawn"
        return file.execute(f"SELECT {columns} FROM tasks ORDER BY group_id, attempt").fetchall()
