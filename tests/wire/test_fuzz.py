"""Damaged requests against a real server: each is answered or refused as the protocol says, and nothing else happens.

    FUZZ_EXAMPLES=200000 python -m pytest tests/wire/test_fuzz.py -m slow --hypothesis-seed=1

An example is a valid request, and what is done to it: both come from eight bytes, which a failing example prints.
"""

import gzip
import http.client
import json
import os
import random
import socket
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import requests
import torch
from conftest import running_server
from faulty_server import code_for, lower_limits
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from rounding import assert_rounded
from safetensors.numpy import load, save
from servers import exact
from transformers import AutoModelForCausalLM

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5000"))
GROWTH = 16  # MiB: a leak of 100 bytes a request shows in 200,000
MOST_SEQUENCES, MOST_TOKENS = 12, 400
CODES = {400: {"malformed"}, 413: {"too_many_sequences", "too_many_tokens"}, 422: {"sequence_too_long"}}
TENSORS = ["input_ids", "prompt_lengths", "completion_lengths"]

QUIET = settings(
    database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], print_blob=False
)
SEEDS = st.binary(min_size=8, max_size=8)  # one draw: more of them would take longer than the request


@pytest.fixture(scope="module")
def fuzzed(model_folder, tmp_path_factory):
    limits = ["--max_queue_tokens", str(2 * MOST_TOKENS), "--max_length", "100"]
    code = code_for(lower_limits, 64 << 20, MOST_SEQUENCES)
    # What glibc keeps for each of the server's many threads fills up for hours, and would hide a leak.
    flat = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}
    folder = tmp_path_factory.mktemp("fuzzed")
    with running_server(model_folder, folder, *limits, environment=flat, code=code) as server:
        yield server


# Valid requests


def valid(draw: random.Random) -> bytes:
    """Up to three prompts with up to four completions each, some of them empty."""
    prompts, completions, ids = [], [], []
    for _ in range(draw.randint(1, 3)):
        prompt = [draw.randrange(300) for _ in range(draw.randint(1, 8))]
        for _ in range(draw.randint(1, 4)):
            completion = [draw.randrange(300) for _ in range(draw.choice([0, 1, 2, 5, 20]))]
            ids += prompt + completion
            prompts.append(len(prompt))
            completions.append(len(completion))
    arrays = zip(TENSORS, (ids, prompts, completions), strict=True)
    metadata = {"temperature": draw.choice(["1.0", "0.7", "2", "1e-3"]), "request_id": "r" * draw.randrange(5)}
    if draw.random() < 0.5:
        metadata["client"] = f"client {draw.randrange(1000)}"
    if draw.random() < 0.3:
        metadata["top_k"] = draw.choice(["0", "1", "7", "64", "256"])
    return save({name: np.array(values, np.int32) for name, values in arrays}, metadata)


# Damage: (what draws, a valid body) -> another body


def overwrite(draw, body):
    damaged = bytearray(body)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place, odd = draw.randrange(len(body)), [0, 9, 32, 34, 44, 48, 57, 92, 93, 123, 125, 128, 255]
        damaged[place] = draw.choice([*odd, damaged[place] ^ 1 << draw.randrange(8)])
    return bytes(damaged)


def cut(draw, body):
    return body[: draw.randrange(len(body))]


def delete(draw, body):
    start = draw.randrange(len(body))
    return body[:start] + body[start + draw.choice([1, 4, 8, 40]) :]


def insert(draw, body):
    place = draw.randrange(len(body) + 1)
    return body[:place] + draw.randbytes(draw.choice([1, 4, 8, 1000])) + body[place:]


def repeat(draw, body):
    start = draw.randrange(len(body))
    end = draw.randrange(start, len(body)) + 1
    return body[:end] + body[start:]


def replace(draw, body):
    return draw.choice([b"", bytes(8), body[:8], gzip.compress(body), body + body, draw.randbytes(100), b"{}", b"\xff"])


def header_length(draw, body):
    true = int.from_bytes(body[:8], "little")
    numbers = [0, 1, 8, true - 1, true + 1, true - 8, len(body), len(body) - 8, 10**8 + 1, 2**32, 2**63, 2**64 - 1]
    return (draw.choice([*numbers, draw.randrange(2**64)]) % 2**64).to_bytes(8, "little") + body[8:]


def numbers(draw, body):
    """Lengths and ids that do not fit, in a body that is well made."""
    tensors = load(body)
    tensor = tensors[draw.choice(sorted(tensors))]
    wrong = [0, 1, -1, 2, 299, 471, 472, 10**6, 2**31 - 1, -(2**31), len(tensors["input_ids"])]
    for _ in range(draw.choice([1, 1, 2])):
        tensor[draw.randrange(len(tensor))] = np.array(draw.choice(wrong)).astype(tensor.dtype)
    return save(tensors, {})


