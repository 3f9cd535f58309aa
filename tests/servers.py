"""Servers to test with: one that holds its requests, and a fake one that answers as told."""

import subprocess
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import requests
import torch
from conftest import running_server
from faulty_server import code_for, hold_passes
from models import by_hand

from grpo.client.reference import ReferenceClient
from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import LogprobsAnswer, encode_answer


def exact(model, prompt, completions, temperature=1.0) -> torch.Tensor:
    """float64 log-softmax of the model's own logits, one unpadded sequence at a time."""
    with torch.no_grad():
        return by_hand(model, [(prompt, completion) for completion in completions], temperature)[0]


def refusal(answer: requests.Response) -> tuple[int, str, str]:
    assert answer.headers["Content-Type"] == "application/json"
    error = answer.json()["error"]
    assert answer.json().keys() == {"error"} and error.keys() == {"code", "message"}
    return answer.status_code, error["code"], error["message"]


@contextmanager
def holding_server(model_folder, tmp_path, *options):
    """A ready server whose scorer waits for the file that is yielded with it."""
    go = tmp_path / "go"
    with running_server(model_folder, tmp_path, *options, code=code_for(hold_passes, str(go))) as server:
        yield server, go


def status(server) -> dict:
    return requests.get(server.url + "/status", timeout=20).json()


def wait_until(happened, seconds=20, process: subprocess.Popen | None = None) -> None:
    """Wait for something, that a process does which must not end before."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_requests(server, number: int) -> None:
    wait_until(lambda: status(server)["queue"]["requests"] == number)


PROMPT, COMPLETIONS = [5, 6], [[7, 8, 9], [], [10]]


@contextmanager
def open_client(*urls, **options):
    settings = {"ref_startup_timeout": 1, "ref_deadline": 2, "ref_request_timeout": 1} | options
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    client = ReferenceClient(parse_arguments(TrainerConfig, "", ["--ref_servers", *urls, *words]))
    try:
        yield client
    finally:
        client.close()


def request(client: ReferenceClient, prompt=PROMPT, completions=COMPLETIONS, name="g") -> Future:
    """Request the log-probs of one group; the future gives an array for each completion."""
    return client.request_groups([(name, prompt, completions)])[0]


MODEL = ModelInfo(name="m", fingerprint="f", tokenizer_fingerprint="tokens", vocab_size=100, max_length=1024)
HEALTH = ServerInfo(status="ready", model=MODEL)


def answer(fingerprint="f") -> tuple[int, dict, bytes]:
    return (
        200,
        {},
        encode_answer(LogprobsAnswer(logprobs=np.array([-1, -2, -3, -4], np.float32), model_fingerprint=fingerprint)),
    )


@contextmanager
def fake(post=lambda count: answer(), health=lambda: (200, {}, HEALTH.to_json()), port=0):
    """An HTTP server. `post(count)` answers requests, `health()` /health: both return (status, headers, body)."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                server.requests += 1
                count = server.requests - 1
            self.answer(*post(count))

        def do_GET(self):
            with lock:
                server.health_checks += 1
            self.answer(*health())

        def answer(self, status, headers, body):
            self.send_response(status)
            for name, value in (headers | {"Content-Length": len(body)}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    class Listener(ThreadingHTTPServer):
        request_queue_size = 100  # a connection that finds no place in it is a second late
        requests = health_checks = 0

        def handle_error(self, request, address):
            pass  # a client that has gone

    with Listener(("127.0.0.1", port), Handler) as server:
        server.port, server.url = server.server_port, f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
