"""The HTTP layer by raw sockets: the end of a request, how much of it is taken, and how long it may take.

A request whose end a proxy in front could see elsewhere is refused, and its connection ends: what came behind it is
never read as a request of its own.
"""

import json
import resource
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version

import numpy as np
import psutil
import pytest
import requests
from conftest import running_server
from faulty_server import code_for, delay_passes, lower_limits, set_clock_back, shorten_header_deadline
from safetensors.numpy import load, save
from servers import wait_for_requests, wait_until

import grpo.server.http
from grpo.config.server import ServerConfig
from grpo.server.http import HttpServer

HEADER_BYTES = 16 << 10
HEADER_SECONDS, BODY_SECONDS = 2.0, 3.0
CONNECTIONS = 12
LIMITS = ["--max_connections", str(CONNECTIONS), "--body_timeout", str(BODY_SECONDS)]
SOON = code_for(shorten_header_deadline, HEADER_SECONDS) + code_for(lower_limits, 1 << 20)
LATE = 20.0  # seconds on a busy machine


@contextmanager
def limited_server(model_folder, folder, code="", **options):
    """A ready server with low limits, which must log no traceback."""
    with running_server(model_folder, folder, *LIMITS, code=SOON + code, **options) as server:
        yield server
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def low(model_folder, tmp_path_factory):
    with limited_server(model_folder, tmp_path_factory.mktemp("low")) as server:
        yield server


@pytest.fixture(scope="module")
def locked(model_folder, tmp_path_factory):
    """A server with low limits and a token."""
    token = {"GRPO_REF_TOKEN": "s3cret"}
    with limited_server(model_folder, tmp_path_factory.mktemp("locked"), environment=token) as server:
        yield server


Answer = tuple[int, dict[str, str], bytes]


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=LATE)


def read(connection: socket.socket, count: int) -> list[Answer]:
    """The next answers, up to `count`: fewer where the server ends the connection."""
    answers = []
    with connection.makefile("rb", buffering=0) as stream:  # bytes behind the last one stay for the next call
        while len(answers) < count and (line := stream.readline()):
            headers, body = {}, b""
            while (header := stream.readline()) not in (b"\r\n", b""):
                name, _, value = header.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            while part := stream.read(int(headers.get("content-length", 0)) - len(body)):
                body += part
            answers.append((int(line.split()[1]), headers, body))
    return answers


def talk(server, sent: bytes, limit: int = 9) -> list[Answer]:
    """All answers to these bytes, until the server ends the connection: the last request should say that it may."""
    with connect(server) as connection:
        connection.sendall(sent)
        return read(connection, limit)


def refused(answer: Answer) -> tuple[int, str]:
    status, headers, body = answer
    error = json.loads(body)
    assert headers["content-type"] == "application/json" and error.keys() == {"error"}
    assert error["error"].keys() == {"code", "message"} and error["error"]["message"]
    return status, error["error"]["code"]


BODY = save(
    {
        "input_ids": np.array([9, 8, 7, 6], np.int32),
        "prompt_lengths": np.array([2], np.int32),
        "completion_lengths": np.array([2], np.int32),
    },
    {"request_id": "raw"},
)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/logprobs HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
BEHIND = GET + b"Connection: close\r\n\r\n"


def length(value: bytes) -> bytes:
    return POST + b"Content-Length: " + value + b"\r\n\r\nhello"


def coding(value: bytes) -> bytes:
    return POST + b"Transfer-Encoding:" + value + b"\r\n\r\n" + CHUNKS


