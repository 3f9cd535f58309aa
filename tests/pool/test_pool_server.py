"""The pool of rollouts over HTTP: in this process where the application is enough, else by real servers."""

import json
import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import requests
from conftest import free_port, run_python, running_server
from pools import BYTES, Pool
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load, save
from servers import status, wait_until
from stored import FOLDER, PROBE, RUN, drawn, sha, task_of, weights

from grpo.config.command_line import parse_arguments
from grpo.config.server import ServerConfig
from grpo.pool import leases as leases_module
from grpo.pool import pool_service as service_module
from grpo.pool.files import PIECE_BYTES
from grpo.pool.protocol import GroupResult, Lease, Task, Version
from grpo.pool.store import Recording
from grpo.pool.task_tensors import decode_tasks, encode_drawn, encode_tasks
from grpo.wire.tensors import read_tensors

TASKS = [task_of(0, [7, 8]), task_of(1, [9]), task_of(2, version=1)]


@pytest.fixture
def pool(pool_config):
    made = Pool(pool_config)
    yield made
    made.service.close()


@pytest.fixture
def begun(pool):
    """A pool with a run, version 0 and three tasks, one of them for version 1."""
    pool.put_file(FOLDER)
    assert pool.post("run", RUN.to_json()).status == 200
    pool.put_version(0)
    assert json.loads(pool.post("tasks", encode_tasks(TASKS)).body) == {"tasks": 3}
    return pool


def asking(worker: str, room: int = 1, *holds: Task, wait: float = 0.0) -> bytes:
    """The body of a worker's request for tasks."""
    return Lease(worker=worker, room=room, holds=[[*task.key] for task in holds], wait=wait).to_json()


@contextmanager
def later(action):
    """Do something in another thread, a moment after what is inside has begun."""
    thread = threading.Timer(0.2, action)
    thread.start()
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 5
    thread.join()


def test_a_run_from_the_first_task_to_the_last_result(pool):
    health = json.loads(pool.get("/health").body)
    assert (health["status"], health["task"], health["model"]) == ("ready", "rollouts", "")
    answer = pool.get("run")
    assert answer.refusal[:2] == (404, "no_run") and answer.headers["Retry-After"] == "2"
    for path, body in (("tasks", encode_tasks(TASKS)), ("lease", asking("w"))):
        assert pool.post(path, body).refusal[1] == "no_run"
    assert pool.status()["errors"] == []  # a worker that waits for a trainer is no error
    assert pool.post("run", RUN.to_json()).status == pool.post("run", RUN.to_json()).status == 200
    assert pool.post("run", replace(RUN, run="f" * 16).to_json()).refusal[:2] == (409, "other_run")
    assert pool.get("run").body == RUN.to_json()
    version = Version(version=0, sha256=sha(weights(0)), size=5000, whole=True, base=None, delta=None, probe=PROBE)
    assert pool.post("versions", version.to_json()).refusal[:2] == (409, "missing_file")
    assert pool.put_version(0) == version
    assert json.loads(pool.get("versions").body) == [json.loads(version.to_json())]
    pool.post("tasks", encode_tasks(TASKS))
    assert pool.lease(room=5) == TASKS[:2] and pool.lease("other", room=5) == []
    assert pool.lease(room=0, holds=[(0, 0)]) == [] and pool.lease("other", room=5) == TASKS[1:2]
    assert pool.take((0, 0), (1, 0)) == []
    assert pool.send(drawn(TASKS[0])) == ["accepted"]
    late = replace(drawn(TASKS[0]), logprobs=[[-9.0] * 2, [-9.0] * 4])
    assert pool.send(drawn(TASKS[1]), late, drawn(task_of(9))) == ["accepted", "already there", "not wanted"]
    assert pool.take((1, 0), (9, 0), (0, 0)) == [drawn(TASKS[1]), drawn(TASKS[0])]
    assert json.loads(pool.get("/health").body)["model"] == "runs/a"
    assert pool.post("needed", version=1).status == 200 and pool.get("versions").body == b"[]"
    assert pool.take((0, 0)) == [drawn(TASKS[0])]


def test_all_tasks_of_a_lease_are_of_one_version_which_it_names(begun):
    newer = begun.put_version(1)
    assert begun.lease(room=9) == TASKS[:2]
    answer = begun.post("lease", asking("b", 9))
    assert decode_tasks(answer.body, RUN.vocab_size) == TASKS[2:]
    expected = {"lease_seconds": "30", "run": RUN.run, "version": "1", "sha256": newer.sha256}
    assert read_tensors(answer.body)[1] == expected


