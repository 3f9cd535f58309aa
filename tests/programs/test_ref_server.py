"""The real server process over real sockets: answers, every error, many clients, and how it ends."""

import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python, running_server
from faulty_server import break_passes, code_for, collect_no_garbage, hold_loading, hold_passes, lower_limits
from rounding import FORMULA, assert_rounded
from servers import exact, holding_server, refusal, status, wait_for_requests, wait_until
from transformers import AutoModelForCausalLM, Qwen2Config

from demo.model import build_model
from grpo.wire.health import ServerInfo
from grpo.wire.logprobs import LogprobsAnswer, LogprobsRequest, decode_answer, encode_request


def ask(server, prompt, completions, temperature=1.0, **options) -> requests.Response:
    body = encode_request(LogprobsRequest.of(prompt, completions, temperature, request_id="r"))
    return requests.post(server.url + "/v1/logprobs", data=body, timeout=60, **options)


def health(server, **options) -> requests.Response:
    return requests.get(server.url + "/health", timeout=5, **options)


def test_health_tells_who_it_is(server, model, model_folder):
    answer = health(server)
    info = ServerInfo.from_json(answer.content)
    assert answer.status_code == 200 and answer.headers["Content-Type"] == "application/json"
    assert (info.status, info.model.name) == ("ready", str(model_folder))
    assert answer.json()["version"] == 1
    assert (info.model.vocab_size, info.model.max_length) == (model.config.vocab_size, 512)
    assert (info.model.dtype, info.model.device, info.queue_depth) == ("float32", "cpu", 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_over_http_are_exact(server, model, temperature):
    prompt, completions = [5, 6, 7], [[8, 9], [], [10], [11, 12, 13, 14]]
    decoded = decode_answer(ask(server, prompt, completions, temperature).content, 7)
    assert_rounded(decoded.logprobs, exact(model, prompt, completions, temperature))
    assert decoded.request_id == "r"
    assert decoded.model_fingerprint == health(server).json()["model_fingerprint"]
    assert len(decode_answer(ask(server, [5], [[], [], []]).content, 0).logprobs) == 0


def test_the_likeliest_tokens_over_http_are_those_of_float64(server, model):
    """Beside a request without them, which shares no pass with theirs."""
    prompt, completions, top_k = [5, 6, 7], [[8, 9], [], [10]], 4

    def answer(top_k: int) -> LogprobsAnswer:
        request = LogprobsRequest.of(prompt, completions, 0.5, top_k=top_k)
        said = requests.post(server.url + "/v1/logprobs", data=encode_request(request), timeout=60)
        return decode_answer(said.content, 3, top_k=top_k)

    with ThreadPoolExecutor(8) as threads:
        both = [*threads.map(answer, [top_k, 0] * 4)]
    ids = torch.tensor([[*prompt, 8, 9], [*prompt, 10, 10]])
    with torch.no_grad():
        logits = model.double()(input_ids=ids).logits[[0, 0, 1], [2, 3, 2]]
    model.float()
    expected = torch.log_softmax(logits / 0.5, -1).topk(top_k)
    for found, plain in zip(both[::2], both[1::2], strict=True):
        assert found.top_ids.tolist() == expected.indices.tolist()
        assert_rounded(found.top_logprobs, expected.values)
        assert_rounded(found.logprobs, plain.logprobs)
    assert health(server).json()["most_top_k"] == 256
    too_many = encode_request(LogprobsRequest.of([5], [[6]], 1.0, top_k=257))
    refused = refusal(requests.post(server.url + "/v1/logprobs", data=too_many, timeout=5))
    assert refused == (400, "malformed", "top_k '257': send a whole number from 0 to 256")


def example(page: str, language: str) -> str:
    """The first example of a page of docs/ in a language, which asks for completions 7 6 and 5 after 9 8."""
    return (REPOSITORY / "docs" / page).read_text().split(f"```{language}\n")[1].split("```")[0]


@pytest.mark.parametrize("program", ["python", "curl", "node"])
def test_the_examples_of_the_docs_get_what_a_client_of_ours_gets(server, tmp_path, program):
    if shutil.which(program) is None and program != "python":
        pytest.skip(f"no {program}")
    commands = {
        "python": ["python", "-c", example("protocol.md", "python")],
        "curl": ["sh", "-e", "-c", example("protocol.md", "sh")],
        "node": ["node", str(REPOSITORY / "examples/client.mjs"), server.url],
    }
    command = [word.replace("http://127.0.0.1:59875", server.url) for word in commands[program]]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    settings = {"env": ENVIRONMENT | {"PATH": path}, "capture_output": True, "text": True, "timeout": 60}
    ended = subprocess.run(command, cwd=tmp_path, **settings)
    assert ended.returncode == 0, ended.stderr
    printed = [float(word) for word in ended.stdout.replace(",", " ").strip("[] \n").split()]
    expected = decode_answer(ask(server, [9, 8], [[7, 6], [5]]).content, 3).logprobs
    assert_rounded(printed, expected, FORMULA)
    if program == "node":
        refused = subprocess.run([*command[:2], server.url + "/elsewhere"], **settings)
        assert refused.returncode == 1 and refused.stderr.startswith("404 not_found: this server answers")


def raw(server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def test_what_is_not_right_is_refused_with_its_code(server):
    url = server.url + "/v1/logprobs"
    assert ask(server, [5], [[6] * 511]).status_code == 200
    for answer, http_status, code, words in (
        (requests.post(url, data=b"hello", timeout=5), 400, "malformed", "safetensors"),
        (ask(server, [5], [[10**6]]), 400, "malformed", "vocabulary"),
        (requests.get(server.url + "/nothing", timeout=5), 404, "not_found", ""),
        (requests.get(url, timeout=5), 405, "method_not_allowed", ""),
        (requests.post(server.url + "/health", timeout=5), 405, "method_not_allowed", ""),
        (ask(server, [5], [[6] * 512]), 422, "sequence_too_long", "513"),
    ):
        assert refusal(answer)[:2] == (http_status, code) and words in answer.json()["error"]["message"]
        assert http_status != 405 or answer.headers["Allow"] == ("POST" if answer.url == url else "GET")


TOKEN = {"Authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def limited(model_folder, tmp_path_factory):
    """A server with every limit set low, and a token from a file."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "token").write_text("s3cret\n")
    options = ["--max_queue_tokens", "2000", "--max_length", "501", "--log_level", "debug"]
    options += ["--token_file", str(folder / "token")]
    with running_server(model_folder, folder, *options, code=code_for(lower_limits, 1 << 20, 3)) as server:
        yield server


def test_413_and_422_for_what_is_too_large(limited):
    head = b"POST /v1/logprobs HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer s3cret\r\n"
    for size in (2**20 - 1, 2**20):
        answer = raw(limited, head + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        assert b" 400 " in answer.splitlines()[0]  # read in full, and found to be no safetensors
    above = raw(limited, head + b"Content-Length: %d\r\n\r\n" % (2**20 + 1))
    assert b" 413 " in above.splitlines()[0] and b'"request_entity_too_large"' in above
    for completions in ([[6] * 499, [6] * 499], [[6]] * 3, [[6] * 500]):  # 1,000 tokens, 3 sequences, 501 tokens
        assert ask(limited, [5], completions, headers=TOKEN).status_code == 200
    for completions, *expected in (
        ([[6] * 499, [6] * 500], 413, "too_many_tokens"),
        ([[6]] * 4, 413, "too_many_sequences"),
        ([[6] * 501], 422, "sequence_too_long"),
    ):
        assert refusal(ask(limited, [5], completions, headers=TOKEN))[:2] == tuple(expected)


def test_the_token_opens_and_is_in_no_log_and_not_in_ps(limited):
    info = health(limited, headers=TOKEN).json()
    assert info["vocab_size"] > 0 and not info["takes_updates"]
    assert requests.get(limited.url + "/status", headers=TOKEN, timeout=5).json()["health"]["status"] == "ready"
    command = Path(f"/proc/{limited.process.pid}/cmdline").read_bytes()
    assert b"token_file" in command and b"s3cret" not in command
    assert "s3cret" not in limited.log.read_text() and "warning" not in limited.log.read_text().lower()


@pytest.mark.slow
def test_refused_requests_leave_nothing_in_memory(model_folder, tmp_path):
    """One after the other, and nobody collects garbage: references in a circle would stay for ever."""

    def request(tokens: int) -> bytes:
        rows = np.full(4000, tokens // 4000 - 1, np.int32)
        return encode_request(
            LogprobsRequest(
                input_ids=np.full(tokens, 6, np.int32), prompt_lengths=np.ones(4000, np.int32), completion_lengths=rows
            )
        )

    good, large = request(2_000_000), request(2_004_000)  # half of the queue, and more
    code = code_for(collect_no_garbage) + code_for(hold_passes, str(tmp_path / "go"))
    with running_server(model_folder, tmp_path, code=code) as server, ThreadPoolExecutor() as pool:

        def send(body: bytes) -> requests.Response:
            return requests.post(server.url + "/v1/logprobs", data=body, timeout=60)

        pool.submit(send, good)
        wait_for_requests(server, 1)
        for body, refused in (
            (bytes(8 << 20), (400, "malformed")),
            (large, (413, "too_many_tokens")),
            (good, (503, "busy")),
        ):
            assert refusal(send(body))[:2] == refused
            before = server.resident()
            for _ in range(50):
                assert send(body).status_code == refused[0]
            assert server.resident() < before + 50, refused
        server.end()


@pytest.mark.slow
def test_one_connection_too_many_is_told_so(model_folder, tmp_path):
    """Where each has a request in work: one that has none would give way."""
    with holding_server(model_folder, tmp_path, "--max_connections", "4") as (server, go), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, server, [5], [[6]]) for _ in range(3)]
        wait_for_requests(server, 3)

        def until_taken():
            """Ask until there is a place: a silent look may have it, or take it before the request is read."""
            while True:
                with suppress(requests.ConnectionError):
                    if (answer := ask(server, [5], [[6]])).status_code != 503:
                        return answer
                time.sleep(0.05)

        waiting.append(pool.submit(until_taken))
        wait_until(lambda: b"too_many_connections" in raw(server, b""))  # a silent one gives way until all work
        go.touch()
        assert [future.result().status_code for future in waiting] == [200] * 4
        assert ask(server, [5], [[6]]).status_code == 200


@pytest.mark.slow
def test_the_work_of_clients_that_have_gone_is_not_done(model_folder, tmp_path):
    """While a pass is held six clients fill the queue and close their connections, three with a reset; then it is free
    for the next. One closes its sending end alone: it is told so."""
    options = ["--max_queue_tokens", "10000", "--max_batch_tokens", "600"]
    with holding_server(model_folder, tmp_path, *options) as (server, go), ThreadPoolExecutor() as pool:
        held = pool.submit(ask, server, [5], [[6] * 499])
        wait_until(lambda: status(server)["queue"]["tokens"] == 500)
        connections = []
        for number in range(6):
            body = encode_request(LogprobsRequest.of([number], [[6] * 499] * 2, 1.0, client=f"client {number}"))
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connection.sendall(b"POST /v1/logprobs HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            connections.append(connection)
        wait_until(lambda: status(server)["queue"]["tokens"] == 6500)
        connections[0].shutdown(socket.SHUT_WR)
        answer = b""
        while b"client_gone" not in answer and (piece := connections[0].recv(65536)):
            answer += piece
        assert b" 499 " in answer.splitlines()[0] and b"client_gone" in answer
        for number, connection in enumerate(connections):
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        wait_until(lambda: status(server)["queue"]["tokens"] == 500)
        next_answer = pool.submit(ask, server, [7], [[8] * 499] * 8)
        wait_until(lambda: status(server)["queue"]["tokens"] == 4500)
        go.touch()
        assert held.result().status_code == next_answer.result().status_code == 200
        metrics = requests.get(server.url + "/metrics", timeout=5).text
        assert 'grpo_ref_requests_total{path="/v1/logprobs",status="499"} 6.0' in metrics
        wait_until(lambda: status(server)["queue"]["tokens"] == 0)
        assert status(server)["queue"]["requests"] == 0


@pytest.mark.slow
def test_more_requests_than_places_are_told_to_come_back_and_health_stays_quick(model_folder, tmp_path):
    """120 may wait, those of one client 60: 59 more of 2 take as many as are left free."""
    with holding_server(model_folder, tmp_path) as (server, go), ThreadPoolExecutor(120) as pool:

        def ask_as(client):
            body = encode_request(LogprobsRequest.of([5], [[6]], 1.0, client=client))
            return requests.post(server.url + "/v1/logprobs", data=body, timeout=60)

        waiting = []
        for client, fits in (("a", 60), ("b", 30), ("c", 15)):
            waiting += [pool.submit(ask_as, client) for _ in range(fits)]
            wait_for_requests(server, len(waiting))
            busy = ask_as(client)
            assert refusal(busy)[:2] == (503, "busy") and int(busy.headers["Retry-After"]) >= 1
        assert health(server).status_code == 200
        go.touch()
        assert [future.result().status_code for future in waiting] == [200] * 105
        wait_for_requests(server, 0)


@pytest.mark.slow
def test_503_while_loading_and_a_signal_then_ends_it_at_once(model_folder, tmp_path):
    code = code_for(hold_loading, str(tmp_path / "never"))
    with running_server(model_folder, tmp_path, code=code, awaited=False) as server:

        def answers() -> bool:
            with suppress(requests.ConnectionError):
                return health(server) is not None

        wait_until(answers, seconds=60)
        assert (health(server).status_code, health(server).json()["status"]) == (503, "loading")
        answer = ask(server, [5], [[6]])
        assert refusal(answer)[:2] == (503, "loading") and int(answer.headers["Retry-After"]) >= 1
        assert server.end(signal.SIGTERM) == 0


def wait_for_drain(server) -> None:
    wait_until(lambda: health(server).status_code == 503)
    assert health(server).json()["status"] == "draining"


@pytest.mark.slow
def test_a_signal_lets_what_is_in_hand_finish_and_takes_nothing_new(model_folder, tmp_path):
    with holding_server(model_folder, tmp_path) as (server, go), ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, server, [5], [[6] * 300] * 3)
        wait_for_requests(server, 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for_drain(server)
        assert refusal(ask(server, [5], [[6]]))[:2] == (503, "draining")
        go.touch()
        assert server.process.wait(timeout=30) == 0
        assert len(decode_answer(waiting.result().content, 900).logprobs) == 900
        assert "Traceback" not in server.log.read_text() and server.log.read_text().endswith("stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a second signal", "the drain time"])
def test_what_ends_a_server_that_drains(model_folder, tmp_path, kind):
    options = ["--drain_timeout", "1"] if kind == "the drain time" else []
    with holding_server(model_folder, tmp_path, *options) as (server, _), ThreadPoolExecutor() as pool:
        lost = pool.submit(ask, server, [5], [[6]])
        wait_for_requests(server, 1)
        if kind == "a second signal":
            server.process.send_signal(signal.SIGINT)
            wait_for_drain(server)
            assert server.end(signal.SIGTERM) == -signal.SIGTERM
        else:
            assert server.end(signal.SIGTERM) == 1
            assert "drain_timeout=1: 1 requests were not answered in time" in server.log.read_text().splitlines()[-1]
        assert isinstance(lost.exception(), requests.ConnectionError)


@pytest.mark.slow
def test_a_failed_request_is_its_own_error_and_a_dead_worker_ends_the_process(model_folder, tmp_path):
    with running_server(model_folder, tmp_path, code=code_for(break_passes)) as server:
        for token, expected, words in (
            (400, (500, "internal"), "token 400 hurts"),
            (402, (507, "out_of_memory"), "2 tokens does not fit"),
            (403, (500, "internal"), "not finite"),
        ):
            *found, message = refusal(ask(server, [5], [[token]]))
            assert tuple(found) == expected and words in message
        assert ask(server, [5], [[6]]).status_code == 200
        assert refusal(ask(server, [5], [[401]]))[:2] == (503, "worker_died")
        assert server.process.wait(timeout=30) == 1
        log = server.log.read_text()
        assert log.splitlines()[-1] == "RuntimeError: the device is gone"
        assert "the worker died; nothing can be scored any more:\nTraceback" in log


@pytest.mark.slow
def test_what_cannot_be_served_is_said_in_one_line(server, model_folder, tmp_path):
    (tmp_path / "token").write_text("x")
    cases = {
        ("--model_name_or_path", "/no/such/model", "--port", str(free_port())): "model_name_or_path='/no/such/model'",
        ("--model_name_or_path", str(model_folder), "--port", str(server.port)): "another process listens there",
        ("--host", "192.0.2.1", "--token_file", str(tmp_path / "token")): "choose another host",
    }
    for options, complaint in cases.items():
        ended = run_python("ref_server.py", *options, timeout=60)
        assert ended.returncode == 2
        assert complaint in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_server_that_runs_out_of_memory_goes_on_with_smaller_batches(tmp_path, tokenizer):
    """The system refuses it more memory; a batch of 20 sequences needs more, one sequence does not."""
    torch.manual_seed(0)
    wide = Qwen2Config(**{**build_model(tokenizer).config.to_dict(), "intermediate_size": 8192})
    folder = tmp_path / "wide"
    AutoModelForCausalLM.from_config(wide).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with running_server(folder, tmp_path, "--max_batch_tokens", "32768") as server:
        assert ask(server, [5], [[6] * 500]).status_code == 200
        memory = Path(f"/proc/{server.process.pid}/status").read_text()
        limit = (int(memory.split("VmSize:")[1].split()[0]) << 10) + (150 << 20)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, limit))
        answer = ask(server, [5], [[6] * 500] * 20)
        assert answer.status_code == 200
        logprobs = decode_answer(answer.content, 10_000).logprobs.reshape(20, 500)
        assert_rounded(logprobs, logprobs[:1].repeat(20, 0))
        warnings = [line for line in server.log.read_text().splitlines() if "out of memory" in line]
        assert 1 <= len(warnings) <= 6 and "tokens from now on" in warnings[-1]
