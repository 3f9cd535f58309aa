"""The wire, both ways, and everything that can be wrong with a body."""

import json
import re
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictured import encoded, png_claiming
from safetensors.numpy import load, save

from grpo.wire.health import ModelInfo, ServerInfo, fingerprint
from grpo.wire.logprobs import (
    LogprobsAnswer,
    LogprobsRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from grpo.wire.picture_files import PicturedPrompt
from grpo.wire.refusals import ProtocolError

VOCABULARY, LONGEST = 100, 12
LIMITS = {"vocab_size": VOCABULARY, "max_length": LONGEST, "max_sequences": 5, "max_tokens": 40}


def decode(body: bytes, **more: int) -> LogprobsRequest:
    return decode_request(body, **LIMITS | more)


def body(metadata: dict[str, str] | None = None, **changes) -> bytes:
    tensors = {
        "input_ids": np.arange(9, dtype=np.int32),
        "prompt_lengths": np.array([3, 1], np.int32),
        "completion_lengths": np.array([5, 0], np.int32),
    }
    return save({name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}, metadata)


INT32 = np.int32


def test_a_request_survives_the_way():
    sent = LogprobsRequest.of([1, 2, 3], [[4, 5], [], [6]], temperature=0.7, request_id="group 12")
    received = decode(encode_request(sent))
    assert [prompt.tolist() for prompt, _ in received.sequences()] == [[1, 2, 3]] * 3
    assert [rest.tolist() for _, rest in received.sequences()] == [[4, 5], [], [6]]
    assert received.temperature == 0.7 and received.request_id == "group 12"


def test_the_likeliest_tokens_survive_the_way():
    request = decode(encode_request(LogprobsRequest.of([1, 2], [[4, 5]], 1.0, top_k=3)))
    assert request.top_k == 3 and LogprobsRequest.joined([request, request]).top_k == 3
    table = np.float32([[-1, -0.5, -2, -3, 7, 99, 2], [-4, -0.25, -2.5, -3.5, 0, 1, 98]])
    sent = encode_answer(LogprobsAnswer.of_table(table, model_fingerprint="f", request_id="r"))
    shapes = {name: (values.dtype, values.shape) for name, values in load(sent).items()}
    assert shapes == {"logprobs": (np.float32, (2,)), "top_logprobs": (np.float32, (6,)), "top_ids": (INT32, (6,))}
    received = decode_answer(sent, 2, top_k=3, vocab_size=100)
    assert received.top_ids.tolist() == [[7, 99, 2], [0, 1, 98]] and received.request_id == "r"
    assert np.array_equal(received.table, table)
    assert decode_answer(sent, 2).top_ids is None, "what was not asked for is passed over"


@pytest.mark.parametrize("text", ["-1", "1.0", "01", "", " 3", "\u0663", "101", "9999999999", "three"])
def test_a_top_k_that_is_none_is_malformed(text):
    with pytest.raises(ProtocolError, match=f"top_k {text!r}: send a whole number from 0 to 100") as refused:
        decode(body({"top_k": text}), max_top_k=100)
    assert refused.value.status == 400


def test_more_likeliest_tokens_than_an_answer_may_have_are_refused():
    tokens = (1 << 16) + 1
    request = LogprobsRequest.of([1], [[2] * tokens], 1.0, top_k=256)
    limits = {"max_length": 1 << 20, "max_tokens": 1 << 20}
    with pytest.raises(ProtocolError, match="16777472 top_ids in one request: the limit is 16777216") as refused:
        decode(encode_request(request), **limits)
    assert (refused.value.status, refused.value.code) == (413, "too_many_top_ids")
    assert decode(encode_request(replace(request, top_k=255)), **limits).top_k == 255


TOP = {"top_logprobs": np.zeros(6, np.float32), "top_ids": np.ones(6, INT32)}
WRONG_TOP = {
    "none": ({"top_ids": None}, "top_ids should be int32 [6], found none"),
    "int32": ({"top_logprobs": np.zeros(6, INT32)}, "top_logprobs should be float32 [6], found int32 [6]"),
    "fewer": ({"top_ids": np.ones(4, INT32)}, "top_ids should be int32 [6], found int32 [4]"),
    "NaN": ({"top_logprobs": np.full(6, np.nan, np.float32)}, "top_logprobs hold NaN or infinity"),
    "beyond the vocabulary": ({"top_ids": np.full(6, 100, INT32)}, "top_ids are not all between 0 and 99"),
    "negative": ({"top_ids": np.full(6, -1, INT32)}, "top_ids are not all between 0 and 99"),
}


@pytest.mark.parametrize("changes, message", WRONG_TOP.values(), ids=WRONG_TOP)
def test_an_answer_without_what_was_asked_for_is_malformed(changes, message):
    tensors = {"logprobs": np.zeros(2, np.float32)} | TOP | changes
    sent = save({name: values for name, values in tensors.items() if values is not None})
    with pytest.raises(ProtocolError, match=re.escape(message)):
        decode_answer(sent, 2, top_k=3, vocab_size=100)


def test_metadata_has_defaults_and_that_of_later_versions_is_passed_over():
    received = decode(body())
    assert (received.temperature, received.request_id, received.top_k) == (1.0, "", 0)
    assert decode(body({"colour": "green", "temperature": "2"})).temperature == 2.0


def test_every_cut_of_a_request_is_malformed():
    whole = encode_request(LogprobsRequest.of([1, 2, 3], [[4, 5], [6]], 1.0))
    for length in range(len(whole)):
        with pytest.raises(ProtocolError) as refused:
            decode(whole[:length])
        assert refused.value.status == 400


WRONG = {
    "int64 ids": (dict(input_ids=np.arange(9, dtype=np.int64)), "dtype 'I64': send I32 or F32"),
    "float ids": (dict(input_ids=np.arange(9, dtype=np.float32)), "float32"),
    "float lengths": (dict(prompt_lengths=np.array([3, 1], np.float32)), "float32"),
    "two dimensions": (dict(input_ids=np.arange(9, dtype=INT32).reshape(3, 3)), "one dimension"),
    "a scalar": (dict(prompt_lengths=np.array(3, INT32)), "one dimension"),
    **{
        f"missing {name}": ({name: None}, f"'{name}' is missing")
        for name in ("input_ids", "prompt_lengths", "completion_lengths")
    },
    "unknown tensor": (dict(mask=np.zeros(9, INT32)), "unknown tensor 'mask'"),
    "no sequence": (dict(prompt_lengths=np.zeros(0, INT32), completion_lengths=np.zeros(0, INT32)), "at least one"),
    "one length missing": (dict(completion_lengths=np.array([6], INT32)), "2 prompt_lengths but 1"),
    "empty prompt": (dict(prompt_lengths=np.array([0, 4], INT32)), "a prompt length is 0"),
    "negative prompt": (dict(prompt_lengths=np.array([-3, 7], INT32)), "a prompt length is -3"),
    "negative completion": (dict(completion_lengths=np.array([6, -1], INT32)), "a completion length -1"),
    "sums differ": (dict(completion_lengths=np.array([5, 1], INT32)), "add up to 10 but input_ids has 9"),
    "sum overflows": (dict(completion_lengths=np.array([2**31 - 1, 2**31 - 1], INT32)), "add up to"),
    "id too large": (dict(input_ids=np.full(9, VOCABULARY, INT32)), "vocabulary is 0 to 99"),
    "id negative": (dict(input_ids=np.full(9, -1, INT32)), "vocabulary is 0 to 99"),
}


@pytest.mark.parametrize("value", [1.0, 0.7, 2.0, 1e-6, 1.5e-5, 1e16, 1e300, 0.1 + 0.2])
def test_a_temperature_is_read_as_python_and_json_write_it(value):
    for text in (repr(value), json.dumps(value), f"{value:.17E}"):
        assert decode(body({"temperature": text})).temperature == value


WRONG_TEMPERATURES = ["0", "-1", "nan", "inf", "warm", "", "0x1", "1e-7", "1e999", "9" * 400]
WRONG_TEMPERATURES += ["1_0", " 1", "1 ", "1\n", "\u0661", "\uff11.0", "+1", "01", "1.", ".5", "1e", "1,0"]


@pytest.mark.parametrize("temperature", WRONG_TEMPERATURES)
def test_a_temperature_is_a_positive_number(temperature):
    with pytest.raises(ProtocolError, match="temperature") as refused:
        decode(body({"temperature": temperature}))
    assert refused.value.status == 400


def test_a_sequence_may_be_as_long_as_the_model_allows_and_no_longer():
    def request(length):
        return encode_request(LogprobsRequest.of([1, 2], [[3], [4] * (length - 2)], 1.0))

    assert len(decode(request(LONGEST)).input_ids) == 3 + LONGEST
    with pytest.raises(ProtocolError, match="sequence 1 has 13 tokens: this model takes at most 12") as refused:
        decode(request(LONGEST + 1))
    assert refused.value.status == 422


def test_a_request_may_be_as_large_as_its_limits_and_no_larger():
    for completions, size in (([[2] * 7] * 4, (4, 32)), ([[2] * 7] * 4 + [[2] * 6], (5, 39)), ([[2] * 7] * 5, (5, 40))):
        received = decode(encode_request(LogprobsRequest.of([1], completions, 1.0)))
        assert (len(received.prompt_lengths), len(received.input_ids)) == size
    for completions, complaint in (([[2]] * 6, "6 sequences.* is 5"), ([[2] * 7] * 4 + [[2] * 8], "41 tokens.* is 40")):
        with pytest.raises(ProtocolError, match=complaint) as refused:
            decode(encode_request(LogprobsRequest.of([1], completions, 1.0)))
        assert refused.value.status == 413 and refused.value.code.startswith("too_many_")


@pytest.mark.parametrize("name", ["request_id", "client"])
def test_names_have_a_longest(name):
    for length in (127, 128):
        assert len(getattr(decode(body({name: "é" * length})), name)) == length
    with pytest.raises(ProtocolError, match=f"{name} has 129 characters: use 128 at most"):
        decode(body({name: "x" * 129}))


SMALL, WIDE = encoded(), encoded(kind="JPEG")
PICTURED = PicturedPrompt([1, 9, 9, 3], [SMALL, WIDE])


def test_pictures_survive_the_way_once_for_all_completions_of_their_prompt():
    sent = encode_request(LogprobsRequest.of(PICTURED, [[4, 5], [], [6]], 1.0))
    assert load(sent)["picture_counts"].tolist() == [2, -1, -1]
    assert len(sent) < len(SMALL) + len(WIDE) + 1000
    sequences = decode(sent).sequences()
    assert [rest.tolist() for _, rest in sequences] == [[4, 5], [], [6]]
    assert all(prompt == PICTURED and prompt is sequences[0][0] for prompt, _ in sequences)
    assert PicturedPrompt([1, 9, 9, 3], [WIDE, SMALL]) != PICTURED


def test_prompts_with_and_without_pictures_share_a_request():
    rows = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 4], [5, 6]]
    pictures = [(SMALL,), (SMALL,), (), (WIDE,), (WIDE,), (SMALL, WIDE)]
    lengths = np.array([len(row) for row in rows], INT32)
    ids = np.concatenate(rows).astype(INT32)
    sent = LogprobsRequest(input_ids=ids, prompt_lengths=lengths, completion_lengths=0 * lengths, pictures=pictures)
    body = encode_request(sent)
    assert load(body)["picture_counts"].tolist() == [1, -1, 0, 1, 1, 2]
    received = decode(body, max_sequences=6)
    assert received.pictures == pictures
    assert [prompt for prompt, _ in received.sequences() if isinstance(prompt, PicturedPrompt)] == [
        PicturedPrompt(row, files) for row, files in zip(rows, pictures, strict=True) if files
    ]
    assert received.sequences()[2][0].tolist() == [1, 2]


