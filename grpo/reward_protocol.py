"""The bytes of a reward model's wire: texts up, scores down. docs/protocol.md describes them for others.

JSON, unlike the log-probs' safetensors: what is sent is text, what comes back is a number for each, and so a request
can be typed by hand. A float32 written as a decimal number is read back as the same float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from grpo.protocol import check_name, check_number, malformed
from grpo.records import Message

Input = str | list[Message]
"""a text that is scored as it is, or a chat that the reward model's own template makes a text of"""


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
        """Raises ProtocolError: 400 for anything malformed, 413 for more than `max_sequences` inputs."""
        said = _read(body)
        if unknown := said.keys() - cls.__dataclass_fields__.keys():
            raise malformed(f"unknown field {min(unknown)!r}; use {', '.join(cls.__dataclass_fields__)}")
        inputs = said.get("inputs")
        if not isinstance(inputs, list) or not inputs:
            raise malformed("inputs should be a list of at least one text or chat")
        check_number("sequences", len(inputs), max_sequences)
        for place, one in enumerate(inputs):
            _check_input(place, one)
        who = {name: said.get(name, "") for name in ("request_id", "client")}
        for name, text in who.items():
            if not isinstance(text, str):
                raise malformed(f"{name} should be a text")
            check_name(name, text)
        return cls(inputs, **who)


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
        said = _read(body)
        scores = said.get("scores")
        if not isinstance(scores, list) or len(scores) != inputs or not all(isinstance(x, float) for x in scores):
            raise malformed(f"the answer's scores should be {inputs} numbers")
        array = np.array(scores, np.float32)
        if not np.isfinite(array).all():
            raise malformed("the answer's scores hold NaN or infinity")
        return cls(array, str(said.get("model_fingerprint", "")), str(said.get("request_id", "")))


def _read(body: bytes) -> dict:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise malformed(f"not JSON: {error}") from error
    if not isinstance(said, dict):
        raise malformed("not a JSON object")
    return said


def _check_input(place: int, one: object) -> None:
    chat = [{"role": "", "content": one}] if isinstance(one, str) else one
    well_made = isinstance(chat, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in chat
    )
    if not well_made or not chat:
        raise malformed(f'input {place} should be a text, or a list of {{"role": text, "content": text}}')
    try:
        for message in chat:
            (message["role"] + message["content"]).encode()
    except UnicodeEncodeError as error:
        raise malformed(f"input {place} holds half of a surrogate pair, which is no text") from error
