"""The bytes of POST /v1/rewards: texts go up, scores come back. docs/protocol.md describes them.

They are JSON, so that a request can be typed by hand. A float32 in decimal is read back as the same float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from grpo.wire.json_fields import check_text, read_fields, read_json
from grpo.wire.refusals import HALF_PAIR, ProtocolError, check_number, malformed

Message = dict[str, str]  # a message of a chat: its role (system, user or assistant) and its content
Input = str | list[Message]  # a text, scored as it is, or a chat, made a text by the reward model's own template
_MOST_MESSAGES = 65_536  # of a request: sixteen for each chat that it may have by default, some 20 MB


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """Texts and chats to score."""

    inputs: list[Input]
    request_id: str = ""
    client: str = ""  # as in LogprobsRequest

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, body: bytes, max_sequences: int) -> RewardRequest:
        """Read the body of a request, and check it in full. Raises ProtocolError: 400 for anything malformed, 413 for
        more than `max_sequences` inputs or far too many messages."""
        _check_size(body)
        request = read_fields(cls, read_json(body))
        check_text("request_id", request.request_id)
        check_text("client", request.client)
        if not (isinstance(request.inputs, list) and request.inputs):
            raise malformed("inputs should be a list of at least one text or chat")
        check_number("sequences", len(request.inputs), max_sequences)
        for place, item in enumerate(request.inputs):
            if not (_is_text(item) or (isinstance(item, list) and item and all(map(_is_message, item)))):
                raise malformed(f'input {place} should be a text, or a list of {{"role": text, "content": text}}')
        messages = sum(len(item) for item in request.inputs if isinstance(item, list))
        check_number("messages", messages, _MOST_MESSAGES)
        return request


def _check_size(body: bytes) -> None:
    """Refuse JSON of more values than any request has, before it is read. As a tree a stranger's JSON takes 25 times
    its size, and every other thread waits while the tree is built."""
    texts = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if texts.count(b'"') <= 10 * _MOST_MESSAGES:  # a message has four texts: eight quotes
        outside = b"".join(texts.split(b'"')[::2])
        if sum(map(outside.count, (b",", b"[", b"{"))) <= 4 * _MOST_MESSAGES:
            return
    message = f"far more values in one request than {_MOST_MESSAGES} messages have: split it"
    raise ProtocolError(413, "too_many_messages", message)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not HALF_PAIR.search(value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"role", "content"} and all(map(_is_text, value.values()))


@dataclass(frozen=True, kw_only=True)
class RewardAnswer:
    """A score for each input of a request."""

    scores: np.ndarray  # float32 [inputs], in the order sent
    model_fingerprint: str
    request_id: str = ""

    def to_json(self) -> bytes:
        return json.dumps({**vars(self), "scores": self.scores.tolist()}).encode()

    @classmethod
    def from_json(cls, body: bytes, inputs: int) -> RewardAnswer:
        """Read the body of a 200 answer with `inputs` scores. Raises ProtocolError for any other body."""
        fields = read_json(body)
        scores = fields.get("scores")
        if not isinstance(scores, list) or len(scores) != inputs or not all(isinstance(x, float) for x in scores):
            raise malformed(f"the answer's scores should be {inputs} numbers")
        array = np.array(scores, np.float32)
        if not np.isfinite(array).all():
            raise malformed("the answer's scores hold NaN or infinity")
        return cls(
            scores=array,
            model_fingerprint=str(fields.get("model_fingerprint", "")),
            request_id=str(fields.get("request_id", "")),
        )
