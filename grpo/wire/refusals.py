"""The protocol's version, its paths and content types, and the refusals that a server answers with."""

import json
import re

VERSION = 1
LOGPROBS_PATH = "/v1/logprobs"
REWARDS_PATH = "/v1/rewards"
TASK_PATHS = {"logprobs": LOGPROBS_PATH, "reward": REWARDS_PATH}  # the path of each task
WEIGHTS_PATH = "/v1/weights"
COMMIT_PATH = "/v1/weights/commit"
ROLLOUTS_PATH = "/v1/rollouts"
RUN_PATH = f"{ROLLOUTS_PATH}/run"
TASKS_PATH = f"{ROLLOUTS_PATH}/tasks"
GROUPS_PATH = f"{ROLLOUTS_PATH}/groups"
LEASE_PATH = f"{ROLLOUTS_PATH}/lease"
RESULTS_PATH = f"{ROLLOUTS_PATH}/results"
JOURNAL_PATH = f"{ROLLOUTS_PATH}/journal"
FILES_PATH = f"{ROLLOUTS_PATH}/files"
VERSIONS_PATH = f"{ROLLOUTS_PATH}/versions"
NEEDED_PATH = f"{ROLLOUTS_PATH}/needed"
DRIFT_PATH = f"{ROLLOUTS_PATH}/drift"
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
STATUS_PATH = "/status"
PAGE_PATH = "/"
CONTENT_TYPE = "application/octet-stream"
CONTENT_TYPES = {"logprobs": CONTENT_TYPE, "reward": "application/json"}
BODY_BYTES = 64 << 20  # the 2,000,000 tokens that a request may have take 8 MB; a piece of weights has 16 MiB

_LONGEST_NAME = 128  # most characters of request_id and client
HALF_PAIR = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which JSON may have, and no text in UTF-8


def answer_headers(content_type: str, retry_after: int | None = None) -> dict[str, str]:
    headers = {"Content-Type": content_type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return headers if retry_after is None else headers | {"Retry-After": str(retry_after)}


class ProtocolError(Exception):
    """The refusal of a request: an HTTP status, a code for programs, a sentence for people."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def to_json(self) -> bytes:
        return json.dumps({"error": {"code": self.code, "message": self.message}}).encode()


def malformed(message: str) -> ProtocolError:
    """Return a 400 whose message is cut: it may repeat a name as long as the body."""
    return ProtocolError(400, "malformed", message[:500])


def check_number(kind: str, number: int, limit: int) -> None:
    """Raise ProtocolError, 413, for more than `limit` tokens, sequences or messages."""
    if number > limit:
        message = f"{number} {kind} in one request: the limit is {limit}; split it"
        raise ProtocolError(413, f"too_many_{kind}", message)


def check_name(name: str, text: str) -> None:
    """Raise ProtocolError for a name that is too long, or has what a database cannot keep."""
    if len(text) > _LONGEST_NAME:
        raise malformed(f"{name} has {len(text)} characters: use {_LONGEST_NAME} at most")
    if HALF_PAIR.search(text) or "\0" in text:
        raise malformed(f"{name} {text!a} has half of a surrogate pair, or a NUL: send whole characters")


def refuse_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object, as `object_pairs_hook`. Raises ValueError for a name that stands twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a name twice")
    return fields
