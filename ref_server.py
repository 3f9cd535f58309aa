"""The reference model in a process of its own: rollouts come in over HTTP, log-probs go out.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                      # the defaults: Qwen2.5-1.5B-Instruct on port 59875
    python ref_server.py --config configs/demo_cpu.yaml              # the file that the trainer reads
    python ref_server.py --task reward --model_name_or_path org/rm   # a reward model instead: texts in, scores out

Read it from the top: what it serves, how it listens, how it starts and stops. One worker thread owns the model
(grpo/scorer.py); the web server's threads only parse, queue and wait. The wire is described in docs/protocol.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import bottle

from grpo import protocol
from grpo.arguments import parse_arguments
from grpo.config import ConfigError
from grpo.http_server import THREADS, HttpServer
from grpo.monitor import SUMMARY_SECONDS, Monitor
from grpo.protocol import Health, LogprobsAnswer, LogprobsRequest, ProtocolError
from grpo.reward_protocol import RewardAnswer
from grpo.server_config import ServerConfig

log = logging.getLogger("ref_server")

IN_HAND = THREADS - 8  # requests that wait for the model; the other threads keep /health and refusals quick
UPDATE_PATHS = (protocol.WEIGHTS_PATH, protocol.COMMIT_PATH)
PAGE = Path(__file__).with_name("grpo") / "page.html"
OPEN_PATHS = (protocol.PAGE_PATH, protocol.HEALTH_PATH)  # without a token the one is empty, the other says "ok"
# The page shows what strangers sent; whatever gets into it, it may load nothing and talk to nobody else.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Service:
    """What the HTTP threads share: the state, and once the model is loaded, the scorer."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.health = Health(status="loading", model=config.model_name_or_path, task=config.task)
        self.monitor = Monitor()
        self.scorer = self.updates = None
        self.batch_tokens = 0
        self.death: Exception | None = None
        self.stop = threading.Event()
        # JSON and tokens take many times the body's size while they are read: one request's at a time.
        self.reading = threading.Lock()
        self.read_texts = None
        self._changing = threading.Lock()

    def load(self) -> None:
        """Load the model and begin to score. Raises ConfigError where there is no such model."""
        import torch

        from grpo.model import describe, device_memory, load_reference, load_tokenizer, make_batcher
        from grpo.scorer import Scorer, completion_logprobs
        from grpo.updates import Updates

        config, device = self.config, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            self.monitor.device_memory = device_memory
        if config.task == "reward":
            from grpo.reward_model import PADDED, describe_reward, load_reward_model, read_request, scores_for_queue

            name = config.model_name_or_path
            model, tokenizer = load_reward_model(config, "model_name_or_path", name, device)
            health, batcher, compute = describe_reward(model, tokenizer, name), PADDED, scores_for_queue
            self.read_texts = partial(read_request, tokenizer)
        else:
            tokenizer, model = load_tokenizer(config), load_reference(config, device)
            health = describe(model, tokenizer, config.model_name_or_path)
            batcher, compute = make_batcher(model, tokenizer.pad_token_id), completion_logprobs
        self.batch_tokens = config.batch_tokens(device.type)
        self.scorer = Scorer(
            model,
            batcher,
            self.batch_tokens,
            config.max_queue_tokens,
            IN_HAND,
            on_death=self._worker_died,
            on_pass=self.monitor.scored,
            deterministic=config.deterministic,
            compute=compute,
        )
        # A piece may be on its way for body_timeout.
        patience = 2 * config.body_timeout
        self.updates = Updates(self.scorer, model, health, config.update_folder, patience, on_swap=self._swapped)
        longest = min(config.max_length or health.max_length, health.max_length)
        self.health = replace(health, max_length=longest, takes_updates=config.update_folder is not None)

    def change_health(self, **changes) -> None:
        with self._changing:
            self.health = replace(self.health, **changes)

    def _swapped(self, fingerprint: str, sha256: str) -> None:
        name = f"{self.config.model_name_or_path}, updated to {sha256[:12]}"
        self.change_health(model=name, model_fingerprint=fingerprint)

    def _worker_died(self, death: Exception) -> None:
        self.death = death
        self.stop.set()

    def allows(self, authorization: str) -> bool:
        """Whether a request with this header may know and ask everything."""
        if self.config.token is None:
            return True
        # Digests, because compare_digest tells by its time whether the lengths are the same.
        sent, right = (hashlib.sha256(text.encode()) for text in (authorization, f"Bearer {self.config.token}"))
        return hmac.compare_digest(sent.digest(), right.digest())

    def refuse(self, path: str, headers: dict[str, str]) -> ProtocolError | None:
        """Why a request is not worth its body. `headers` has them in CGI's spelling."""
        if self.allows(headers.get("AUTHORIZATION", "")):
            if path in UPDATE_PATHS and self.config.update_folder is None:
                return ProtocolError(
                    403, "no_updates", "this server takes no new weights: it runs without --update_folder"
                )
            return None
        if path not in OPEN_PATHS:
            return ProtocolError(401, "unauthorized", "send 'Authorization: Bearer TOKEN' with the server's token")
        if headers.get("CONTENT_LENGTH", "0") != "0":
            return ProtocolError(413, "request_entity_too_large", f"{path} takes no body")
        return None

    def read(self, body: bytes) -> LogprobsRequest:
        """Raises ProtocolError: for a request that cannot be answered, or a server that cannot answer now."""
        self.check_ready()
        config, health = self.config, self.health
        limits = health.max_length, config.max_request_sequences, config.max_request_tokens
        if config.task == "reward":
            with self.reading:
                return self.read_texts(body, *limits)
        return protocol.decode_request(body, health.vocab_size, *limits)

    def check_ready(self) -> None:
        """Raises ProtocolError while the model cannot be asked anything."""
        if (status := self.health.status) != "ready":
            raise ProtocolError(503, status, f"the server is {status}", retry_after=2)

    def score(self, request: LogprobsRequest, sender: str) -> bytes:
        """The bytes of its answer. Raises ProtocolError for everything that goes wrong."""
        future, fingerprint = self.updates.submit(request, request.client or sender)
        own = fingerprint, request.request_id
        if self.config.task == "reward":
            return RewardAnswer(future.result(), *own).to_json()
        return protocol.encode_answer(LogprobsAnswer(future.result(), *own))

    def held(self) -> dict[str, tuple[int, int]]:
        """(tokens, requests) in hand, by client."""
        return self.scorer.held() if self.scorer else {}

    def current_health(self) -> Health:
        return replace(self.health, queue_depth=self.scorer.queue_depth if self.scorer else 0)

    def status(self) -> dict:
        """What the live page shows."""
        config, held = self.config, self.held()
        tokens, requests = (sum(one[place] for one in held.values()) for place in (0, 1))
        return {
            "health": vars(self.current_health()),
            "deterministic": config.deterministic,
            "max_batch_tokens": self.batch_tokens,
            "queue": {
                "tokens": tokens,
                "requests": requests,
                "max_tokens": config.max_queue_tokens,
                "max_requests": IN_HAND,
            },
            **self.monitor.status(held),
        }