def test_with_in_flight_weight_updates_any_task_is_drawn_by_the_newest_version_there_is(pool):
    pool.put_file(FOLDER)
    pool.post("run", replace(RUN, in_flight_weight_updates=True).to_json())
    pool.put_version(1)
    pool.post("tasks", encode_tasks([*TASKS, task_of(9, version=3)]))  # of versions 0, 0, 1 and 3

    def newest(room: int, *holds: Task) -> tuple:
        answer = pool.post("lease", asking("w", room, *holds))
        named = read_tensors(answer.body)[1]
        return [task.key for task in decode_tasks(answer.body, RUN.vocab_size)], named["version"], named["sha256"]

    def drawn_by(task: Task, *versions: int) -> GroupResult:
        ids = [[3, 4, 5, 2], [5, 6, 7, 8]]
        return replace(drawn(task), completions=ids, logprobs=[[-0.5] * 4] * 2, versions=[[*versions]] * 2)

    def send(task: Task, *versions: int, weights=None):
        return pool.send(drawn_by(task, *versions), weights=weights)

    assert newest(0) == ([], "1", sha(weights(1)))
    assert newest(2) == ([(0, 0), (1, 0)], "1", sha(weights(1)))
    assert newest(9, *TASKS[:2])[0] == [TASKS[2].key]  # version 3 is not here
    pool.put_version(2)
    assert newest(0, *TASKS) == ([], "2", sha(weights(2)))
    assert send(TASKS[0], 1, 1, 2, 2) == ["accepted"]
    assert "by versions [1, 2]: the" in pool.results(drawn_by(TASKS[1], 2, 1, 1, 1), name="x").refusal[2]
    old = dict(pool.weights)
    pool.put_version(2, salt=7)  # the run went back: what is being drawn may have tokens of what is gone
    assert send(TASKS[1], 1, 1, 1, 2, weights=old) == ["not wanted"]
    assert pool.take((0, 0)) == []  # it had such tokens
    assert newest(9) == ([task.key for task in TASKS], "2", sha(weights(9)))
    newer = drawn_by(TASKS[1], 1, 1, 2, 2)
    assert pool.send(newer, weights=old) == ["not wanted"]
    # A worker whose engine had both: its label says 2 of either.
    both = encode_drawn([newer], [*pool.weights.items(), (2, old[2])])
    assert json.loads(pool.post("results", both, worker="w").body) == {"results": ["not wanted"]}
    assert pool.send(newer) == ["accepted"] and send(TASKS[0], 1, 1, 1, 1) == ["accepted"]
    pool.post("drift", b'{"groups": [[0, 3.0, 4]]}')
    assert pool.status()["workers"][0]["drift"] == 3.0 and pool.status()["workers"][0]["state"] != "apart"


def test_workers_that_draw_many_groups_share_them(begun):
    begun.send(*map(drawn, TASKS[:2]))
    assert begun.lease("idle", room=0) == begun.lease("b", room=32) == []  # b waits for tasks, the other one does not
    begun.post("tasks", encode_tasks([task_of(group) for group in range(10, 20)]))
    first = begun.lease("a", room=32)
    assert [task.group for task in first] == [10, 11, 12, 13, 14]
    keys = [task.key for task in first]
    assert begun.lease("a", room=27, holds=keys) == []
    assert [task.group for task in begun.lease("b", room=3)] == [15, 16, 17]
    assert begun.lease("b", room=0) == []  # it goes away
    assert [task.group for task in begun.lease("a", room=27, holds=keys)] == [15, 16, 17, 18, 19]


def test_who_waits_is_answered_as_soon_as_there_is_something(begun):
    with later(lambda: begun.send(drawn(TASKS[1]))):
        assert begun.take((0, 0), (1, 0), wait=30) == [drawn(TASKS[1])]
    assert begun.lease("a") == TASKS[:1]
    with later(lambda: begun.put_version(1)):
        assert begun.lease("b", wait=30) == TASKS[2:]
    with later(lambda: begun.lease("a", room=0)):  # it gives back what it holds
        assert begun.lease("c", wait=30) == TASKS[:1]
    began = time.monotonic()
    assert begun.take((0, 0), wait=0.3) == [] and begun.lease("d", wait=0.3) == []
    assert 0.6 <= time.monotonic() - began < 5


