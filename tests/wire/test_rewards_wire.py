"""The bytes of a reward model's wire: requests and answers, damaged, large and valid."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo.wire.refusals import ProtocolError
from grpo.wire.rewards import RewardAnswer, RewardRequest

CHAT = [{"role": "user", "content": "is it one ?"}, {"role": "assistant", "content": "one"}]


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"scores": [1.0]}', b'{"scores": [1.0, NaN]}'])
def test_an_answer_that_is_not_two_scores_is_refused(answer):
    with pytest.raises(ProtocolError):
        RewardAnswer.from_json(answer, 2)


VALID = RewardRequest(inputs=["one", CHAT], request_id="r", client="c").to_json()
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=5))
@example([(103, 9)])  # makes two texts three
def test_damage_is_refused_or_still_a_request(damage):
    damaged = bytearray(VALID)
    for place, value in damage:
        damaged[place] = value
    try:
        request = RewardRequest.from_json(bytes(damaged), 100)
    except ProtocolError as error:
        assert (error.status, error.code) == (400, "malformed") and len(error.message) <= 500
    else:
        assert vars(request) == json.loads(damaged)


chats = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), min_size=1, max_size=3)
bodies = st.fixed_dictionaries(
    {"inputs": st.lists(TEXTS | chats, min_size=1, max_size=3)}, optional={"request_id": TEXTS, "client": TEXTS}
)


@settings(max_examples=200, deadline=None)
@given(bodies, st.booleans(), st.sampled_from([None, 0, 2, "\t"]), st.sampled_from([(",", ":"), (" , ", "\r\n: ")]))
def test_a_request_is_read_however_its_json_is_written(body, ascii_only, indent, separators):
    text = json.dumps(body, ensure_ascii=ascii_only, indent=indent, separators=separators)
    assert vars(RewardRequest.from_json(f" {text}\n".encode(), 3)) == {"request_id": "", "client": "", **body}


MANY = 1_000_000
LARGE = {
    "lists": b'{"inputs": [[],' + b"[]," * MANY,
    "objects": b'{"inputs": [' + b"{}," * MANY,
    "numbers": b'{"inputs": [' + b"1," * MANY,
    "texts": b'{"inputs": [' + b'"",' * MANY,
    "fields of a message": b'{"inputs": [[{' + b'"":"",' * MANY,
    "a name of lists": b'{"client": [' + b"[]," * MANY,
    "lists behind escapes": rb'{"client": "\\", "request_id": "\"", "inputs": [' + b"[]," * MANY,
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_a_large_body_is_refused_before_it_is_a_tree(body):
    """Of 62 MiB such a tree took 1.6 GiB, and nothing else of the server went on while it was built."""
    tracemalloc.start()
    with pytest.raises(ProtocolError) as refused:
        RewardRequest.from_json(body, 4096)
    assert tracemalloc.get_traced_memory()[1] < 3 * len(body) + (1 << 20)
    tracemalloc.stop()
    assert (refused.value.status, refused.value.code) == (413, "too_many_messages")


def test_a_request_may_have_so_many_messages_and_no_more():
    chat = [{"role": "user", "content": ""}] * 32_768
    assert len(RewardRequest.from_json(RewardRequest(inputs=[chat, chat]).to_json(), 2).inputs) == 2
    with pytest.raises(ProtocolError, match="65537 messages in one request: the limit is 65536") as refused:
        RewardRequest.from_json(RewardRequest(inputs=[chat, chat + chat[:1]]).to_json(), 2)
    assert (refused.value.status, refused.value.code) == (413, "too_many_messages")


def test_scores_survive_the_way_to_the_last_bit():
    scores = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    sent = RewardAnswer(scores=scores, model_fingerprint="f", request_id="r")
    np.testing.assert_array_equal(RewardAnswer.from_json(sent.to_json(), 1000).scores, scores)