def keep_memory_flat() -> None:
    """Let all threads share one heap of glibc: a thread's own heap is given back in pieces and gets holes.

    Without it the same work peaked anywhere from 250 to 700 MiB above the weights. Threads that run already keep
    theirs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no such trouble
        mallopt(-8, 1)  # M_ARENA_MAX


def make_app(service: Service):
    """The WSGI app: bottle's, with every answer noted by the monitor."""
    app = bottle.Bottle()

    @app.get(protocol.HEALTH_PATH)
    def health():
        now = service.current_health()
        status = 200 if now.status == "ready" else 503
        allowed = service.allows(bottle.request.get_header("Authorization", ""))
        body = now.to_json() if allowed else b'{"status": "ok"}'
        return _answer(body, status, "application/json", retry_after=None if status == 200 else 2)

    @app.post(protocol.TASK_PATHS[service.config.task])
    def work():
        note, sender = bottle.request.environ["note"], bottle.request.remote_addr or ""
        try:
            if bottle.request.content_length < 0:
                raise ProtocolError(411, "length_required", "send a Content-Length")
            request = service.read(bottle.request.environ["wsgi.input"].read())
            note |= {"client": request.client, "tokens": len(request.input_ids)}
            return _answer(service.score(request, sender), 200, protocol.CONTENT_TYPES[service.config.task])
        except ProtocolError as error:
            note["error"] = error
            return _answer(error.to_json(), error.status, "application/json", error.retry_after)

    def update(act):
        """`act(query, body)`, its answer as JSON."""
        request = bottle.request
        try:
            if request.content_length < 0:
                raise ProtocolError(411, "length_required", "send a Content-Length")
            # Any web page can make a browser post to this machine, but none can with this type.
            if request.content_type != protocol.CONTENT_TYPE:
                message = f"send 'Content-Type: {protocol.CONTENT_TYPE}'"
                raise ProtocolError(415, "unsupported_media_type", message)
            service.check_ready()
            said = act(request.query, request.environ["wsgi.input"].read())
            return _answer(json.dumps(said).encode(), 200, "application/json")
        except ProtocolError as error:
            request.environ["note"]["error"] = error
            return _answer(error.to_json(), error.status, "application/json", error.retry_after)

    @app.post(protocol.WEIGHTS_PATH)
    def weights():
        return update(lambda query, body: service.updates.add(query, body))

    @app.post(protocol.COMMIT_PATH)
    def commit():
        return update(lambda query, body: service.updates.commit(query))

    @app.get(protocol.METRICS_PATH)
    def metrics():
        return _answer(service.monitor.to_prometheus(service.held()), 200, service.monitor.CONTENT_TYPE)

    @app.get(protocol.STATUS_PATH)
    def status():
        return _answer(json.dumps(service.status()).encode(), 200, "application/json")

    @app.get(protocol.PAGE_PATH)
    def page():
        answer = _answer(PAGE.read_bytes(), 200, "text/html; charset=utf-8")
        answer.set_header("Content-Security-Policy", PAGE_POLICY)
        return answer

    paths = {route.rule: route.method for route in app.routes}

    def any_other_error(error: bottle.HTTPError):
        if error.status_code >= 500:
            log.error("a handler failed", exc_info=error.exception)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "internal")
        sentence = {
            404: f"this server answers {' '.join(paths)}; its --task is {service.config.task}",
            405: f"use {paths.get(bottle.request.path)} for {bottle.request.path}",
        }.get(error.status_code, "the server failed; its log says how")
        error.content_type = "application/json"
        said = ProtocolError(error.status_code, code, sentence)
        bottle.request.environ["note"]["error"] = said
        return said.to_json()

    app.default_error_handler = any_other_error

    def noted(environ: dict, start_response):
        began, note, status = time.perf_counter(), {}, []
        environ["note"] = note

        def start(line: str, headers: list, exc_info=None):
            status[:] = [int(line[:3])]
            return start_response(line, headers, exc_info)

        body = app(environ, start)
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        seconds = time.perf_counter() - began
        sender = environ.get("REMOTE_ADDR", "")
        service.monitor.answered(method, path if path in paths else "other", *status, seconds, sender, **note)
        return body

    return noted