def top_k(draw, body):
    """A number of likeliest tokens that is none, is too many, or has another meaning elsewhere."""
    wrong = ["-1", "257", "00", "+7", "7.0", "1e1", " 7", "7\n", "\u0667", "", "x" * 5000, "9" * 5000, "true", "\ud800"]
    header, data = split(body)
    name = draw.choice(["top_k"] * 4 + ["Top_K"])
    header["__metadata__"] = {**header.get("__metadata__", {}), name: draw.choice(wrong)}
    return join(header, data)


def sizes(draw, body):
    """More sequences, or longer ones, than are allowed, or just as many."""
    count, longer = draw.choice([(1, 99), (1, 100), (4, 99), (5, 80), (5, 81), (12, 9), (13, 9), (13, 80)])
    arrays = np.ones(count * (longer + 1), np.int32), np.ones(count, np.int32), np.full(count, longer, np.int32)
    return save(dict(zip(TENSORS, arrays, strict=True)), {})


def tensors(draw, body):
    arrays = load(body)
    name = draw.choice(sorted(arrays))
    change = draw.randrange(5)
    if change == 0:
        del arrays[name]
    elif change == 1:
        arrays[draw.choice(["mask", "", "é", "x" * 100_000, "\n", "__proto__"])] = arrays[name]
    elif change == 2:
        arrays[name] = arrays[name].astype(draw.choice(["int64", "float32", "uint8", "bool", "float64", "int16"]))
    elif change == 3:
        arrays[name] = arrays[name].reshape(draw.choice([(-1, 1), (1, -1), (1,) * 40 + (-1,)]))
    else:
        arrays[name] = np.zeros(draw.choice([(0,), (), (0, 2**40)]), np.int32)
    return save(arrays, {})


SHAPES = [[], [-1], [0], [1, 1], [2**31], [2**63], [2**64 - 1], [2**64], [0, 2**63], [2**32, 2**32], [1] * 70, [[1]]]
SHAPES += [None, "3", {}, [1.0], ["1"], [True]]
OFFSETS = [[], [0], [0, 0], [4, 0], [0, 4, 8], [-4, 0], [0, 2**31], [0, 2**63], [0, 2**64 - 1], [2**64, 2**65]]
OFFSETS += [None, "0", {}, [0.0, 4.0], [1, 5]]
DTYPES = ["I64", "F32", "F64", "BF16", "F16", "BOOL", "U8", "I8", "U32", "F8_E4M3", "F4", "i32", "", "I32 ", None, 4]


def header_fields(draw, body):
    header, data = split(body)
    field = draw.choice(["dtype", "shape", "data_offsets"])
    name, second = draw.sample(sorted(header.keys() - {"__metadata__"}), 2)
    if draw.random() < 0.2:
        header[name][field] = header[second][field]
    elif draw.random() < 0.2:
        del header[name][field]
    else:
        header[name][field] = draw.choice({"dtype": DTYPES, "shape": SHAPES, "data_offsets": OFFSETS}[field])
    return join(header, data)


def header_text(draw, body):
    """What a JSON library would not write."""
    header, data = split(body)
    text = json.dumps(header).encode()
    name = draw.choice(TENSORS)
    entry = json.dumps(header[name]).encode()
    odd = [*b'"\\ud800" 1e999 -0 NaN Infinity // "\xff"'.split(), b"9" * 300, b"9" * 5000, b"1" + b"e1" * 9]
    odd += [b"[" * depth + b"]" * depth for depth in (20, 127, 200, 5000)]
    odd += [b'{"a":' * depth + b"1" + b"}" * depth for depth in (20, 127, 5000)]
    change = draw.randrange(4)
    if change == 0:
        text = text.replace(entry, entry[:-1] + b', "x": ' + draw.choice(odd) + b"}")
    elif change == 1:  # the same name twice
        text = text[:-1] + b', "%s": ' % name.encode() + draw.choice([entry, b"{}", b"null"]) + b"}"
    elif change == 2:
        text = text[:-1] + b', "__metadata__": ' + draw.choice([b"{}", b"null", b'{"temperature": "2"}']) + b"}"
    else:
        blank = draw.choice([b" ", b"\n", b"\x00", b"\x0b"]) * draw.choice([1, 8, 500])
        text = draw.choice([b"[]", b"null", b"", b"\xef\xbb\xbf" + text, text + text, blank + text, text + blank])
    return len(text).to_bytes(8, "little") + text + data


def nothing(draw, body):
    return body


