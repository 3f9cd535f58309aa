"""A pool's routes under /v1/rollouts."""

import re
from collections.abc import Callable
from dataclasses import asdict

import bottle

from grpo.pool.files import PIECE_BYTES
from grpo.pool.pool_service import PoolService
from grpo.pool.protocol import Lease, RunInfo, Version, drifts_of, keys_of
from grpo.server.app import App, check_content_type, make_answer, make_json, note, read_body
from grpo.wire import refusals as wire
from grpo.wire.json_fields import LARGEST_ID, check_amount, check_hex, read_json
from grpo.wire.refusals import ProtocolError, malformed
from grpo.wire.tensors import FilePart

_JSON_BYTES = 4 << 20  # the largest of honest clients has some hundred KB; JSON takes many times its size in memory


def add_pool_routes(app: App, service: PoolService) -> None:
    """Let the application answer trainer and workers."""
    _add_posts(app, service)
    _add_long_polls(app, service)

    @app.get(wire.RUN_PATH)
    def run():
        service.check_ready()
        return make_answer(service.store.run().to_json(), 200, "application/json")

    @app.get(wire.VERSIONS_PATH)
    def versions():
        service.check_ready()
        return make_json([asdict(version) for version in service.store.versions()])

    @app.get(wire.JOURNAL_PATH)
    def journal():
        with service.thread_of(service.work_threads):
            service.check_ready()
            lines = service.store.journal(*_journal_of_query())
        service.numbers.transferred("sent", len(lines))
        return make_answer(lines, 200, wire.CONTENT_TYPE)

    @app.get(wire.FILES_PATH)
    def send_file():
        with service.thread_of(service.work_threads):
            service.check_ready()
            wanted = bottle.request.environ.get("HTTP_RANGE", "")  # get_header raises for bytes that are no UTF-8
            return _file_answer(service, bottle.request.query.get("sha256", ""), wanted)


def _add_posts(app: App, service: PoolService) -> None:
    def on_post(path: str, answer: Callable[[bytes], dict | None], most_bytes: int = _JSON_BYTES) -> None:
        """Answer a path's bodies with these fields, if any."""

        @app.post(path)
        def answer_post():
            with service.thread_of(service.work_threads):
                return make_json(answer(_read_post(service, most_bytes)) or {})

    def add_piece(body: bytes) -> dict:
        received = service.store.files.add(FilePart.of(bottle.request.query), body)
        service.numbers.transferred("received", len(body))
        return {"received": received}

    def add_results(body: bytes) -> dict:
        service.numbers.transferred("received", len(body))
        return {"results": service.add_results(body, _worker_of_query())}

    def add_to_journal(body: bytes) -> dict:
        service.numbers.transferred("received", len(body))
        return {"wanted": service.add_to_journal(*_journal_of_query(), body, _worker_of_query())}

    on_post(wire.RUN_PATH, lambda body: service.store.set_run(RunInfo.of_json(body)))
    on_post(wire.VERSIONS_PATH, lambda body: service.add_version(Version.of_fields(read_json(body))))
    on_post(wire.DRIFT_PATH, lambda body: service.note_drift(drifts_of(read_json(body).get("groups"))))
    on_post(wire.NEEDED_PATH, lambda _: service.store.drop_versions_below(_number_of_query("version")))
    on_post(wire.TASKS_PATH, lambda body: {"tasks": service.put_tasks(body)}, wire.BODY_BYTES)
    on_post(wire.FILES_PATH, add_piece, wire.BODY_BYTES)
    on_post(wire.RESULTS_PATH, add_results, wire.BODY_BYTES)
    on_post(wire.JOURNAL_PATH, add_to_journal, wire.BODY_BYTES)


def _add_long_polls(app: App, service: PoolService) -> None:
    @app.post(wire.GROUPS_PATH)
    def groups():
        is_gone = bottle.request.environ["waitress.client_disconnected"]
        with service.thread_of(service.asking_threads):
            request = read_json(_read_post(service))
            keys, wait = keys_of("groups", request.get("groups")), request.get("wait", 0)
            check_amount("wait", wait)
        body = service.groups(keys, wait, is_gone)
        service.numbers.transferred("sent", len(body))
        return make_answer(body, 200, wire.CONTENT_TYPE)

    @app.post(wire.LEASE_PATH)
    def lease():
        is_gone = bottle.request.environ["waitress.client_disconnected"]
        with service.thread_of(service.asking_threads):
            lease = Lease.of_json(_read_post(service))
        note(client=lease.worker)
        return make_answer(service.lease(lease, is_gone), 200, wire.CONTENT_TYPE)


def _read_post(service: PoolService, most_bytes: int = _JSON_BYTES) -> bytes:
    check_content_type()
    service.check_ready()
    if bottle.request.content_length > most_bytes:
        raise ProtocolError(413, "request_entity_too_large", f"the body is larger than {most_bytes >> 20} MiB")
    return read_body()


def _number_of_query(name: str) -> int:
    text = bottle.request.query.get(name, "")
    if not (re.fullmatch("[0-9]{1,10}", text) and int(text) <= LARGEST_ID):
        raise malformed(f"{name}={text[:80]!r} in the query: send a number")
    return int(text)


def _worker_of_query() -> str:
    worker = bottle.request.query.getunicode("worker") or bottle.request.remote_addr or ""
    note(client=worker)
    return worker


def _journal_of_query() -> tuple[tuple[int, int], str]:
    """Return a task's key, and the SHA-256 of the weights that draw it."""
    key = _number_of_query("group"), _number_of_query("attempt")
    weights = bottle.request.query.get("weights", "")
    check_hex("weights", weights, 64)
    return key, weights


def _file_answer(service: PoolService, sha256: str, wanted: str) -> bottle.HTTPResponse:
    """Return a file, or the bytes that a Range header names; at most PIECE_BYTES of them."""
    no_file = ProtocolError(404, "no_file", f"no complete file {sha256[:80]!r} is here")
    size = service.store.files.size(sha256)
    if size is None:
        raise no_file
    # Another kind of range is ignored, as RFC 9110 allows.
    match = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", wanted)
    start = int(match[1]) if match else 0
    end = min(size, int(match[2]) + 1 if match and match[2] else size, start + PIECE_BYTES)
    if start >= end:
        raise ProtocolError(416, "range_not_satisfiable", f"the file has {size} bytes: {wanted[:80]!r} is not in it")
    body = service.store.files.read(sha256, start, end)
    if len(body) < end - start:  # it has just been dropped
        raise no_file
    service.numbers.transferred("sent", len(body))
    answer = make_answer(body, 200, wire.CONTENT_TYPE)
    if match or end - start < size:
        answer.status = 206
        answer.set_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
    answer.set_header("Accept-Ranges", "bytes")
    answer.set_header("ETag", f'"{sha256}"')
    return answer