def test_a_request_without_pictures_and_top_k_has_the_bytes_of_version_1():
    arrays = dict(input_ids=[1, 2, 4, 1, 2], prompt_lengths=[2, 2], completion_lengths=[1, 0])
    tensors = {name: np.array(values, INT32) for name, values in arrays.items()}
    first = save(tensors, {"temperature": "1.0", "request_id": "x", "client": ""})
    for prompt in ([1, 2], PicturedPrompt([1, 2], [])):
        sent = encode_request(LogprobsRequest.of(prompt, [[4], []], 1.0, request_id="x"))
        assert load(sent).keys() == load(first).keys() and len(sent) == len(first)
        assert {name: tensor.tolist() for name, tensor in load(sent).items()} == arrays


def pictured(*files: bytes, **changes) -> bytes:
    """Two sequences; the first one's prompt has these pictures."""
    tensors = {
        "pictures": np.frombuffer(b"".join(files), np.uint8),
        "picture_lengths": np.array([len(file) for file in files], INT32),
        "picture_counts": np.array([len(files), 0], INT32),
    }
    return body(**tensors | changes)


def test_a_request_may_have_no_picture_and_256():
    assert decode(pictured()).pictures == ()
    assert len(decode(pictured(*[SMALL] * 256)).pictures[0]) == 256