CODINGS = {
    411: [b" chunked", b" CHUNKED", b" chunked, chunked", b"\tchunked", b"\r\n chunked", b""],
    400: [b" \x0bchunked", b" chunked\x0b"],
    501: [b" xchunked", b" chunked, identity", b" identity"],
}
HEADERS = [b"X: a\nContent-Length: 5", b"X: a\rContent-Length: 5", b"X: a\x00b", b"X : a", b"X"]
FIRST_LINES = [b"GET /health", b"GET /health HTTP/1.2", b"GET  /health HTTP/1.1", b"get /health HTTP/1.1"]
FIRST_LINES += [b"GET /health HTTP/1.1\r\n X: a", b"PRI * HTTP/2.0\r\n\r\nSM", b"GET http://[x/health HTTP/1.1"]
REFUSED = {
    "length, then chunked": (POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS, 411),
    "chunked, then length": (POST + CHUNKED + LENGTH + b"\r\n" + BODY, 411),
    "two lengths, equal": (POST + LENGTH + LENGTH + b"\r\n" + BODY, 400),
    "two lengths, different": (POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, 400),
    **{f"length {text}": (length(text.encode()), 400) for text in ("+5", "-5", "5, 5", "5 6", "0x5", "5;", "1e1")},
    "length superscript": (length("²".encode("latin-1")), 400),
    "length empty": (length(b""), 400),
    "length in two lines": (length(b"1\r\n 0"), 400),
    "length of 1 GB": (length(b"1000000000"), 413),
    "length of 1 GB, expecting": (POST + b"Expect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n", 413),
    "length of 4,000 digits": (length(b"9" * 4000), 413),
    "length that Python does not read": (length(b"9" * 5000), 400),
    **{f"coding {value}": (coding(value), status) for status in CODINGS for value in CODINGS[status]},
    "chunked in HTTP/1.0": (coding(b" chunked").replace(b"HTTP/1.1", b"HTTP/1.0"), 411),
    "no coding, and a length": (POST + b"Transfer-Encoding:\r\n" + LENGTH + b"\r\n" + BODY, 411),
    "chunked, expecting": (POST + CHUNKED + b"Expect: 100-continue\r\n\r\n" + CHUNKS, 411),
    "coding before a space and a colon": (POST + b"Transfer-Encoding : chunked\r\n" + LENGTH + b"\r\n" + BODY, 400),
    **{f"header {line}": (GET + line + b"\r\n\r\n", 400) for line in HEADERS},
    **{f"{line}": (line + b"\r\n\r\n", 400) for line in FIRST_LINES},
}


@pytest.mark.parametrize("sent, status", REFUSED.values(), ids=REFUSED)
def test_a_request_with_a_doubtful_end_is_refused_and_nothing_behind_it_is_read(low, sent, status):
    answers = talk(low, sent + BEHIND)
    assert len(answers) == 1
    code = {400: "bad_request", 411: "length_required", 413: "request_entity_too_large", 501: "not_implemented"}[status]
    assert refused(answers[0]) == (status, code)


def test_the_refusal_of_a_head_request_has_no_body(low):
    with connect(low) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 411 ") and received.endswith(b"\r\n\r\n")


