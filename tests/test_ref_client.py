"""The client against real servers that are late, killed, restarted, wrong, or something else altogether."""

import signal
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import free_port, running_server, write_model

from grpo.arguments import parse_arguments
from grpo.config import TrainerConfig
from grpo.protocol import Health, LogprobsAnswer, encode_answer
from grpo.ref_client import RefClient, RefError, RefUnavailable, check_reference

PROMPT, COMPLETIONS = [5, 6], [[7, 8, 9], [], [10]]


@contextmanager
def client(*urls, **options):
    settings = {"ref_startup_timeout": 1, "ref_deadline": 2, "ref_request_timeout": 1} | options
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    one = RefClient(parse_arguments(TrainerConfig, "", ["--ref_servers", *urls, *words]))
    try:
        yield one
    finally:
        one.close()


def test_it_gets_each_completions_logprobs(server):
    with client(server.url) as one:
        assert one.wait_ready().status == "ready"
        rows = one.submit(PROMPT, COMPLETIONS, "g").result()
        assert [(len(row), row.dtype) for row in rows] == [(3, np.float32), (0, np.float32), (1, np.float32)]


def test_nobody_there_is_said_with_the_url_the_time_and_the_remedy():
    url = f"http://127.0.0.1:{free_port()}"
    with client(url) as one:
        with pytest.raises(RefUnavailable) as gone:
            one.wait_ready()
        for part in (url, "after 1 s", "Connection refused", "python ref_server.py", "beta to 0"):
            assert part in str(gone.value)
        started = time.monotonic()
        with pytest.raises(RefUnavailable, match=rf"no log-probs for group 7 after 2 s .*{url} cannot be reached"):
            one.submit(PROMPT, COMPLETIONS, "group 7").result()
        assert time.monotonic() - started < 10


def test_a_server_that_is_killed_and_started_again_loses_nothing(model_folder, tmp_path):
    with running_server(model_folder, tmp_path) as first:
        first.wait_ready()
        with client(first.url, ref_deadline=120) as one:
            one.wait_ready()
            expected = one.submit(PROMPT, COMPLETIONS, "before").result()
            first.end(signal.SIGKILL)
            waiting = [one.submit(PROMPT, COMPLETIONS, f"during {number}") for number in range(12)]
            with running_server(model_folder, tmp_path, port=first.port):
                for future in waiting:
                    for row, same in zip(future.result(timeout=100), expected, strict=True):
                        np.testing.assert_allclose(row, same, atol=1e-6)


def test_with_two_servers_one_may_be_dead(server):
    with client(server.url, f"http://127.0.0.1:{free_port()}") as one:
        for number in range(4):
            assert len(one.submit(PROMPT, COMPLETIONS, f"g{number}").result()) == 3


@pytest.mark.slow
def test_servers_of_different_models_are_refused(server, tmp_path):
    with running_server(write_model(tmp_path / "other", seed=1), tmp_path) as other:
        other.wait_ready()
        with (
            client(server.url, other.url) as one,
            pytest.raises(RefError, match="start every server with the same model"),
        ):
            one.wait_ready()
        with client(server.url) as one:
            one.wait_ready()
            one._config.ref_servers = [other.url]  # as if it had been restarted with another model
            with pytest.raises(RefError, match="now serves another model"):
                one.submit(PROMPT, COMPLETIONS, "g").result()


def test_what_the_server_refuses_is_not_sent_again(server):
    with client(server.url, ref_deadline=60) as one:
        started = time.monotonic()
        with pytest.raises(RefError, match="422: sequence 0 has 601 tokens"):
            one.submit([5], [[6] * 600], "g").result()
        assert time.monotonic() - started < 10


@pytest.mark.slow
def test_tokens_must_be_the_same(model_folder, tmp_path):
    with running_server(model_folder, tmp_path, environment={"GRPO_REF_TOKEN": "right"}) as server:
        server.wait_ready()
        with client(server.url, token="right") as one:
            one.wait_ready()
            assert len(one.submit(PROMPT, COMPLETIONS, "g").result()) == 3
        with client(server.url, token="wrong") as one:
            with pytest.raises(RefError, match="wants another token"):
                one.wait_ready()
            with pytest.raises(RefError, match="401"):
                one.submit(PROMPT, COMPLETIONS, "g").result()


@contextmanager
def fake(handle):
    """An HTTP server that answers everything with what `handle(count)` returns: (status, headers, body)."""
    counter = iter(range(10**6))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self):
            status, headers, body = handle(next(counter))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()


GOOD = encode_answer(LogprobsAnswer(np.array([-1, -2, -3, -4], np.float32), "f"))


@pytest.mark.parametrize(
    "bad", [(503, {"Retry-After": "1"}, b"{}"), (502, {}, b"<html>"), (200, {}, GOOD[:-1]), (200, {}, b"")]
)
def test_busy_servers_and_damaged_answers_are_asked_again(bad):
    with fake(lambda count: bad if count < 2 else (200, {}, GOOD)) as url, client(url, ref_deadline=30) as one:
        rows = one.submit(PROMPT, COMPLETIONS, "g").result()
        assert [row.tolist() for row in rows] == [[-1, -2, -3], [], [-4]]


def test_a_server_that_stalls_is_asked_again():
    def stalls(count):
        if count == 0:
            time.sleep(3)
        return 200, {}, GOOD

    with fake(stalls) as url, client(url, ref_deadline=30, ref_request_timeout=1) as one:
        assert len(one.submit(PROMPT, COMPLETIONS, "g").result()) == 3


def test_something_else_on_that_port_is_not_a_reference():
    with fake(lambda count: (200, {}, b"<html>hello</html>")) as url, client(url) as one:
        with pytest.raises(RefError, match="is something else"):
            one.wait_ready()
        with pytest.raises(RefUnavailable, match="sent a damaged answer"):
            one.submit(PROMPT, COMPLETIONS, "g").result()


HEALTH = Health("ready", "m", "model", "tokens", 100, 1024)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tokenizer_fingerprint": "other"}, "whose tokenizer is not that of m"),
        ({"vocab_size": 101}, "vocabulary of 101, and m has 100"),
        ({"max_length": 1023}, "at most 1023 tokens a sequence.* is 1024"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(changes, said):
    config = parse_arguments(TrainerConfig, "", [])
    check_reference(config, HEALTH, HEALTH)
    with pytest.raises(RefError, match=said):
        check_reference(config, HEALTH, Health(**(vars(HEALTH) | changes)))


def test_other_weights_are_allowed_and_said(caplog):
    check_reference(
        parse_arguments(TrainerConfig, "", []), HEALTH, Health(**(vars(HEALTH) | {"model_fingerprint": "x"}))
    )
    assert "the KL will not begin at 0" in caplog.text
