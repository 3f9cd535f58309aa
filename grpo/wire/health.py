"""GET /health: what a server says of itself and its model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from grpo.wire.paths import VERSION


@dataclass(frozen=True)
class ServerInfo:
    """What `GET /health` says. The trainer refuses a reference that does not fit its policy."""

    status: str
    """loading, ready, or draining"""
    model: str = ""
    model_fingerprint: str = ""
    """of the configuration, the tokenizer and a sample of the weights: equal when the models are"""
    tokenizer_fingerprint: str = ""
    """of the vocabulary: equal when token ids mean the same"""
    vocab_size: int = 0
    max_length: int = 0
    dtype: str = ""
    device: str = ""
    queue_depth: int = 0
    """tokens waiting or being scored"""
    config_fingerprint: str = ""
    """of the configuration: a model of an equal one can take these weights"""
    takes_updates: bool = False
    """whether a trainer may replace the weights"""
    version: int = VERSION
    task: str = "logprobs"
    """what it answers with: logprobs or reward (grpo/wire/rewards.py)"""
    quantization: str = "none"
    """of its weights: none, 8bit or 4bit"""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, body: bytes) -> ServerInfo:
        """Raises ValueError where the body is not a version 1 health answer. Fields added later are passed over."""
        said = json.loads(body)
        if not isinstance(said, dict) or said.get("version") != VERSION:
            raise ValueError(f"not a version {VERSION} reference server: {body[:200]!r}")
        return cls(**{name: said[name] for name in cls.__dataclass_fields__ if name in said})


def fingerprint(*parts: object) -> str:
    """16 hex digits that are equal when all parts (JSON-able values or bytes) are."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]