def test_a_worker_loses_its_leases_when_it_is_silent_and_not_while_it_waits(begun, monkeypatch):
    monkeypatch.setattr(leases_module, "LEASE_SECONDS", 1)
    monkeypatch.setattr(service_module, "_CHECK_SECONDS", 0.05)
    assert begun.lease("first", room=2) == TASKS[:2]
    thread = threading.Thread(target=lambda: begun.lease("first", holds=[(0, 0), (1, 0)], wait=1.5))
    thread.start()
    assert begun.lease("next", wait=1.3) == []
    thread.join()
    assert begun.lease("next", wait=20) == TASKS[:1]
    states = {worker["name"]: worker["state"] for worker in begun.status()["workers"]}
    assert states == {"first": "silent", "next": "drawing"}


def test_who_waits_is_let_go_when_the_client_goes_the_server_ends_or_too_many_wait(begun):
    ask = partial(begun.post, "groups", json.dumps({"groups": [[0, 0]], "wait": 30}).encode())
    assert ask(is_gone=lambda: True).refusal[:2] == (499, "client_gone")
    begun.service.waiting_threads = threading.Semaphore(0)
    answer = ask()
    assert answer.refusal[:2] == (503, "busy") and answer.headers["Retry-After"] == "1"
    assert begun.lease(wait=30) == TASKS[:1]  # nobody needs to wait for that
    begun.service.waiting_threads = threading.Semaphore(1)
    with later(lambda: (begun.service.change_info(status="draining"), begun.service.drain(1))):
        answer = ask()
        assert answer.refusal[:2] == (503, "draining") and answer.headers["Retry-After"] == "2"


def test_a_worker_whose_uploads_are_refused_is_set_apart(begun, caplog):
    wrong = replace(drawn(TASKS[0]), logprobs=[[0.5] * 2, [0.5] * 4])
    name = "é liar"
    for _ in range(3):
        assert begun.lease(name, room=2) == TASKS[:2]
        answer = begun.results(drawn(TASKS[1]), wrong, name=name)
        assert answer.refusal[:2] == (422, "wrong_completions") and "a log-prob is above 0" in answer.refusal[2]
    assert begun.take((1, 0)) == []  # nothing of a refused upload is kept
    lease = begun.post("lease", asking(name, 1, TASKS[0]))  # it holds nothing, whatever it says
    for answer in (lease, begun.results(drawn(TASKS[0]), name=name)):
        status, code, message = answer.refusal
        assert (status, code) == (403, "set_apart") and name in message and "a log-prob is above 0" in message
    assert f"worker {name!r} is suspended: 3 uploads in a row were refused, the last: group 0" in caplog.text
    (shown,) = begun.status()["workers"]
    assert (shown["name"], shown["state"], shown["refusals"], shown["leases"]) == (name, "apart", 3, 0)
    assert begun.lease("another process") == TASKS[:1]


def test_a_worker_that_draws_by_other_weights_than_it_says_is_set_apart(begun, caplog):
    assert begun.lease("right") == TASKS[:1] and begun.lease("wrong") == TASKS[1:2]
    assert begun.send(drawn(TASKS[0]), name="right") == begun.send(drawn(TASKS[1]), name="wrong") == ["accepted"]
    says = {"groups": [[TASKS[0].group, 0.04, 6], [TASKS[1].group, 0.58, 6], [999, 9.0, 6]]}
    assert begun.post("drift", json.dumps(says).encode()).status == 200
    shown = {worker["name"]: (worker["state"], worker["drift"]) for worker in begun.status()["workers"]}
    assert shown == {"right": ("waiting", 0.04), "wrong": ("apart", 0.58)}
    assert "worker 'wrong' is suspended: its log-probs are 0.58 nats a token from the trainer's" in caplog.text
    assert begun.post("lease", asking("wrong")).refusal[:2] == (403, "set_apart")
    for damaged in ({}, {"groups": [[0, -1, 6]]}, {"groups": [[0, 0.1, 0]]}, {"groups": [[0.5, 0.1, 6]]}):
        assert begun.post("drift", json.dumps(damaged).encode()).refusal[:2] == (400, "malformed")


