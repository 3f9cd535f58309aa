"""The reference model in a process of its own: rollouts come in over HTTP, log-probs go out.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py
    python ref_server.py --config configs/demo_cpu.yaml
    python ref_server.py --task reward --model org/rm
    python ref_server.py --task rollouts --pool_file run.sqlite

The first has the defaults, Qwen2.5-1.5B-Instruct on port 59875; the second reads the trainer's file; the third serves a
reward model instead: texts in, scores out. The fourth is a pool, without a model: it hands a trainer's tasks to workers
on other machines, and their completions to the trainer.

The threads of the web server only parse, queue and wait (grpo/server/model_service.py, grpo/pool/pool_service.py); one
thread owns the model (grpo/server/scorer.py). docs/protocol.md describes the wire.
"""

import ctypes
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from grpo.config.errors import ConfigError, end_at_ctrl_c, on_end_signals, say_once

if __name__ == "__main__":
    end_at_ctrl_c()  # before the imports that take long

import bottle

from grpo.config.command_line import parse_arguments
from grpo.config.console import end_now, start_logging
from grpo.config.fields import PACKAGE
from grpo.config.server import ServerConfig
from grpo.pool.pool_routes import add_pool_routes
from grpo.pool.pool_service import PoolService
from grpo.server.app import App, check_content_type, make_answer, make_json, note, read_body
from grpo.server.http import HttpServer
from grpo.server.model_service import ModelService
from grpo.server.monitor import SAMPLE_SECONDS, SUMMARY_SECONDS
from grpo.wire import refusals as wire

log = logging.getLogger("ref_server")

PAGE = (PACKAGE / "server/page.html").read_bytes()
# The page shows names that strangers sent. Even if one gets in as code, it can load nothing and reach no other host.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def keep_memory_flat() -> None:
    """Let all threads share one heap of glibc, but for those that run already. With a heap for each, which becomes
    fragmented, the same work peaked anywhere from 250 to 700 MiB above the weights."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library does not need it
        mallopt(-8, 1)  # M_ARENA_MAX


def make_app(service: ModelService | PoolService) -> App:
    """Return the WSGI application, with the server's answer at each path."""
    task = service.config.task
    app = App(service.monitor, task)

    @app.get(wire.HEALTH_PATH)
    def health():
        # get_header raises for bytes that are no UTF-8.
        is_allowed = service.allows(bottle.request.environ.get("HTTP_AUTHORIZATION", ""))
        info = service.current_info() if is_allowed else service.info  # a stranger's question reaches no database
        status, retry_after = (200, None) if info.status == "ready" else (503, 2)
        body = info.to_json() if is_allowed else b'{"status": "ok"}'
        return make_answer(body, status, "application/json", retry_after)

    (add_pool_routes if task == "rollouts" else add_model_routes)(app, service)

    @app.get(wire.METRICS_PATH)
    def metrics():
        return make_answer(service.metrics(), 200, service.monitor.CONTENT_TYPE)

    @app.get(wire.STATUS_PATH)
    def status():
        return make_json(service.status())

    @app.get(wire.PAGE_PATH)
    def page():
        answer = make_answer(PAGE, 200, "text/html; charset=utf-8")
        answer.set_header("Content-Security-Policy", PAGE_POLICY)
        return answer

    return app


def add_model_routes(app: App, service: ModelService) -> None:
    task = service.config.task

    @app.post(wire.TASK_PATHS[task])
    def score():
        sender = bottle.request.remote_addr or ""
        is_gone = bottle.request.environ["waitress.client_disconnected"]
        with service.thread_of(service.request_threads):
            service.check_connected(is_gone)
            request = service.read(read_body)
            note(client=request.client, tokens=len(request.input_ids))
            return make_answer(service.score(request, sender, is_gone), 200, wire.CONTENT_TYPES[task])

    def on_update(path: str, answer: Callable[[Mapping[str, str]], dict]) -> None:
        @app.post(path)
        def update():
            with service.thread_of(service.update_threads):
                check_content_type()
                service.check_ready()
                return make_json(answer(bottle.request.query))

    on_update(wire.WEIGHTS_PATH, lambda query: {"received": service.updates.uploads.add(query, read_body())})
    on_update(wire.COMMIT_PATH, lambda query: service.updates.commit(query))


def run(config: ServerConfig) -> int:
    """Serve until a signal comes or the scorer dies. Return the exit code."""
    keep_memory_flat()
    service = PoolService(config) if config.task == "rollouts" else ModelService(config)

    def on_refused(method: str, sender: str, error: wire.ProtocolError) -> None:
        service.monitor.answered(method, "other", error.status, seconds=0.0, address=sender, error=error)

    server = HttpServer(make_app(service), config, admit=service.admit, on_refused=on_refused)
    # Listen before loading: a port that is taken is reported at once, and /health can say "loading".
    threading.Thread(target=server.run, name="http", daemon=True).start()

    def end(_: int) -> None:
        if service.info.status == "loading":
            raise SystemExit(0)
        service.stop.set()

    on_end_signals(end)
    source = service.store.database.place if config.task == "rollouts" else config.model_name_or_path
    log.info("loading %s; listening on %s (to watch it, open that in a browser)", source, server.url)
    service.load()
    log.info("ready: %s, %s", server.url, service.description())
    next_summary = time.monotonic() + SUMMARY_SECONDS
    while not service.stop.wait(SAMPLE_SECONDS):
        service.monitor.sample(service.held())
        service.tidy()
        if time.monotonic() >= next_summary:
            next_summary += SUMMARY_SECONDS
            if summary := service.summary():
                log.info(summary)

    service.change_info(status="draining")
    end = time.monotonic() + config.drain_timeout
    if service.death is None:
        service.drain(config.drain_timeout)
    while server.unanswered and time.monotonic() < end:
        time.sleep(0.01)
    if isinstance(service.death, ConfigError):
        raise service.death
    if service.death is not None:
        print("ref_server.py: the worker died; nothing can be scored any more:", file=sys.stderr)
        traceback.print_exception(service.death)
        return 1
    if left := server.unanswered:
        reason = f"{left} requests were not answered in time: their clients will ask again"
        say_once(f"drain_timeout={config.drain_timeout:g}: {reason}; a larger value lets them finish")
        return 1
    service.close()
    log.info("stopped")
    return 0


def main() -> int:
    config = parse_arguments(ServerConfig, __doc__)
    start_logging()
    for name in ("ref_server", "grpo"):
        logging.getLogger(name).setLevel(config.log_level.upper())
    try:
        if config.estimate:
            from grpo.model.memory import server_report

            print(server_report(config))
            return 0
        return run(config)
    except ConfigError as error:
        say_once(str(error))
        return 2


if __name__ == "__main__":
    end_now(main())
