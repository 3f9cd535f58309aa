"""The reference model in a process of its own: rollouts come in over HTTP, log-probs go out.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                      # the defaults: Qwen2.5-1.5B-Instruct on port 59875
    python ref_server.py --config configs/demo_cpu.yaml              # the file that the trainer reads
    python ref_server.py --task reward --model_name_or_path org/rm   # a reward model instead: texts in, scores out

Read it from the top: what it answers where, how it starts and stops. The web server's threads only parse, queue and
wait (grpo/server/service.py); one worker thread owns the model (grpo/server/worker.py). The wire is described in
docs/protocol.md.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import bottle

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.server import ServerConfig
from grpo.server.http import HttpServer
from grpo.server.monitor import SUMMARY_SECONDS
from grpo.server.service import Service
from grpo.wire.errors import ProtocolError
from grpo.wire.paths import (
    COMMIT_PATH,
    CONTENT_TYPE,
    CONTENT_TYPES,
    HEALTH_PATH,
    METRICS_PATH,
    PAGE_PATH,
    STATUS_PATH,
    TASK_PATHS,
    WEIGHTS_PATH,
)

log = logging.getLogger("ref_server")

PAGE = Path(__file__).with_name("grpo").joinpath("server/page.html").read_bytes()
# The page shows what strangers sent; whatever gets into it, it may load nothing and talk to nobody else.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


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

    def refusable(handler):
        """A handler that may raise ProtocolError as its answer."""

        def answer_or_refusal(*args, **kwargs):
            try:
                if bottle.request.method == "POST" and bottle.request.content_length < 0:
                    raise ProtocolError(411, "length_required", "send a Content-Length")
                return handler(*args, **kwargs)
            except ProtocolError as error:
                # A traceback keeps its frames, and they the body. One of them knows the future that knows the error:
                # only a full garbage collection, which is rare, would find that circle.
                error.__traceback__ = error.__cause__ = error.__context__ = None
                bottle.request.environ["note"]["error"] = error
                return _answer(error.to_json(), error.status, "application/json", error.retry_after)

        return answer_or_refusal

    app.install(refusable)

    def body() -> bytes:
        with bottle.request.environ["wsgi.input"] as file:  # closed, it is neither in memory nor on the disk any more
            return file.read()

    def updates():
        # Any web page can make a browser post to this machine, but none can with this type.
        if bottle.request.content_type != CONTENT_TYPE:
            message = f"send 'Content-Type: {CONTENT_TYPE}'"
            raise ProtocolError(415, "unsupported_media_type", message)
        service.check_ready()
        return service.updates

    @app.get(HEALTH_PATH)
    def health():
        now = service.current_info()
        status = 200 if now.status == "ready" else 503
        allowed = service.allows(bottle.request.get_header("Authorization", ""))
        said = now.to_json() if allowed else b'{"status": "ok"}'
        return _answer(said, status, "application/json", retry_after=None if status == 200 else 2)

    @app.post(TASK_PATHS[service.config.task])
    def work():
        sender, gone = bottle.request.remote_addr or "", bottle.request.environ["waitress.client_disconnected"]
        with service.thread_of(service.request_threads):
            service.check_connected(gone)
            request = service.read(body)
            bottle.request.environ["note"] |= {"client": request.client, "tokens": len(request.input_ids)}
            return _answer(service.score(request, sender, gone), 200, CONTENT_TYPES[service.config.task])

    @app.post(WEIGHTS_PATH)
    def weights():
        with service.thread_of(service.update_threads):
            return _json(updates().add(bottle.request.query, body()))

    @app.post(COMMIT_PATH)
    def commit():
        with service.thread_of(service.update_threads):
            return _json(updates().commit(bottle.request.query))

    @app.get(METRICS_PATH)
    def metrics():
        return _answer(service.monitor.to_prometheus(service.held()), 200, service.monitor.CONTENT_TYPE)

    @app.get(STATUS_PATH)
    def status():
        return _json(service.status())

    @app.get(PAGE_PATH)
    def page():
        answer = _answer(PAGE, 200, "text/html; charset=utf-8")
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

        answer = app(environ, start)
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        seconds = time.perf_counter() - began
        sender = environ.get("REMOTE_ADDR", "")
        service.monitor.answered(method, path if path in paths else "other", *status, seconds, sender, **note)
        # bottle keeps a thread's last request and answer until its next ones.
        environ.clear()
        bottle.response.bind()
        return answer

    return noted


def _answer(body: bytes, status: int, content_type: str, retry_after: int | None = None) -> bottle.HTTPResponse:
    headers = {"Content-Type": content_type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    return bottle.HTTPResponse(body, status, headers)


def _json(said: dict) -> bottle.HTTPResponse:
    return _answer(json.dumps(said).encode(), 200, "application/json")


def run(config: ServerConfig) -> int:
    """Serve until a signal or the worker's death. Returns the exit code."""
    keep_memory_flat()
    service = Service(config)

    def on_refused(method: str, path: str, sender: str, error: ProtocolError) -> None:
        service.monitor.answered(method, "other", error.status, 0.0, sender, error=error)

    server = HttpServer(make_app(service), config, service.admit, on_refused)
    # Listening before loading: a taken port is known at once, and /health can say "loading".
    threading.Thread(target=server.run, name="http", daemon=True).start()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if service.info.status == "loading":
            raise SystemExit(0)
        service.stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)

    url = f"http://{config.host}:{server.effective_port}"
    log.info("loading %s; listening on %s", config.model_name_or_path, url)
    service.load()
    model = service.info.model
    log.info("ready: %s, %s on %s, up to %d tokens a sequence", url, model.dtype, model.device, model.max_length)
    while not service.stop.wait(SUMMARY_SECONDS):
        if said := service.monitor.summary(service.held()):
            log.info(said)
        if service.updates is not None:
            service.updates.drop_abandoned()

    service.change_info(status="draining")
    end = time.monotonic() + config.drain_timeout
    if service.death is None:
        log.info("stopping: %d tokens in hand", service.queue.depth)
        service.worker.close(config.drain_timeout)
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
            from grpo.model.estimate_report import estimate_report

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