WRONG_PICTURES = {
    "missing lengths": (dict(picture_lengths=None), "'picture_lengths' is missing"),
    "missing counts": (dict(picture_counts=None), "'picture_counts' is missing"),
    "missing bytes": (dict(pictures=None), "'pictures' is missing"),
    "int32 bytes": (dict(pictures=np.zeros(5, INT32)), "'pictures' is int32: send uint8"),
    "uint8 counts": (dict(picture_counts=np.zeros(2, np.uint8)), "'picture_counts' is uint8: send int32"),
    "a count missing": (dict(picture_counts=np.array([2], INT32)), "1 picture_counts .* for 2 sequences"),
    "count of -2": (dict(picture_counts=np.array([2, -2], INT32)), "2 picture_counts from -2 on"),
    "too few taken": (dict(picture_counts=np.array([1, 0], INT32)), "add up to 1 but there are 2 picture_lengths"),
    "too many taken": (dict(picture_counts=np.array([2, 1], INT32)), "add up to 3 but there are 2"),
    "counts overflow": (dict(picture_counts=np.array([2**31 - 1] * 2, INT32)), "add up to 4294967294"),
    "nothing before": (dict(picture_counts=np.array([-1, 2], INT32)), "sequence 0 has picture count -1"),
    "another prompt before": (dict(picture_counts=np.array([2, -1], INT32)), "sequence 1 has picture count -1"),
    "empty picture": (dict(picture_lengths=np.array([0, 99], INT32)), "picture_lengths from 0 on"),
    "negative length": (dict(picture_lengths=np.array([-1, 99], INT32)), "picture_lengths from -1 on"),
    "bytes left over": (dict(picture_lengths=np.array([1, 2], INT32)), "add up to 3 but pictures has"),
    "lengths overflow": (dict(picture_lengths=np.array([2**31 - 1] * 2, INT32)), "add up to 4294967294"),
    "cut elsewhere": (dict(picture_lengths=np.array([len(SMALL) + 1, len(WIDE) - 1], INT32)), "picture 1 is no PNG"),
}


