"""The reference model in a process of its own: rollouts come in over HTTP, log-probs go out.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                      # the defaults: Qwen2.5-1.5B-Instruct on port 59875
    python ref_server.py --config configs/demo_cpu.yaml              # the file that the trainer reads

Read it from the top: what it serves, how it listens, how it starts and stops. One worker thread owns the model
(grpo/scorer.py); the web server's threads only parse, queue and wait. The wire is described in docs/protocol.md.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import FrameType

import bottle
import waitress
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer
from waitress.task import ErrorTask

from grpo import protocol
from grpo.arguments import parse_arguments
from grpo.config import ConfigError, ServerConfig
from grpo.protocol import Health, LogprobsAnswer, ProtocolError

log = logging.getLogger("ref_server")

THREADS = 128  # each waits for the worker on behalf of one request
IN_HAND = THREADS - 8  # the others keep /health and refusals quick
DRAIN_SECONDS = 60


class Service:
    """What the HTTP threads share: the state, and once the model is loaded, the scorer."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.health = Health(status="loading", model=config.model_name_or_path)
        self.scorer = None
        self.death: Exception | None = None
        self.stop = threading.Event()
        self.places = threading.BoundedSemaphore(IN_HAND)

    def load(self) -> None:
        """Load the model and begin to score. Raises ConfigError where there is no such model."""
        import torch

        from grpo.model import describe, load_reference, load_tokenizer, make_batcher
        from grpo.scorer import Scorer

        config, device = self.config, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            keep_memory_flat()
        tokenizer, model = load_tokenizer(config), load_reference(config, device)
        health = describe(model, tokenizer, config.model_name_or_path)
        budget = config.max_batch_tokens or (16384 if device.type == "cuda" else 4096)
        batcher = make_batcher(model, tokenizer.pad_token_id)
        self.scorer = Scorer(model, batcher, budget, config.max_queue_tokens, self._worker_died)
        self.health = replace(health, max_length=min(config.max_length or health.max_length, health.max_length))

    def _worker_died(self, death: Exception) -> None:
        self.death = death
        self.stop.set()

    def score(self, body: bytes, sender: str) -> bytes:
        """Bytes of a request -> bytes of its answer. Raises ProtocolError for everything that goes wrong."""
        health, scorer = self.health, self.scorer
        if health.status != "ready":
            raise ProtocolError(503, health.status, f"the server is {health.status}", retry_after=2)
        request = protocol.decode_request(body, health.vocab_size, health.max_length)
        if not self.places.acquire(blocking=False):
            raise ProtocolError(503, "busy", f"{IN_HAND} requests are waiting already: come back in 1 s", retry_after=1)
        try:
            logprobs = scorer.submit(request, request.client or sender).result()
        finally:
            self.places.release()
        return protocol.encode_answer(LogprobsAnswer(logprobs, health.model_fingerprint, request.request_id))

    def current_health(self) -> Health:
        return replace(self.health, queue_depth=self.scorer.queue_depth if self.scorer else 0)


