"""The bytes of a reward model's wire: texts up, scores down. docs/protocol.md describes them for others.

JSON, unlike the log-probs' safetensors: what is sent is text, what comes back is a number for each, and so a request
can be typed by hand. A float32 written as a decimal number is read back as the same float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from grpo.wire.errors import ProtocolError, check_name, check_number, malformed

Message = dict[str, str]
"""of a chat: its role (system, user or assistant) and its content"""
Input = str | list[Message]
"""a text that is scored as it is, or a chat that the reward model's own template makes a text of"""
_MOST_MESSAGES = 65_536
"""of all chats of a request: sixteen in each of as many chats as a request has by default, and some 20 MB"""
_BYTES_A_SCORE = 64
"""a float32 takes 25 of them at most, with a comma and a blank"""
_OTHER_BYTES = 65_536
"""of an answer, beside its scores"""


@dataclass(frozen=True)
class RewardRequest:
    inputs: list[Input]
    request_id: str = ""
    client: str = ""
    """as in LogprobsRequest"""

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, body: bytes, max_sequences: int) -> RewardRequest:
        """Raises ProtocolError: 400 for anything malformed, 413 for more than `max_sequences` inputs or far too many
        messages.
        """
        reader, fields = _Reader(body), {}
        if reader.peek() != "{":
            raise malformed("not a JSON object")
        for name in reader.fields():
            if name not in cls.__dataclass_fields__:
                raise malformed(f"unknown field {name!r}; use {', '.join(cls.__dataclass_fields__)}")
            if name in fields:
                raise malformed(f"field {name!r} stands twice")
            fields[name] = _read_inputs(reader, max_sequences) if name == "inputs" else reader.string(name)
        reader.end()
        if not fields.get("inputs"):
            raise malformed(_NO_INPUTS)
        request = cls(**fields)
        check_name("request_id", request.request_id)
        check_name("client", request.client)
        return request


@dataclass(frozen=True)
class RewardAnswer:
    scores: np.ndarray
    """float32 [inputs], in the order sent"""
    model_fingerprint: str
    request_id: str = ""

    def to_json(self) -> bytes:
        return json.dumps({**vars(self), "scores": self.scores.tolist()}).encode()

    @classmethod
    def from_json(cls, body: bytes, inputs: int) -> RewardAnswer:
        """Bytes of a 200 answer -> the scores of so many inputs. Raises ProtocolError if it is not that."""
        if len(body) > _BYTES_A_SCORE * inputs + _OTHER_BYTES:
            raise malformed(f"the answer has {len(body)} bytes, for {inputs} scores")
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise malformed(f"not JSON: {error}") from error
        if not isinstance(said, dict):
            raise malformed("not a JSON object")
        scores = said.get("scores")
        if not isinstance(scores, list) or len(scores) != inputs or not all(isinstance(x, float) for x in scores):
            raise malformed(f"the answer's scores should be {inputs} numbers")
        array = np.array(scores, np.float32)
        if not np.isfinite(array).all():
            raise malformed("the answer's scores hold NaN or infinity")
        return cls(array, str(said.get("model_fingerprint", "")), str(said.get("request_id", "")))


_NO_INPUTS = "inputs should be a list of at least one text or chat"
_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class _Reader:
    """A JSON body, read a text at a time, and only where the protocol has one.

    As one tree a stranger's JSON takes 25 times its size, and every other thread waits while that is built.
    """

    def __init__(self, body: bytes):
        """Raises ProtocolError, as all methods do, where this is not what should stand there."""
        try:
            self._json = body.decode()
        except UnicodeDecodeError as error:
            raise malformed(f"not JSON: {error}") from error
        self._place = 0

    def peek(self) -> str:
        """Return the character that follows, blanks passed over; an empty text at the end."""
        self._place = _BLANKS.match(self._json, self._place).end()
        return self._json[self._place : self._place + 1]

    def string(self, what: str) -> str:
        """Read a text."""
        if self.peek() != '"':
            raise malformed(f"{what} should be a text")
        try:
            string, self._place = _DECODER.raw_decode(self._json, self._place)
            string.encode()
        except UnicodeEncodeError as error:
            raise malformed(f"{what} holds half of a surrogate pair, which is no text") from error
        except ValueError as error:
            raise malformed(f"not JSON: {error}") from error
        return string

    def items(self, opening: str = "[", closing: str = "]") -> Iterator[None]:
        """Step through a list. At each step its next item is to be read."""
        self._pass_over(opening)
        if self.peek() != closing:
            yield
            while self.peek() != closing:
                self._pass_over(",")
                yield
        self._pass_over(closing)

    def fields(self) -> Iterator[str]:
        """Step through an object. At each step the value of the field of this name is to be read."""
        for _ in self.items("{", "}"):
            name = self.string("a field's name")
            self._pass_over(":")
            yield name

    def end(self) -> None:
        """Raises ProtocolError where more follows."""
        if self.peek():
            raise malformed(f"not JSON: more follows at character {self._place}")

    def _pass_over(self, character: str) -> None:
        if self.peek() != character:
            raise malformed(f"not JSON: no {character} at character {self._place}")
        self._place += 1


def _read_inputs(reader: _Reader, max_sequences: int) -> list[Input]:
    if reader.peek() != "[":
        raise malformed(_NO_INPUTS)
    inputs: list[Input] = []
    messages = 0
    for place, _ in enumerate(reader.items()):
        check_number("sequences", place + 1, max_sequences)
        if reader.peek() == '"':
            inputs.append(reader.string(f"input {place}"))
            continue
        chat = []
        for _ in reader.items() if reader.peek() == "[" else ():
            messages += 1
            check_number("messages", messages, _MOST_MESSAGES)
            chat.append(_read_message(reader, place))
        if not chat:
            raise _no_input(place)
        inputs.append(chat)
    return inputs


def _read_message(reader: _Reader, place: int) -> Message:
    message: Message = {}
    for name in reader.fields() if reader.peek() == "{" else ():
        if name not in ("role", "content") or name in message:
            raise _no_input(place)
        message[name] = reader.string(f"the {name} of a message of input {place}")
    if len(message) < 2:
        raise _no_input(place)
    return message


def _no_input(place: int) -> ProtocolError:
    return malformed(f'input {place} should be a text, or a list of {{"role": text, "content": text}}')