@pytest.mark.parametrize(("is_dropped", "starts_again"), [(False, False), (False, True), (True, True)])
def test_what_replaced_weights_drew_is_not_wanted(begun, is_dropped, starts_again):
    """The run goes on from an earlier checkpoint and makes version 0 anew, while a worker draws by the old one."""
    assert begun.lease("old", room=2) == TASKS[:2] and begun.send(drawn(TASKS[1]), name="old") == ["accepted"]
    begun.put_version(1)
    old = dict(begun.weights)
    if is_dropped:
        assert begun.post("needed", version=1).status == 200
    if starts_again:  # it has forgotten its leases
        begun.service.close()
        begun.start()
    begun.put_version(0, salt=100)
    assert begun.take((1, 0)) == []
    assert begun.lease("old", holds=[(0, 0)]) == TASKS[1:2]  # it holds the other one
    assert begun.send(drawn(TASKS[0]), name="old", weights=old) == ["not wanted"]
    assert begun.lease("another") == TASKS[:1]
    assert begun.send(*map(drawn, TASKS[:2]), name="old") == ["accepted"] * 2


def test_a_journal_is_of_a_task_without_completions_and_of_the_weights_that_draw_it(begun):
    """The third task's version is not there yet."""
    weights, lines = begun.weights[0], (b'{"ids": [1]}\n', '{"text": "é"}\n'.encode())

    def asked(task: Task, weights: str = weights) -> dict:
        return {"group": task.group, "attempt": task.attempt, "weights": weights}

    def add(line: bytes, task: Task, **changes) -> bool:
        answer = begun.post("journal", line, **asked(task, **changes), worker="w")
        return json.loads(answer.body)["wanted"]

    def read(task: Task, **changes) -> bytes:
        return begun.get("journal", **asked(task, **changes)).body

    assert all(add(line, TASKS[0]) for line in lines) and add(lines[1], TASKS[1])
    assert not any(add(lines[0], task) for task in (TASKS[2], replace(TASKS[0], attempt=1), replace(TASKS[0], group=9)))
    assert not add(lines[0], TASKS[0], weights="f" * 64) and read(TASKS[0], weights="f" * 64) == b""
    begun.service.close()
    begun.start()
    assert read(TASKS[0]) == b"".join(lines) and read(TASKS[1]) == lines[1] and read(TASKS[2]) == b""
    assert begun.send(drawn(TASKS[0])) == ["accepted"]
    assert not add(lines[0], TASKS[0]) and read(TASKS[0]) == b"" and read(TASKS[1]) == lines[1]
    wrong = replace(drawn(TASKS[1]), logprobs=[[0.5] * 2, [0.5] * 4])
    assert begun.results(wrong).status == 422 and read(TASKS[1]) == b""  # the next worker would be refused for it too
    assert add(lines[0], TASKS[1])
    begun.put_version(0, salt=100)
    assert read(TASKS[1]) == b"" and not add(lines[0], TASKS[1])
    for line, changes in ((b'{"ids"', {}), (b"", {}), (lines[0], {"weights": "x"}), (lines[0], {"group": "-1"})):
        refusal = begun.post("journal", line, **asked(TASKS[1]) | {"worker": "w"} | changes).refusal
        assert refusal[:2] == (400, "malformed")
    begun.service.leases.refused("w", [], "so")
    begun.service.leases.refused("w", [], "so")
    assert begun.post("journal", lines[0], **asked(TASKS[1]), worker="w").refusal[:2] == (403, "set_apart")


def test_a_result_names_the_weights_that_drew_it(begun):
    status, code, message = begun.post("results", encode_drawn([drawn(TASKS[0])]), worker="w").refusal
    assert (status, code) == (400, "malformed") and "has no weights as JSON: update the worker" in message
    refusal = begun.results(drawn(TASKS[0]), weights={1: begun.weights[0]}).refusal
    assert refusal == (400, "malformed", "weights in the metadata: version 0 is missing")
    for weights_sent in ("[1]", "{", '[["0", 5]]', '[[0, "f"]]', "[" * 10**5):
        body = save(load(encode_drawn([drawn(TASKS[0])])), {"weights": weights_sent})
        assert begun.post("results", body, worker="w").refusal[:2] == (400, "malformed")
    begun.post("needed", version=1)  # a late one: its version may be dropped already
    assert begun.send(drawn(TASKS[0])) == ["accepted"]