def keep_memory_flat() -> None:
    """Let all threads share one heap of glibc, on a CPU: a thread's own heap is given back in pieces and gets holes.

    Without it the same work peaked anywhere from 250 to 700 MiB above the weights.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no such trouble
        mallopt(-8, 1)  # M_ARENA_MAX


def make_app(service: Service) -> bottle.Bottle:
    app = bottle.Bottle()

    def allowed() -> bool:
        token, header = service.config.token, bottle.request.get_header("Authorization", "")
        return token is None or hmac.compare_digest(header.encode(), f"Bearer {token}".encode())

    @app.get(protocol.HEALTH_PATH)
    def health():
        now = service.current_health()
        status = 200 if now.status == "ready" else 503
        body = now.to_json() if allowed() else b'{"status": "ok"}'
        return _answer(body, status, "application/json", retry_after=None if status == 200 else 2)

    @app.post(protocol.LOGPROBS_PATH)
    def logprobs():
        try:
            if not allowed():
                raise ProtocolError(401, "unauthorized", "send 'Authorization: Bearer TOKEN' with the server's token")
            if bottle.request.content_length < 0:
                raise ProtocolError(411, "length_required", "send a Content-Length")
            body = bottle.request.environ["wsgi.input"].read()
            return _answer(service.score(body, bottle.request.remote_addr or ""), 200, protocol.CONTENT_TYPE)
        except ProtocolError as error:
            return _error(error)

    def any_other_error(error: bottle.HTTPError):
        if error.status_code >= 500:
            log.error("a handler failed", exc_info=error.exception)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "internal")
        sentence = {
            404: f"this server answers {protocol.LOGPROBS_PATH} and {protocol.HEALTH_PATH}",
            405: f"use POST for {protocol.LOGPROBS_PATH} and GET for {protocol.HEALTH_PATH}",
        }.get(error.status_code, "the server failed; its log says how")
        error.content_type = "application/json"
        return ProtocolError(error.status_code, code, sentence).to_json()

    app.default_error_handler = any_other_error
    return app


def _error(error: ProtocolError) -> bottle.HTTPResponse:
    return _answer(error.to_json(), error.status, "application/json", error.retry_after)


def _answer(body: bytes, status: int, content_type: str, retry_after: int | None = None) -> bottle.HTTPResponse:
    response = bottle.HTTPResponse(body, status, {"Content-Type": content_type})
    if retry_after is not None:
        response.set_header("Retry-After", str(retry_after))
    return response


class _JsonErrorTask(ErrorTask):
    """What waitress refuses before the app sees it (too large a body, not HTTP) is JSON like every other error."""

    def execute(self) -> None:
        refused = self.request.error
        code = refused.reason.lower().replace(" ", "_")
        body = ProtocolError(refused.code, code, " ".join(refused.body.split())).to_json()
        self.status = f"{refused.code} {refused.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):
    error_task_class = _JsonErrorTask


def listen(config: ServerConfig, app: bottle.Bottle) -> BaseWSGIServer:
    """A bound server, not yet running. Raises ConfigError where the address is taken or not this machine's."""
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "another process listens there: stop it, or choose another port" if taken else "choose another host"
        raise ConfigError(f"host={config.host!r} port={config.port}: {error.strerror or error}: {remedy}") from error
    server = waitress.create_server(
        app,
        sockets=[listener],
        threads=THREADS,
        max_request_body_size=(config.max_request_mb << 20) + 1,  # waitress refuses the very limit
        connection_limit=1000,  # beyond it a connection waits to be accepted, a /health too
        asyncore_use_poll=True,  # select() would end at 1,024 open files
        ident=None,
    )
    server.channel_class = _Channel
    return server


def run(config: ServerConfig) -> int:
    """Serve until a signal or the worker's death. Returns the exit code."""
    service = Service(config)
    server = listen(config, make_app(service))
    # Listening before loading: a taken port is known at once, and /health can say "loading".
    threading.Thread(target=server.run, name="http", daemon=True).start()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if service.health.status == "loading":
            raise SystemExit(0)
        service.stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)

    url = f"http://{config.host}:{server.effective_port}"
    log.info("loading %s; listening on %s", config.model_name_or_path, url)
    service.load()
    health = service.health
    log.info("ready: %s, %s on %s, up to %d tokens a sequence", url, health.dtype, health.device, health.max_length)
    service.stop.wait()

    service.health = replace(health, status="draining")
    if service.death is None:
        log.info("stopping: %d tokens in hand", service.scorer.queue_depth)
        service.scorer.close()
    deadline = time.monotonic() + DRAIN_SECONDS
    while _unsent(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    if service.death is not None:
        traceback.print_exception(service.death)
        print("ref_server.py: the worker died; nothing can be scored any more", file=sys.stderr)
        return 1
    log.info("stopped")
    return 0


def _unsent(server: BaseWSGIServer) -> bool:
    return any(channel.requests or channel.total_outbufs_len for channel in list(server.active_channels.values()))


def main() -> int:
    config = parse_arguments(ServerConfig, __doc__)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    try:
        return run(config)
    except ConfigError as error:
        print(f"ref_server.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    # The threads of the web server and a broken device must not keep a finished process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
