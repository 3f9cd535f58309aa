"""What a refusal of the server says."""

from __future__ import annotations

import json


class ProtocolError(Exception):
    """A request that cannot be answered: HTTP status, a code for programs, a sentence for people."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def to_json(self) -> bytes:
        return json.dumps({"error": {"code": self.code, "message": self.message}}).encode()


def malformed(message: str) -> ProtocolError:
    """A 400. Not the whole message where that repeats what was sent, which may be a name as long as the body."""
    return ProtocolError(400, "malformed", message[:500])


_LONGEST_NAME = 128
"""characters of request_id and client"""


def check_number(what: str, number: int, limit: int) -> None:
    """Raises ProtocolError, 413, for more than `limit` tokens, sequences or messages."""
    if number > limit:
        message = f"{number} {what} in one request: the limit is {limit}; split it"
        raise ProtocolError(413, f"too_many_{what}", message)


def check_name(name: str, text: str) -> None:
    """Raises ProtocolError where a request_id or client is too long."""
    if len(text) > _LONGEST_NAME:
        raise malformed(f"{name} has {len(text)} characters: use {_LONGEST_NAME} at most")