def _answer(body: bytes, status: int, content_type: str, retry_after: int | None = None) -> bottle.HTTPResponse:
    headers = {"Content-Type": content_type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    return bottle.HTTPResponse(body, status, headers)


def run(config: ServerConfig) -> int:
    """Serve until a signal or the worker's death. Returns the exit code."""
    keep_memory_flat()
    service = Service(config)

    def on_refused(method: str, path: str, sender: str, error: ProtocolError) -> None:
        service.monitor.answered(method, "other", error.status, 0.0, sender, error=error)

    server = HttpServer(make_app(service), config, service.refuse, on_refused)
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
    while not service.stop.wait(SUMMARY_SECONDS):
        if said := service.monitor.summary(service.held()):
            log.info(said)
        service.updates.drop_abandoned()

    service.change_health(status="draining")
    end = time.monotonic() + config.drain_timeout
    if service.death is None:
        log.info("stopping: %d tokens in hand", service.scorer.queue_depth)
        service.scorer.close(config.drain_timeout)
    while server.unanswered and time.monotonic() < end:
        time.sleep(0.01)
    if service.death is not None:
        print("ref_server.py: the worker died; nothing can be scored any more:", file=sys.stderr)
        traceback.print_exception(service.death)
        return 1
    if left := server.unanswered:
        print(
            f"ref_server.py: error: drain_timeout={config.drain_timeout:g}: {left} requests were not answered in time: "
            "their clients will ask again; a larger value lets them finish",
            file=sys.stderr,
        )
        return 1
    log.info("stopped")
    return 0


def main() -> int:
    config = parse_arguments(ServerConfig, __doc__)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for name in ("ref_server", "grpo"):
        logging.getLogger(name).setLevel(config.log_level.upper())
    try:
        if config.estimate:
            from grpo.estimate_report import estimate_report

            print(estimate_report(config))
            return 0
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