TAKEN = {
    "a folded header": (GET + b"X: a\r\n b\r\n\r\n", 200),
    "a name with an underscore is passed over": (GET + b"Transfer_Encoding: chunked\r\n\r\n", 200),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", 200),
    "empty lines before": (b"\r\n\r\n" + GET + b"\r\n", 200),
    "a whole URL": (b"GET http://elsewhere/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "two slashes": (b"GET //health HTTP/1.1\r\n\r\n", 200),
    "an escape": (b"GET /%68ealth HTTP/1.1\r\n\r\n", 200),
    "a host and port": (b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a star": (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a body where none belongs": (GET + b"Content-Length: 5\r\n\r\nhello", 200),
    "expecting without a body": (GET + b"Expect: 100-continue\r\n\r\n", 200),
    "no length": (POST + b"\r\n", 411),
    "keep-alive in HTTP/1.0": (b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", 200),
}


@pytest.mark.parametrize("sent, status", TAKEN.values(), ids=TAKEN)
def test_what_ends_without_doubt_is_answered_and_so_is_what_follows(low, sent, status):
    with connect(low) as connection:
        for request, expected in ((sent, status), (BEHIND, 200)):
            connection.sendall(request)
            assert read(connection, 1)[0][0] == expected


def test_what_comes_in_one_go_with_a_request_is_dropped_and_the_connection_ends(low):
    """A client that reads nothing could else fill the memory with answers."""
    for request in (GET + b"\r\n", POST + LENGTH + b"\r\n" + BODY):
        [(status, headers, _)] = talk(low, 3 * request)
        assert (status, headers["connection"]) == (200, "close")


def test_a_client_that_waits_for_100_continue_gets_it_then_its_answer(low):
    with connect(low) as connection:
        connection.sendall(POST + LENGTH + b"Expect: 100-continue\r\n\r\n")
        assert read(connection, 1)[0][0] == 100
        connection.sendall(BODY)
        status, _, body = read(connection, 1)[0]
        assert status == 200 and load(body)["logprobs"].shape == (2,)


@pytest.mark.parametrize("above, status", [(-1, 200), (0, 200), (1, 431)])
def test_headers_may_be_as_large_as_the_limit(low, above, status):
    head = GET + b"Connection: close\r\nX: %s\r\n\r\n"
    answers = talk(low, head % (b"a" * (HEADER_BYTES + above - len(head) + 2)) + (BEHIND if status != 200 else b""))
    assert [answer[0] for answer in answers] == [status]
    assert status == 200 or refused(answers[0]) == (431, "request_header_fields_too_large")


WRONG = [b"", b"Authorization: Bearer wrong\r\n", b"Authorization: s3cret\r\n", b"Authorization: Bearer s3cret2\r\n"]
WRONG += ["Authorization: Bearer é\r\n".encode(), b"Authorization: bearer s3cret\r\n", b"Authorization: \xff\r\n"]


@pytest.mark.parametrize("token", WRONG)
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_without_the_token_no_body_is_waited_for(locked, token, expect):
    answers = talk(locked, POST + token + expect + b"Content-Length: 900000\r\n\r\n")
    assert len(answers) == 1 and refused(answers[0]) == (401, "unauthorized")


@pytest.mark.parametrize("path", [b"/metrics", b"/status", b"//status", b"/nothing", b"/v1/logprobs"])
def test_without_the_token_nothing_is_told(locked, path):
    answers = talk(locked, b"GET " + path + b" HTTP/1.1\r\n\r\n" + BEHIND)
    assert len(answers) == 1 and refused(answers[0]) == (401, "unauthorized")


@pytest.mark.parametrize("token", WRONG)
def test_whoever_asks_health_with_another_token_is_a_stranger(locked, token):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    [(status, _, body)] = talk(locked, head + token + b"\r\n")
    assert (status, body) == (200, b'{"status": "ok"}')


@pytest.mark.parametrize("path", [b"/health", b"//health", b"/"])
def test_without_the_token_an_open_path_takes_no_body(locked, path):
    head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n" % path
    assert [refused(answer) for answer in talk(locked, head + b"\r\n")] == [(413, "request_entity_too_large")]
    empty = b"GET %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % path
    [(status, _, body)] = talk(locked, empty)
    assert status == 200 and (path == b"/" or body == b'{"status": "ok"}')


def test_a_new_connection_takes_the_place_of_who_is_silent_the_longest(low):
    with ExitStack() as stack:
        places = []
        for _ in range(CONNECTIONS):
            places.append(stack.enter_context(connect(low)))
            assert is_served(places[-1])
        for connection in places[1:]:
            assert is_served(connection)
        assert is_served(stack.enter_context(connect(low)))
        assert is_closed(places[0])
        assert all(is_served(connection) for connection in places[1:])


TOKEN = b"Authorization: Bearer s3cret\r\n"


def test_strangers_leave_their_places_to_who_has_the_token(locked):
    with ExitStack() as stack:
        trainer = stack.enter_context(connect(locked))
        trainer.sendall(GET + TOKEN + b"\r\n")
        assert read(trainer, 1)[0][0] == 200
        for place in range(3 * CONNECTIONS):
            stranger = stack.enter_context(connect(locked))
            stranger.sendall(GET if place % 2 else b"")
        for _ in range(2):
            trainer.sendall(GET + TOKEN + b"\r\n")
            assert read(trainer, 1)[0][0] == 200
            assert [status for status, _, _ in talk(locked, GET + TOKEN + b"Connection: close\r\n\r\n")] == [200]


def test_a_stranger_has_one_answer_of_a_connection(locked):
    [(status, headers, _)] = talk(locked, b"GET / HTTP/1.1\r\n\r\n")
    assert (status, headers["connection"]) == (200, "close")


def test_all_bodies_together_have_a_limit_and_who_is_silent_gives_way(server):
    announced = POST + b"Content-Length: %d\r\n\r\n" % (64 << 20)
    with ExitStack() as stack:
        stuck = [stack.enter_context(connect(server)) for _ in range(16)]
        for connection in stuck:
            connection.sendall(announced + b"x")
            time.sleep(0.01)
        assert [status for status, _, _ in talk(server, POST + LENGTH + b"Connection: close\r\n\r\n" + BODY)] == [200]
        [answer] = read(stuck[0], 1)
        assert refused(answer) == (503, "too_many_bodies") and int(answer[1]["retry-after"]) >= 1
        stuck[15].settimeout(0.3)
        with pytest.raises(TimeoutError):
            stuck[15].recv(1)


HERE = [b"localhost", b"LOCALHOST:80", b"127.0.0.1:1", b"127.1.2.3", b"[::1]:59875", b""]
ELSEWHERE = [b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example:59875", b"192.168.0.1", b"0.0.0.0"]
ELSEWHERE += [b"127.0.0.1, evil.example", b"localhost@evil.example", b"[::2]", b"xlocalhost"]
PATHS = [b"GET /", b"GET /health", b"GET /status", b"GET /nothing", b"POST /v1/logprobs", b"POST /v1/weights/commit"]


@pytest.mark.parametrize("host", HERE)
def test_without_a_token_the_server_answers_its_own_machine(server, host):
    request = b"GET /status HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n"
    assert talk(server, request + b"\r\n")[0][0] == 200
    assert talk(server, request + b"Origin: http://" + host + b"\r\n\r\n")[0][0] == 200


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_no_page_of_another_site_is_answered(server, path):
    """Neither what it asks across sites nor, by a name of its own that leads here, as if it were the server's page."""
    length = b"Content-Length: 900000\r\n" if path.startswith(b"POST") else b""
    for host in ELSEWHERE:
        [answer] = talk(server, path + b" HTTP/1.1\r\n" + length + b"Host: " + host + b"\r\n\r\n")
        assert refused(answer) == (403, "foreign_host")
    for origin in (b"http://evil.example", b"null", b"http://localhost:8080", b"https://localhost", b""):
        head = path + b" HTTP/1.1\r\nHost: localhost\r\n" + length + b"Origin: " + origin + b"\r\n\r\n"
        [answer] = talk(server, head)
        assert refused(answer) == (403, "foreign_origin")


def test_with_a_token_host_and_origin_do_not_count(locked):
    head = b"GET /status HTTP/1.1\r\nHost: ref.example.org\r\nOrigin: https://ref.example.org\r\n"
    assert talk(locked, head + TOKEN + b"Connection: close\r\n\r\n")[0][0] == 200


@pytest.mark.parametrize("path", [b"//v1/weights", b"///v1/weights/commit", b"http://x/v1/weights", b"/v1/%77eights"])
def test_a_path_is_refused_as_it_is_routed(server, path):
    query = b"?sha256=" + b"a" * 64 + b"&size=9&offset=0"
    head = b"POST " + path + query + b" HTTP/1.1\r\nContent-Type: application/octet-stream\r\n"
    [answer] = talk(server, head + b"Content-Length: 900000\r\n\r\n")
    assert refused(answer) == (403, "no_updates")


def test_a_path_that_is_not_utf_8_is_no_path(server):
    [answer] = talk(server, b"POST /v1/weights%ff HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
    assert refused(answer) == (400, "bad_request")


@pytest.mark.slow
def test_deadlines_hold_when_the_clock_is_set_back(model_folder, tmp_path):
    back = tmp_path / "back"
    with limited_server(model_folder, tmp_path, code_for(set_clock_back, str(back))) as server:
        with connect(server) as before:
            back.touch()
            with connect(server) as after:
                assert is_closed(before) and is_closed(after)
        drip(server, GET + b"X: ", b"a")


def is_served(connection: socket.socket) -> bool:
    try:
        connection.sendall(GET + b"\r\n")
        return read(connection, 1)[0][0] == 200
    except ConnectionError:  # it was closed before it had asked
        return False


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, seconds, rest, endless",
    [
        (GET, HEADER_SECONDS, b"\r\n", GET + b"X: "),
        (POST + LENGTH + b"\r\n" + BODY[:50], BODY_SECONDS, BODY[50:], POST + b"Content-Length: 900000\r\n\r\n"),
    ],
    ids=["headers", "body"],
)
def test_headers_and_body_have_a_time(low, first, seconds, rest, endless):
    with connect(low) as connection:
        connection.sendall(first)
        time.sleep(seconds / 4)
        connection.sendall(rest)
        assert read(connection, 1)[0][0] == 200
    drip(low, endless, b"a")


@pytest.mark.slow
def test_the_time_of_a_request_does_not_run_while_the_one_before_it_is_in_work(model_folder, tmp_path):
    """The server itself reads nothing then."""
    with limited_server(model_folder, tmp_path, code_for(delay_passes, 4)) as server, connect(server) as connection:
        connection.sendall(POST + LENGTH + b"\r\n" + BODY)  # four seconds of work
        wait_for_requests(server, 1)
        connection.sendall(GET)  # half a request
        assert [status for status, _, _ in read(connection, 1)] == [200]
        connection.sendall(b"\r\n")
        assert [status for status, _, _ in read(connection, 1)] == [200]


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_next_request_is_served(model_folder, tmp_path):
    """Large bodies go through a temporary file; the system lets this server write none of more than 100 kB."""
    with running_server(model_folder, tmp_path) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
        large = POST + b"Content-Length: 1000000\r\n\r\n" + bytes(1_000_000)
        with connect(server) as connection:
            with suppress(ConnectionError):  # it may have its answer by then
                connection.sendall(large)
            [answer] = read(connection, 1)
        assert refused(answer) == (503, "no_space") and answer[1]["retry-after"] == "5"
        assert b"File too large" in answer[2] and "the server's disk is full" in server.log.read_text()
        assert [status for status, _, _ in talk(server, POST + LENGTH + b"Connection: close\r\n\r\n" + BODY)] == [200]


@pytest.mark.slow
def test_a_connection_without_an_open_file_for_it_waits(model_folder, tmp_path):
    with running_server(model_folder, tmp_path) as server:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        with connect(server) as connection:
            connection.sendall(GET + b"\r\n")
            wait_until(lambda: "a connection waits: Too many open files: raise" in server.log.read_text())
            used = psutil.Process(server.process.pid).cpu_times().user
            time.sleep(1)
            assert psutil.Process(server.process.pid).cpu_times().user - used < 0.5
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
            assert [status for status, _, _ in read(connection, 1)] == [200]
        assert server.log.read_text().count("a connection waits") == 1


@pytest.mark.slow
def test_lines_that_end_in_lf_alone_never_make_a_request(low):
    drip(low, b"GET /health HTTP/1.1\nHost: localhost\n\n", b"\n\n")


def drip(server, start: bytes, drop: bytes) -> None:
    """Send a little all the time until the server has had enough; what follows then is not read as a request."""
    answers = []
    while not answers:  # a last drop that crosses the server's close is a reset, which throws the answer away
        with suppress(ConnectionResetError), connect(server) as connection:
            connection.sendall(start)
            deadline = time.monotonic() + LATE
            while not select.select([connection], [], [], 0.2)[0]:
                assert time.monotonic() < deadline
                connection.sendall(drop)
            answers = read(connection, 2)
    assert len(answers) == 1 and refused(answers[0]) == (408, "request_timeout")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
def test_a_connection_that_asks_nothing_is_closed(low, sent):
    with connect(low) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


@pytest.mark.slow
def test_a_connection_that_has_asked_may_rest_longer(low):
    with connect(low) as connection:
        for _ in range(2):
            connection.sendall(GET + b"\r\n")
            assert read(connection, 1)[0][0] == 200
            time.sleep(HEADER_SECONDS + 2)


@pytest.mark.timed
@pytest.mark.slow
def test_two_hundred_slow_clients_hold_up_nobody(server):
    """More than there are threads: half of them send their headers a byte at a time, half their body."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(200)]
        for place, connection in enumerate(slow):
            connection.sendall(GET + b"X: " if place % 2 else POST + b"Content-Length: 900000\r\n\r\n")
        for _ in range(3):
            for connection in slow:
                connection.sendall(b"a")
            began = time.monotonic()
            assert talk(server, BEHIND)[0][0] == 200
            assert talk(server, POST + LENGTH + b"Connection: close\r\n\r\n" + BODY)[0][0] == 200
            assert time.monotonic() - began < 5  # a held thread would be waited for until the headers' 10 s are over
            time.sleep(1)


def test_waitress_is_the_version_that_was_read():
    """grpo/server/http.py replaces methods of it: compare those of another with ours, then write it here."""
    assert version("waitress") == "3.0.2"


@contextmanager
def here(kind=HttpServer, host="127.0.0.1"):
    """A server in this process whose every answer is "here"."""

    def app(environment, start_response):
        start_response("200 OK", [])
        return [b"here"]

    config = ServerConfig(host=host, port=0)
    server = kind(app, config, admit=lambda path, headers: (True, None), on_refused=lambda **refused: None)
    threading.Thread(target=server.run, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
        server.task_dispatcher.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_its_url_can_be_asked(host):
    with here(host=host) as server:
        assert requests.get(server.url, timeout=LATE).content == b"here"


def test_what_came_in_time_is_answered_though_it_is_read_late(monkeypatch):
    """Also a request in the pass that finds another connection late, whose number it gets."""

    class Starved(HttpServer):
        """Gets no processor for longer than headers may take, between a connection and its bytes."""

        def handle_accept(self):
            super().handle_accept()
            time.sleep(1.1)

    monkeypatch.setattr(grpo.server.http, "HEADER_SECONDS", 0.5)
    with here(Starved) as server, socket.create_connection(("127.0.0.1", server.effective_port)):
        with ThreadPoolExecutor(3) as clients:
            answers = list(clients.map(partial(requests.get, timeout=LATE), 3 * [server.url]))
        assert [answer.content for answer in answers] == 3 * [b"here"]
