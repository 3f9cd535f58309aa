"""Requests to vLLM's server: each is answered with status 200, or raises an EngineError that says why not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

from grpo.workers.engine import EngineError
from grpo.workers.vllm_process import VllmProcess

ADMIN_SECONDS = 900.0
"""seconds for what may read a large model's weights from a slow disk"""


class VllmClient:
    """The routes of a server. Any thread may call it."""

    def __init__(self, process: VllmProcess):
        self.process = process

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object of an answer, as `post` does."""
        return _json(path, self.send("GET", path))

    def post(self, path: str, body: object = None, seconds: float | None = ADMIN_SECONDS) -> dict[str, Any]:
        """Return the JSON object of an answer; empty where it has no body. Waits for ever where `seconds` is None."""
        return _json(path, self.send("POST", path, body, seconds))

    def send(self, method: str, path: str, body: object = None, seconds: float | None = ADMIN_SECONDS) -> bytes:
        """Return the body of an answer, which need not be JSON."""
        try:
            answer = self.process.request(method, path, seconds, body)
        except requests.RequestException as error:
            raise EngineError(self._describe(f"{path}: {type(error).__name__}")) from error
        if answer.status_code != 200:
            text = " ".join(answer.text.split())[:300]
            raise EngineError(self._describe(f"{path}: vLLM answered {answer.status_code}: {text}"))
        return answer.content

    def count_tokens(self) -> float | None:
        """Return how many tokens the server has read and drawn; None where it does not answer.

        NaN, which differs from itself, where it does not count them (--disable-log-stats).
        """
        try:
            lines = self.process.request("GET", "/metrics", seconds=10.0).text.splitlines()
        except requests.RequestException:
            return None
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)]
        return sum(counts) if counts else math.nan

    def _describe(self, failure: str) -> str:
        """Say why a request failed: what ended the server, where it has ended or just ends, else `failure`."""
        if self.process.has_ended(3.0):
            return self.process.describe_end()
        return f"{failure}; its log is {self.process.log}"


@contextmanager
def answer_of(path: str) -> Iterator[None]:
    """Turn what another version of vLLM may leave out of an answer into an EngineError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{path}: an answer that this version does not know ({error!r})") from error


def _json(path: str, content: bytes) -> dict[str, Any]:
    with answer_of(path):
        return json.loads(content) if content else {}