BODIES = {name: (body(**changes), complaint) for name, (changes, complaint) in WRONG.items()} | {
    name: (pictured(SMALL, WIDE, **changes), complaint) for name, (changes, complaint) in WRONG_PICTURES.items()
}


@pytest.mark.parametrize("sent, complaint", BODIES.values(), ids=BODIES)
def test_a_malformed_request_is_refused_with_its_reason(sent, complaint):
    with pytest.raises(ProtocolError, match=complaint) as refused:
        decode(sent)
    assert (refused.value.status, refused.value.code) == (400, "malformed")


@pytest.mark.parametrize(
    "files, status, code, complaint",
    [
        ([SMALL] * 257, 413, "too_many_pictures", "257 pictures in one request: the limit is 256"),
        ([SMALL, png_claiming(100_000, 100_000)], 422, "too_many_pixels", "picture 1 has 100000 x 100000 pixels: the"),
        ([png_claiming(8192, 8192)] * 5, 422, "too_many_pixels", "the pictures have 335544320 pixels together"),
        ([SMALL[:20]], 400, "malformed", "picture 0 is damaged"),
    ],
)
def test_too_many_pictures_or_pixels_are_refused_before_one_is_decoded(files, status, code, complaint):
    with pytest.raises(ProtocolError, match=complaint) as refused:
        decode(pictured(*files))
    assert (refused.value.status, refused.value.code) == (status, code)