def test_a_file_is_sent_whole_or_in_parts(begun):
    data = random.Random(5).randbytes(PIECE_BYTES + 1000)
    begun.put_file(data)
    mark = f'"{sha(data)}"'

    def part(wanted: str, data=data):
        answer = begun.get("files", sha256=sha(data), headers={"Range": wanted} if wanted else {})
        return answer.status, answer.headers.get("Content-Range"), answer.body

    assert part("", FOLDER) == (200, None, FOLDER) == part("lines=1-2", FOLDER) == part("bytes=-5", FOLDER)
    size = len(data)
    assert part("") == (206, f"bytes 0-{PIECE_BYTES - 1}/{size}", data[:PIECE_BYTES])
    assert part("bytes=5-") == (206, f"bytes 5-{PIECE_BYTES + 4}/{size}", data[5 : PIECE_BYTES + 5])
    assert part(f"bytes={size - 1}-") == (206, f"bytes {size - 1}-{size - 1}/{size}", data[-1:])
    assert part("bytes=7-7") == (206, f"bytes 7-7/{size}", data[7:8])
    assert begun.get("files", sha256=sha(data)).headers["Etag"] == mark
    for wanted in (f"bytes={size}-", "bytes=7-6"):
        refusal = begun.get("files", sha256=sha(data), headers={"Range": wanted}).refusal
        assert refusal[:2] == (416, "range_not_satisfiable")
    assert begun.get("files", sha256="0" * 64).refusal[:2] == (404, "no_file")
    half = sha(data + b".")
    begun.post("files", data[:10], sha256=half, size=size + 1, offset=0)
    assert begun.get("files", sha256=half).refusal[:2] == (404, "no_file")
    assert begun.post("files", b"x", sha256=half, size=size + 1, offset=11).refusal[:2] == (409, "missing_piece")


def test_what_no_client_sends_is_refused_before_it_is_read(begun):
    for path in ("run", "files", "versions", "needed", "tasks", "groups", "lease", "results", "journal"):
        answer = begun.post(path, b"{}", headers={"Content-Type": "text/plain"}, sha256="0" * 64, size=2, offset=0)
        assert answer.refusal[:2] == (415, "unsupported_media_type"), path
    too_large = 413, "request_entity_too_large", "the body is larger than 4 MiB"
    for path in ("run", "versions", "lease", "groups"):
        assert begun.post(path, bytes((4 << 20) + 1)).refusal == too_large
    assert begun.post("needed", version="-1").refusal[:2] == (400, "malformed")
    assert begun.post("results", encode_drawn([]), worker="w" * 129).refusal[:2] == (400, "malformed")
    assert begun.ask("PUT", "run").refusal == (405, "method_not_allowed", "use GET,POST for /v1/rollouts/run")
    assert "its --task is rollouts" in begun.post("/v1/logprobs").refusal[2]


