"""The bytes of POST /v1/rewards: texts go up, scores come back. docs/protocol.md describes them.

They are JSON, so that a request can be typed by hand. A float32 in decimal is read back as the same float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from grpo.wire.refusals import ProtocolError, check_name, check_number, malformed

Message = dict[str, str]
"""a message of a chat: its role (system, user or assistant) and its content"""
Input = str | list[Message]
"""a text, scored as it is, or a chat, made a text by the reward model's own template"""
_MOST_MESSAGES = 65_536
"""most messages of all chats of a request: sixteen for each chat that a request may have by default, some 20 MB"""
_BYTES_A_SCORE = 64
"""most bytes for a score: a float32 takes 25 at most, with a comma and a blank"""
_OTHER_BYTES = 65_536
"""most bytes of an answer beside its scores"""


@dataclass(frozen=True)
class RewardRequest:
    """Texts and chats to score."""

    inputs: list[Input]
    request_id: str = ""
    client: str = ""
    """as in LogprobsRequest"""

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, body: bytes, max_sequences: int) -> RewardRequest:
        """Read the body of a request, and check it in full.

        Raises ProtocolError: 400 for anything malformed, 413 for more than `max_sequences` inputs or far too many
        messages.
        """
        reader, fields = _Reader(body), {}
        if reader.peek() != "{":
            raise malformed("not a JSON object")
        for name in reader.step_fields():
            if name not in cls.__dataclass_fields__:
                raise malformed(f"unknown field {name!r}; use {', '.join(cls.__dataclass_fields__)}")
            if name in fields:
                raise malformed(f"field {name!r} stands twice")
            fields[name] = _read_inputs(reader, max_sequences) if name == "inputs" else reader.read_text(name)
        reader.check_end()
        if not fields.get("inputs"):
            raise malformed(_NO_INPUTS)
        request = cls(**fields)
        check_name("request_id", request.request_id)
        check_name("client", request.client)
        return request


@dataclass(frozen=True)
class RewardAnswer:
    """A score for each input of a request."""

    scores: np.ndarray
    """float32 [inputs], in the order sent"""
    model_fingerprint: str
    request_id: str = ""

    def to_json(self) -> bytes:
        return json.dumps({**vars(self), "scores": self.scores.tolist()}).encode()

    @classmethod
    def from_json(cls, body: bytes, inputs: int) -> RewardAnswer:
        """Read the body of a 200 answer with `inputs` scores. Raises ProtocolError for any other body."""
        if len(body) > _BYTES_A_SCORE * inputs + _OTHER_BYTES:
            raise malformed(f"the answer has {len(body)} bytes, for {inputs} scores")
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise malformed(f"not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise malformed("not a JSON object")
        scores = fields.get("scores")
        if not isinstance(scores, list) or len(scores) != inputs or not all(isinstance(x, float) for x in scores):
            raise malformed(f"the answer's scores should be {inputs} numbers")
        array = np.array(scores, np.float32)
        if not np.isfinite(array).all():
            raise malformed("the answer's scores hold NaN or infinity")
        return cls(array, str(fields.get("model_fingerprint", "")), str(fields.get("request_id", "")))


_NO_INPUTS = "inputs should be a list of at least one text or chat"
_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class _Reader:
    """Reads a JSON body text by text, or raises ProtocolError.

    As one tree, a stranger's JSON takes 25 times its size, and every other thread waits while the tree is built.
    """

    def __init__(self, body: bytes):
        try:
            self._json = body.decode()
        except UnicodeDecodeError as error:
            raise malformed(f"not JSON: {error}") from error
        self._place = 0

    def peek(self) -> str:
        """Return the next character after blanks; "" at the end."""
        self._place = _BLANKS.match(self._json, self._place).end()
        return self._json[self._place : self._place + 1]

    def read_text(self, name: str) -> str:
        """Read a text; `name` is for the error."""
        if self.peek() != '"':
            raise malformed(f"{name} should be a text")
        try:
            text, self._place = _DECODER.raw_decode(self._json, self._place)
            text.encode()
        except UnicodeEncodeError as error:
            raise malformed(f"{name} holds half of a surrogate pair, which is no text") from error
        except ValueError as error:
            raise malformed(f"not JSON: {error}") from error
        return text

    def step_items(self, opening: str = "[", closing: str = "]") -> Iterator[None]:
        """Step through a list. At each step the caller reads the next item."""
        self._skip(opening)
        if self.peek() != closing:
            yield
            while self.peek() != closing:
                self._skip(",")
                yield
        self._skip(closing)

    def step_fields(self) -> Iterator[str]:
        """Step through an object. At each step the caller reads the value of the field of this name."""
        for _ in self.step_items("{", "}"):
            name = self.read_text("a field's name")
            self._skip(":")
            yield name

    def check_end(self) -> None:
        if self.peek():
            raise malformed(f"not JSON: more follows at character {self._place}")

    def _skip(self, character: str) -> None:
        if self.peek() != character:
            raise malformed(f"not JSON: no {character} at character {self._place}")
        self._place += 1


def _read_inputs(reader: _Reader, max_sequences: int) -> list[Input]:
    if reader.peek() != "[":
        raise malformed(_NO_INPUTS)
    inputs: list[Input] = []
    messages = 0
    for place, _ in enumerate(reader.step_items()):
        check_number("sequences", place + 1, max_sequences)
        if reader.peek() == '"':
            inputs.append(reader.read_text(f"input {place}"))
            continue
        chat = []
        for _ in reader.step_items() if reader.peek() == "[" else ():
            messages += 1
            check_number("messages", messages, _MOST_MESSAGES)
            chat.append(_read_message(reader, place))
        if not chat:
            raise _no_input(place)
        inputs.append(chat)
    return inputs


def _read_message(reader: _Reader, place: int) -> Message:
    message: Message = {}
    for name in reader.step_fields() if reader.peek() == "{" else ():
        if name not in ("role", "content") or name in message:
            raise _no_input(place)
        message[name] = reader.read_text(f"the {name} of a message of input {place}")
    if len(message) < 2:
        raise _no_input(place)
    return message


def _no_input(place: int) -> ProtocolError:
    return malformed(f'input {place} should be a text, or a list of {{"role": text, "content": text}}')