VALID = encode_request(LogprobsRequest.of([1, 2, 3], [[4, 5], [], [6]], 1.0, request_id="x"))
WITH_PICTURES = encode_request(LogprobsRequest.of(PICTURED, [[4, 5], [], [6]], 1.0))


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from([VALID, WITH_PICTURES]), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=5))
def test_damage_is_refused_or_still_a_request(body, damage):
    damaged = bytearray(body)
    for place, value in damage:
        damaged[place % len(body)] = value
    try:
        request = decode(bytes(damaged))
    except ProtocolError as error:
        assert error.status in (400, 413, 422) and bytes(damaged) != body
        return
    assert sum(len(prompt) + len(rest) for prompt, rest in request.sequences()) == len(request.input_ids)
    tensors = load(bytes(damaged))  # safetensors' own reader takes it too, and reads the same
    for name in ("input_ids", "prompt_lengths", "completion_lengths"):
        assert getattr(request, name).tolist() == tensors[name].tolist()
    if "pictures" in tensors:
        counts = tensors["picture_counts"]
        files = [file for count, files in zip(counts, request.pictures, strict=True) if count > 0 for file in files]
        assert b"".join(files) == tensors["pictures"].tobytes()


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


TENSOR = b'"input_ids":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "text, complaint",
    [
        (b"{" + TENSOR + b"," + TENSOR + b"}", "a name twice"),
        (b'{"__metadata__":{"client":"a","client":"b"},' + TENSOR + b"}", "a name twice"),
        (b'{"__metadata__":{"client":1},' + TENSOR + b"}", "is not of texts"),
        (b'{"__metadata__":[],' + TENSOR + b"}", "is not of texts"),
        (b'{"__metadata__":["client"],' + TENSOR + b"}", "is not of texts"),
        (b'{"__metadata__":{"client":"\\ud800"},' + TENSOR + b"}", "not JSON"),
        (b"{" + TENSOR[:-1] + b',"more":[[[]]]}}', "and nothing else"),
        (b"\xef\xbb\xbf{" + TENSOR + b"}", "not JSON"),
        (("{" + TENSOR.decode() + "}").encode("utf-16"), "not JSON"),
        (b"{" + TENSOR + b"} {}", "not JSON"),
        (b"{" + TENSOR.replace(b"[0,4]", b"[4,8]") + b"}", "do not fill its"),
        (b"{}", "do not fill its"),
        (b"{" + TENSOR + b"," + TENSOR.replace(b"input_ids", b"y") + b"}", "do not fill its"),  # the same bytes twice
        (b"{" + TENSOR.replace(b"[1]", b"[2]").replace(b"[0,4]", b"[0,8]") + b"}", "do not fill its"),
        (b"[" * 60_000, "not JSON"),
        (b"{" + TENSOR.replace(b"[1]", b"1") + b"}", "needs dtype"),
        (b"{" + TENSOR.replace(b"input_ids", b"x" * 10_000).replace(b"I32", b"F64") + b"}", "has dtype 'F64'"),
        (b"{" + TENSOR.replace(b"[1]", b"[3]") + b"}", "do not fit together"),
        (b"{" + TENSOR.replace(b"[1]", b"[9223372036854775808,0]").replace(b"4]", b"0]") + b"}", "do not fit together"),
    ],
)
def test_a_header_that_is_wrong_or_that_readers_could_take_in_two_ways_is_refused(text, complaint):
    with pytest.raises(ProtocolError, match=complaint) as refused:
        decode(with_header(text, bytes(4)))
    assert (refused.value.status, refused.value.code) == (400, "malformed")
    assert len(str(refused.value)) < 400