def test_it_says_how_it_is(begun):
    begun.lease("w", room=1)
    begun.send(drawn(TASKS[0]))
    assert begun.post("drift", json.dumps({"groups": [[0, 0.25, 6]]}).encode()).status == 200
    begun.results(replace(drawn(TASKS[1]), logprobs=[[0.5] * 2, [0.5] * 4]), name="x")
    begun.lease("w", room=1)
    shown = begun.status()
    assert shown["run"] == {"run": RUN.run, "name": RUN.name} and shown["versions"] == [0]
    assert shown["tasks"] == {"leased": 1, "waiting": 1} and shown["bytes"]["file"] > 4096
    assert shown["rounds"] == [
        {"round": 1, "version": 1, "last_version": 1, "tasks": 1, "drawn": 0, "tokens": 0},
        {"round": 0, "version": 0, "last_version": 0, "tasks": 2, "drawn": 1, "tokens": 6},
    ]
    worker = next(worker for worker in shown["workers"] if worker["name"] == "w")
    # docs/protocol.md; the trainer's log uses it.
    assert [*worker] == [
        *("name", "card", "version", "tokens_per_second", "state", "message", "leases", "last_seen", "last_upload"),
        *("groups", "tokens", "refusals", "reason", "drift"),
    ]
    assert 0 <= worker["last_upload"] < 5 and (worker["groups"], worker["tokens"]) == (1, 6)
    samples = {
        (sample.name.removeprefix("grpo_ref_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(begun.get("/metrics").body.decode())
        for sample in family.samples
    }
    assert samples["pool_leases_total",] == 2 and samples["pool_tokens_total",] == 6
    assert samples["pool_results_total", "accepted"] == samples["pool_results_total", "refused"] == 1
    assert samples["pool_tasks", "leased"] == samples["pool_tasks", "waiting"] == 1
    assert samples["pool_worker_drift", "w"] == 0.25 and ("pool_worker_drift", "x") not in samples
    assert samples["pool_worker_version", "w"] == -1 and samples["pool_worker_tokens_per_second", "w"] == 0
    assert samples["pool_workers", "drawing"] == samples["pool_workers", "waiting"] == 1
    assert samples["pool_bytes_total", "received"] > len(FOLDER) + 5000
    assert samples["requests_total", "/v1/rollouts/results", "422"] == 1
    line = begun.service.summary()
    assert re.match(r"last \d s: 1 groups, ", line) and "1 refused; 1 tasks wait, 1 are drawn by 1 workers" in line


POOL = ["--task", "rollouts", "--pool_file", "x"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--task", "rollouts"], "pool_file=None: name one"),
        (["--pool_file", "x"], "pool_file='x': it does nothing without task rollouts"),
        (["--task", "reward", "--pool_file", "x"], "pool_file='x': it does nothing without task rollouts"),
        ([*POOL, "--pool_url", "postgresql://h/d"], "leave out pool_file, or this"),
        ([*POOL[:2], "--pool_url", "postgresql://h/d"], "pool_folder=None: name one that its pools share"),
        ([*POOL[:2], "--pool_url", "mysql://h/d"], "pool_url='mysql://h/d': write it as postgresql://USER@HOST/"),
        ([*POOL, "--pool_folder", "s3://b/p"], "pool_folder='s3://b/p': a bucket needs a pool_url: name a folder"),
        ([*POOL, "--update_folder", "y"], "update_folder='y': it does nothing without task logprobs"),
        ([*POOL, "--estimate"], "estimate=True: it does nothing without task logprobs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(ServerConfig, "", options)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_pool_passes_over_the_model_of_its_trainers_file():
    options = ["--quantization", "4bit", "--model_name_or_path", "org/big"]
    assert parse_arguments(ServerConfig, "", POOL + options).pool_file == "x"


# Real servers


def post(server, path, body=b"", **query):
    return requests.post(f"{server.url}/v1/rollouts/{path}", data=body, params=query, headers=BYTES, timeout=30)


@pytest.mark.slow
@pytest.mark.plain_start
def test_what_was_answered_200_is_there_after_a_sigkill_and_after_a_stop(tmp_path):
    file = tmp_path / "run.sqlite"
    options = ["--task", "rollouts", "--pool_file", str(file)]
    with running_server(None, tmp_path, *options) as server:
        assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert post(server, "run", RUN.to_json()).status_code == 200
        answered = []

        def fill() -> None:
            with suppress(requests.RequestException):
                for group in range(10**6):
                    if post(server, "tasks", encode_tasks([task_of(group)])).status_code == 200:
                        answered.append(group)

        filling = threading.Thread(target=fill)
        filling.start()
        wait_until(lambda: len(answered) > 20)
        second = run_python("ref_server.py", *options, "--port", free_port(), timeout=60)
        assert second.returncode == 2 and f"error: pool_file={str(file)!r}: another pool writes to it" in second.stderr
        server.end(signal.SIGKILL)
        filling.join()
    with running_server(None, tmp_path, *options, port=server.port) as server:
        shown = requests.get(f"{server.url}/status", timeout=5).json()
        assert shown["run"]["run"] == RUN.run and len(answered) <= shown["tasks"]["waiting"] <= len(answered) + 1
        # Long polls: one whose client goes, and one that the end of the server lets go.
        body = json.dumps({"groups": [[0, 0]], "wait": 30}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST /v1/rollouts/groups HTTP/1.1\r\nContent-Type: {BYTES['Content-Type']}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        gone = 'grpo_ref_requests_total{path="/v1/rollouts/groups",status="499"} 1.0'
        wait_until(lambda: gone in requests.get(f"{server.url}/metrics", timeout=5).text)
        answers, body = [], asking("w", wait=30)
        thread = threading.Thread(target=lambda: answers.append(post(server, "lease", body)))
        thread.start()
        wait_until(lambda: status(server)["workers"])
        assert server.end(signal.SIGTERM) == 0
        thread.join()
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "draining"
    assert "Traceback" not in server.log.read_text()
    assert sorted(os.listdir(tmp_path)) == ["run.sqlite", "run.sqlite.files", server.log.name]
    with closing(Recording(str(file))) as recording:
        assert all(recording.find((group, 0))[0] for group in answered)
