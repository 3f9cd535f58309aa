"""Damaged requests to a pool of rollouts: each is stored or refused as the protocol says; a refused one stores nothing.

    FUZZ_EXAMPLES=200000 python -m pytest tests/wire/test_pool_fuzz.py -m slow --hypothesis-seed=1

The pool's application runs in this process. An example is a valid request, and what is done to it.
"""

import json
import os
import random
import sqlite3
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, note, settings
from pools import Pool
from safetensors import SafetensorError
from safetensors.numpy import load, save
from stored import FOLDER, PROBE, RUN, WITH_TURNS, answered, drawn, sha, task_of, weights
from test_fuzz import ON_BYTES, QUIET, SEEDS, check_refusal, nothing

from grpo.config.server import ServerConfig
from grpo.pool.protocol import Lease, RunInfo, Task, Version
from grpo.pool.task_tensors import encode_drawn, encode_tasks
from grpo.wire.tensors import read_tensors

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "20000"))
CODES = {
    400: {"malformed"},
    403: {"set_apart"},
    409: {"other_run", "missing_file", "missing_piece", "damaged"},
    413: {"too_many_tasks", "too_many_groups"},
    422: {"wrong_completions"},
}
TASKS = [task_of(group, [7, group % 40]) for group in range(120)]
DELTA = weights(7, 100)
ODD = [None, True, False, -1, 0, 1, 3, 1.5, -0.5, float("nan"), float("inf"), 2**31, 2**63, 10**400, "", "x", "\ud800"]
ODD += ["0" * 64, "é" * 128, "x" * 129, "\x00", [], {}, [[]], [[0, 0]], [[0]], [[0, 0], None], [["0", 0]], {"a": 1}]
ODD += [[[-1, 0]], [[0.0, 0]], [[0, 0]] * 5000, [[0, 0.5, 1]], [[0, 0.5, 1]] * 5000, [[0, -1, 1]], [[0, 10**400, 1]]]
ODD += [[[0, 1, 0]], [0, 1, 100], eval("[" * 80 + "]" * 80)]


def tasks_of(run: RunInfo) -> list[Task]:
    return [replace(task, columns='{"secret": 5}') for task in TASKS] if run.turns else TASKS


def valid(draw: random.Random, run: RunInfo) -> tuple[str, dict, bytes]:
    """Return the path, the query and the body of a request that the pool takes."""
    version = Version(version=0, sha256=sha(weights(0)), size=5000, whole=True, base=None, delta=None, probe=PROBE)
    later = Version(version=1, sha256=sha(weights(1)), size=5000, whole=False, base=0, delta=sha(DELTA), probe=PROBE)
    # Not always the same, or all would be set apart in the end.
    name = draw.choice(["w", *[f"é {draw.randrange(10**9)}"] * 9])
    tasks = [replace(task, version=draw.randrange(2)) for task in draw.sample(tasks_of(run), draw.randint(0, 3))]
    data = weights(draw.randrange(3), 50)
    start = draw.choice([0, 0, 0, 20])
    groups, drew = [(answered if run.turns else drawn)(task) for task in tasks], (version, later)
    body = encode_drawn(groups, [(version.version, version.sha256) for version in drew])
    results = "results", {"worker": name}, body
    lease = Lease(worker=name, room=draw.choice([0, 1, 5]), holds=[[0, 0]], wait=0.0, message="says")
    lease = replace(lease, card="card", version=0, tokens_per_second=1.5)
    return draw.choice(
        [
            *[results] * 4,
            ("run", {}, run.to_json()),
            ("tasks", {}, encode_tasks(tasks)),
            ("lease", {}, lease.to_json()),
            ("groups", {}, json.dumps({"groups": [[0, 0], [1, 0]], "wait": 0}).encode()),
            ("versions", {}, draw.choice([version, later]).to_json()),
            ("needed", {"version": "0"}, b""),
            ("drift", {}, json.dumps({"groups": [[task.group, 0.05, 6] for task in tasks]}).encode()),
            ("journal", {"group": "0", "attempt": "0", "weights": version.sha256, "worker": name}, b'{"a": 1}\n'),
            ("files", {"sha256": sha(data), "size": "50", "offset": str(start)}, data[start : draw.choice([20, 50])]),
        ]
    )


TEXTS = {
    name: (f"{kind}s", f"{kind}_lengths") for kind in ("column", "outcome") for name in (f"{kind}s", f"{kind}_lengths")
}
"""the tensors that have JSON, and where each text ends"""


def fields(draw, body):
    """JSON that a client would not write."""
    try:
        found = json.loads(body)
    except ValueError:
        return numbers(draw, body)
    within = next((name for name in ("probe", "turns") if found.get(name)), None)
    place = found[within] if within and draw.random() < 0.3 else found
    name = draw.choice([*place, "unknown"])
    change = draw.randrange(4)
    if change == 0:
        place.pop(name, None)
    else:
        place[name] = draw.choice(ODD)
    if "wait" in found and isinstance(found["wait"], int | float):
        found["wait"] = 0 if found["wait"] else found["wait"]  # nobody wants to wait for it
    return json.dumps(found).encode()