def test_a_header_above_64_kib_is_refused_before_it_is_read():
    """To read one of a million tensors took seconds in which the process did nothing else, and 41 times its size."""

    def request(header_bytes):
        text = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")]
        return with_header(text.ljust(header_bytes), VALID[8 + len(text) :])

    assert decode(request(64 << 10)).request_id == "x"
    for decoder in (decode, partial(decode_answer, tokens=3)):
        with pytest.raises(ProtocolError, match="a header of 65537 bytes; 65536 are the most") as refused:
            decoder(request((64 << 10) + 1))
        assert refused.value.status == 400
        tensors = b",".join(b'"%x":{"dtype":"I32","shape":[0],"data_offsets":[0,0]}' % n for n in range(50_000))
        large = with_header(b"{" + tensors + b"}")
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="65536 are the most"):
            decoder(large)
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()


def test_an_answer_survives_the_way_as_one_of_version_1():
    table = np.float32([-0.5, -2.0, -1e-8])
    sent = encode_answer(LogprobsAnswer.of_table(table, model_fingerprint="abc", request_id="group 3"))
    received = decode_answer(sent, tokens=3)
    assert load(sent).keys() == {"logprobs"} and received.table.tolist() == table.tolist()
    assert (received.model_fingerprint, received.request_id) == ("abc", "group 3")


@pytest.mark.parametrize(
    "answer",
    [
        save({"logprobs": np.zeros(2, np.float32)}),
        save({"logprobs": np.zeros(3, np.int32)}),
        save({"logprobs": np.zeros((3, 1), np.float32)}),
        save({"logprobs": np.array([0, np.nan, 0], np.float32)}),
        save({"logprobs": np.array([0, -np.inf, 0], np.float32)}),
        save({"other": np.zeros(3, np.float32)}),
        b"<html>bad gateway</html>",
    ],
)
def test_an_answer_that_is_not_three_logprobs_is_refused(answer):
    with pytest.raises(ProtocolError):
        decode_answer(answer, tokens=3)


def test_health_is_one_flat_object_that_survives_the_way_with_later_fields():
    same = {"vocab_size": 10, "max_length": 20, "dtype": "float32", "device": "cpu", "quantization": "4bit"}
    model = ModelInfo(name="m", fingerprint="f", tokenizer_fingerprint="t", config_fingerprint="c", **same)
    health = ServerInfo(status="ready", model=model, queue_depth=5, takes_updates=True, task="reward")
    assert ServerInfo.from_json(health.to_json()) == health
    more = json.dumps(json.loads(health.to_json()) | {"colour": "green"}).encode()
    assert ServerInfo.from_json(more) == health
    assert json.loads(health.to_json()) == {
        **{"version": 1, "status": "ready", "queue_depth": 5, "takes_updates": True, "task": "reward"},
        **{"model": "m", "model_fingerprint": "f", "tokenizer_fingerprint": "t", "config_fingerprint": "c"},
        **same,
        **{"processor_fingerprint": "", "text_fingerprint": "", "most_top_k": 0},
    }
    assert ServerInfo.from_json(b'{"version": 1, "status": "loading"}') == ServerInfo(status="loading")


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"version": 1}', b'{"version": 2, "status": "ready"}', b"hello"])
def test_another_service_is_no_reference_server(answer):
    with pytest.raises(ValueError):
        ServerInfo.from_json(answer)


def test_fingerprints_tell_parts_apart():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