def split(body: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(body[:8], "little")
    return json.loads(body[8:end]), body[end:]


def join(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ON_BYTES = [overwrite, cut, delete, insert, repeat, replace, header_length]
DAMAGE = [*ON_BYTES, numbers, top_k, sizes, tensors, header_fields, header_text, nothing]


# Tests


def check_refusal(status: int, kind: str, body: bytes, codes: dict[int, set[str]]) -> None:
    answer = json.loads(body)
    assert kind == "application/json" and answer.keys() == {"error"} and answer["error"].keys() == {"code", "message"}
    assert answer["error"]["code"] in codes[status] and answer["error"]["message"] and len(body) < 4000


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_damaged_bodies_are_refused_or_answered_and_nothing_grows(fuzzed, model_folder, few):
    """An undamaged request is answered the same now and then, and the server's memory stays as it was."""
    arrays = [5, 6, 7, 8, 9, 5, 6, 7, 10, 5, 6, 7, 11, 12, 13, 14], [3, 3, 3], [2, 1, 4]
    fixed = save({name: np.array(values, np.int32) for name, values in zip(TENSORS, arrays, strict=True)})
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    right = exact(model, [5, 6, 7], [[8, 9], [10], [11, 12, 13, 14]]).numpy()
    examples = len(few(range(EXAMPLES), 500))
    seen, resident = Counter(), {}

    def ask(body: bytes) -> tuple[int, str, bytes]:
        connection.request("POST", "/v1/logprobs", body)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()

    def check_server() -> None:
        status, _, body = ask(fixed)
        assert status == 200 and fuzzed.process.poll() is None
        assert_rounded(load(body)["logprobs"], right)
        resident[seen.total()] = fuzzed.resident()

    @settings(QUIET, max_examples=examples)
    @given(SEEDS)
    def example(seed):
        draw = random.Random(seed)
        damage = [draw.choice(DAMAGE), draw.choice([nothing, nothing, nothing, *ON_BYTES])]
        note(f"damage: {', '.join(harm.__name__ for harm in damage)}")
        body = valid(draw)
        for harm in damage:
            body = harm(draw, body) if body else b""
        status, kind, answer = ask(body)
        seen[status] += 1
        if status == 200:
            # What was asked is read by safetensors' own code, and what was answered too.
            answered, count = load(answer), load(body)["completion_lengths"].sum()
            likeliest = count * int(split(body)[0].get("__metadata__", {}).get("top_k", 0))
            assert answered["logprobs"].shape == (count,) and (answered["logprobs"] < 1e-4).all()
            assert len(answered.get("top_ids", ())) == len(answered.get("top_logprobs", ())) == likeliest
        else:
            check_refusal(status, kind, answer, CODES)
            assert damage != [nothing, nothing]
        if seen.total() % (examples // 5) == 0:
            check_server()

    with closing(http.client.HTTPConnection("127.0.0.1", fuzzed.port, timeout=60)) as connection:
        example()
        check_server()
    print(f"MiB after n examples: {resident}")
    # Until then the heap meets its largest bodies.
    warm = [size for count, size in resident.items() if count >= min(5000, examples // 2)]
    assert len(warm) > 1 and warm[-1] - warm[0] < GROWTH
    assert "Traceback" not in fuzzed.log.read_text()
    reached = (200, 400, 413, 422) if examples == EXAMPLES else (200, 400)  # the others are rare in a part
    assert min(seen[status] for status in reached) >= examples / 1000, "the damage does not reach everything"


HEADS = [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"POST /v1/logprobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
    b"POST /v1/logprobs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /v1/logprobs HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
    b"GET http://x:1/status?a=b#c HTTP/1.1\r\nAuthorization: Bearer x\r\nConnection: close\r\n\r\n",
]
PIECES = [b"\r\n", *(bytes([byte]) for byte in b"\n\r \t:\x00\xff[%"), b"HTTP/", b"Content-Length: ", b"9" * 5000]
HTTP_CODES = {
    400: {"bad_request", "malformed"},
    403: {"foreign_host"},
    404: {"not_found"},
    405: {"method_not_allowed"},
    411: {"length_required"},
    413: {"request_entity_too_large"},
    431: {"request_header_fields_too_large"},
    501: {"not_implemented"},
}


def shake(draw: random.Random) -> bytes:
    if draw.random() < 0.1:
        return draw.randbytes(draw.choice([1, 10, 1000, 20_000])) + draw.choice([b"", b"\r\n\r\n"])
    head = draw.choice(HEADS)
    for _ in range(draw.choice([1, 1, 2, 4])):
        place = draw.randrange(len(head))
        new = draw.choice([draw.choice(PIECES), draw.randbytes(1), draw.choice(HEADS)])
        head = head[:place] + new + head[place + draw.choice([0, 1, 1, 5]) :]
    return head


@pytest.mark.slow
def test_damaged_http_is_refused_in_json_or_dropped(fuzzed, few):
    answered = Counter()

    @settings(QUIET, max_examples=max(500, len(few(range(EXAMPLES), 500)) // 100))
    @given(SEEDS)
    def example(seed):
        received = b""
        with socket.create_connection(("127.0.0.1", fuzzed.port), timeout=0.1) as connection:
            try:
                connection.sendall(shake(random.Random(seed)))
                while chunk := connection.recv(65536):
                    received += chunk
            except (TimeoutError, ConnectionError):
                pass  # it waits for the rest, or has closed
        received = received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not received:
            return
        head, _, rest = received.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 ", b"HTTP/1.0 "))
        status = int(head[9:12])
        answered[status] += 1
        if status != 200:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            check_refusal(status, "application/json", rest[:length], HTTP_CODES)

    example()
    print("\n", dict(sorted(answered.items())))
    assert {200, 400, 411} <= answered.keys()
    assert requests.get(fuzzed.url + "/health", timeout=5).status_code == 200
    assert "Traceback" not in fuzzed.log.read_text()
