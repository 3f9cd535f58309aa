"""The answer to GET /health: a server's state and a description of its model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from grpo.wire.refusals import VERSION


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A description of a model. The trainer compares that of its policy with that of the reference."""

    name: str = ""  # hub id or folder that the model was loaded from
    fingerprint: str = ""  # of configuration, tokenizer and a sample of the weights: equal when the models are
    tokenizer_fingerprint: str = ""  # fingerprint of the vocabulary: equal when token ids mean the same
    text_fingerprint: str = ""  # of special tokens and a tokenised text: equal when texts become the same ids
    config_fingerprint: str = ""  # of the configuration: models of an equal one can take each other's weights
    vocab_size: int = 0
    max_length: int = 0  # tokens of the longest sequence that the model takes, or that the server allows it
    dtype: str = ""
    device: str = ""
    quantization: str = "none"  # how the weights are stored: none, 8bit or 4bit
    processor_fingerprint: str = ""  # equal when pixels and picture tokens are; empty for a model of text

    @property
    def inputs_fingerprint(self) -> str:
        """Fingerprint of tokenizer and picture processor."""
        return self.tokenizer_fingerprint + self.processor_fingerprint


_SENT = {"name": "model", "fingerprint": "model_fingerprint"}  # fields of ModelInfo with another name in the answer


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """The answer to `GET /health`: a server's state, and its model."""

    status: str  # loading, ready, or draining
    model: ModelInfo = field(default_factory=ModelInfo)
    queue_depth: int = 0  # tokens waiting or being scored
    takes_updates: bool = False  # whether a trainer may replace the weights
    most_top_k: int = 0  # the largest top_k of a request; 0 of another task, or of a program before version 1.2
    task: str = "logprobs"  # the server's task: logprobs, reward (grpo/wire/rewards.py) or rollouts

    def to_dict(self) -> dict[str, str | int | bool]:
        """Return the fields of version 1: server and model in one flat object."""
        model = {_SENT.get(name, name): value for name, value in vars(self.model).items()}
        return {"version": VERSION} | vars(self) | model

    def to_json(self) -> bytes:
        return json.dumps(self.to_dict()).encode()

    @classmethod
    def from_json(cls, body: bytes) -> ServerInfo:
        """Read the flat object; ignore unknown fields, and give missing ones their defaults. Raises ValueError for a
        body that is not a version 1 health answer."""
        fields = json.loads(body)
        if not isinstance(fields, dict) or fields.get("version") != VERSION or "status" not in fields:
            raise ValueError(f"not a version {VERSION} reference server: {body[:200]!r}")
        of_model = {name: _SENT.get(name, name) for name in ModelInfo.__dataclass_fields__}
        model = ModelInfo(**{name: fields[sent] for name, sent in of_model.items() if sent in fields})
        of_server = cls.__dataclass_fields__.keys() & fields.keys() - {"model"}
        return cls(model=model, **{name: fields[name] for name in of_server})


def fingerprint(*parts: object) -> str:
    """Return 16 hex digits that are equal when all parts (JSON-able values or bytes) are."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]