def numbers(draw, body):
    """Tensors that do not fit, in a body that is well made."""
    try:
        tensors, (_, metadata) = load(body), read_tensors(body)
    except SafetensorError:  # it is a piece of a file
        return body
    name = draw.choice([*tensors])
    change = draw.randrange(5)
    if change == 0:
        del tensors[name]
    elif name in TEXTS and draw.random() < 0.5:
        name, lengths = TEXTS[name]
        texts = np.split(tensors[name], np.cumsum(tensors[lengths][:-1]))
        texts = [np.frombuffer(fields(draw, text.tobytes()), np.uint8) for text in texts]
        tensors[lengths] = np.asarray([*map(len, texts)], np.int32)
        tensors[name] = np.concatenate(texts)
    elif change == 1:
        tensors[draw.choice(["mask", "", "é"])] = tensors[name]
    elif change == 2:
        with np.errstate(invalid="ignore"):  # of NaN
            tensors[name] = tensors[name].astype(draw.choice(["int64", "float32", "int32", "uint8"]))
    elif change == 3 and len(tensors[name]):
        wrong = [0, 1, -1, 2, 99, 100, 2**31 - 1, -(2**31)]
        wrong = [0, 1, 2, 34, 255] if tensors[name].dtype == np.uint8 else wrong
        wrong = [np.nan, np.inf, -np.inf, 0.0, 1.0, -1e30] if tensors[name].dtype == np.float32 else wrong
        tensors[name][draw.randrange(len(tensors[name]))] = draw.choice(wrong)
    else:
        tensors[name] = np.zeros(draw.choice([0, 1, 3, 5000]), tensors[name].dtype)
    return save(tensors, metadata)


def queries(draw, query):
    if not query or draw.random() < 0.7:
        return query
    name = draw.choice([*query])
    odd = ["", "-1", "0", "1", "1e3", "50", "51", "９", "9" * 19, "9" * 5000, "0" * 64, "g" * 64]
    odd += ["x" * 129, "\x00", "a\nb"]
    return query | {name: draw.choice(odd)}


DAMAGE = [*ON_BYTES, *[fields] * 4, *[numbers] * 4, nothing]


@pytest.mark.slow
@pytest.mark.parametrize("run", [RUN, WITH_TURNS], ids=["plain", "turns"])
def test_damaged_requests_are_refused_or_stored_whole(run, tmp_path, few, caplog):
    file, seen, pages = tmp_path / "run.sqlite", Counter(), []
    pool = Pool(ServerConfig(task="rollouts", pool_file=str(file)))
    reader = sqlite3.connect(file)

    def stored() -> dict[str, object]:
        files = sorted((path.name, path.read_bytes()) for path in Path(f"{file}.files").iterdir())
        tables = "run", "tasks", "versions", "journal"
        return {table: reader.execute(f"SELECT * FROM {table}").fetchall() for table in tables} | {"files": files}

    for data in (FOLDER, weights(0), DELTA):
        pool.put_file(data)
    for name, body in (("run", run.to_json()), ("tasks", encode_tasks(tasks_of(run)))):
        assert pool.post(name, body).status == 200
    examples = len(few(range(EXAMPLES), 500))

    @settings(QUIET, max_examples=examples)
    @given(SEEDS)
    def example(seed):
        draw = random.Random(seed)
        name, query, body = valid(draw, run)
        damage = [draw.choice(DAMAGE), draw.choice([nothing, nothing, *ON_BYTES])]
        note(f"{name}: {', '.join(harm.__name__ for harm in damage)}")
        for harm in damage:
            body = harm(draw, body) if body else b""
        before = stored()
        answer = pool.post(name, body, **queries(draw, query))
        seen[answer.status] += 1
        if answer.status != 200:
            check_refusal(answer.status, answer.headers["Content-Type"], answer.body, CODES)
            # A damaged file is dropped, and the journal of refused completions.
            is_damaged = answer.status == 409 and b"damaged" in answer.body
            may_go = {"files"} if is_damaged else {"journal"} if answer.status == 422 else set()
            assert {name for name, rows in stored().items() if rows != before[name]} <= may_go
        if seen.total() % 100 == 0:
            pages.append([pool.get(page).status for page in ("/status", "/metrics")] == [200, 200])

    began = time.perf_counter()
    example()
    rate = seen.total() / (time.perf_counter() - began)
    print(f"\n{seen.total()} examples, {rate:.0f} a second: {dict(sorted(seen.items()))}")
    reached = (200, 400, 409, 413, 422) if examples >= 10_000 else (200, 400)  # the others are rare in a part
    assert min(seen[status] for status in reached) >= 3, "the damage does not reach everything"
    assert all(pages) and "Traceback" not in caplog.text
    reader.close()
    pool.service.close()
