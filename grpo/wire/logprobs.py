"""The bytes of POST /v1/logprobs, version 1: sequences go up, log-probs come back. docs/protocol.md describes them.

Requests and answers are safetensors: named, typed, bounds-checked, no pickle. Sequences are sent ragged (concatenated,
with their lengths), never padded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save

from grpo.wire.errors import ProtocolError, check_name, check_number, malformed
from grpo.wire.paths import VERSION
from grpo.wire.tensors import int32, read_tensors


@dataclass(frozen=True)
class LogprobsRequest:
    """Sequences to score: each is a prompt followed by its completion, all concatenated."""

    input_ids: np.ndarray
    """int32 [N], N = prompt_lengths.sum() + completion_lengths.sum()"""
    prompt_lengths: np.ndarray
    """int32 [S], each at least 1: the first completion token needs something to follow"""
    completion_lengths: np.ndarray
    """int32 [S], each at least 0"""
    temperature: float = 1.0
    request_id: str = ""
    client: str = ""
    """name under which the request takes its turn, shared by all requests of it; empty means the sender's address"""

    @classmethod
    def of(
        cls,
        prompt_ids: list[int],
        completions: list[list[int]],
        temperature: float,
        request_id: str = "",
        client: str = "",
    ):
        """Make a request of the completions of one prompt."""
        return cls(
            np.concatenate([np.asarray([*prompt_ids, *completion], np.int32) for completion in completions]),
            np.full(len(completions), len(prompt_ids), np.int32),
            np.asarray([len(completion) for completion in completions], np.int32),
            temperature,
            request_id,
            client,
        )

    def sequences(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (prompt ids, completion ids) of each sequence, in order."""
        ends = np.cumsum(self.prompt_lengths.astype(np.int64) + self.completion_lengths)
        whole = np.split(self.input_ids, ends[:-1])
        return [(ids[:n], ids[n:]) for ids, n in zip(whole, self.prompt_lengths, strict=True)]


@dataclass(frozen=True)
class LogprobsAnswer:
    """Log-probs of every completion token of a request."""

    logprobs: np.ndarray
    """float32 [completion_lengths.sum()]: log p(token | all before it), in the order sent"""
    model_fingerprint: str
    request_id: str = ""


def encode_request(request: LogprobsRequest) -> bytes:
    """Return the body of a request."""
    tensors = {
        "input_ids": request.input_ids,
        "prompt_lengths": request.prompt_lengths,
        "completion_lengths": request.completion_lengths,
    }
    metadata = {
        "temperature": repr(float(request.temperature)),
        "request_id": request.request_id,
        "client": request.client,
    }
    return save(tensors, metadata)


_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""a number without a sign, as JSON writes it (RFC 8259, section 6)"""
_LOWEST_TEMPERATURE = 1e-6
"""lowest temperature; far below it, logits / temperature overflow float32"""


def decode_request(
    body: bytes, vocab_size: int, max_length: int, max_sequences: int, max_tokens: int
) -> LogprobsRequest:
    """Read the body of a request, and check it in full.

    Raises ProtocolError: 400 for anything malformed, 413 for more than `max_sequences` or `max_tokens` in all, 422 for
    a sequence longer than `max_length` tokens.
    """
    tensors, metadata = read_tensors(body)
    ids, prompts, completions = (int32(tensors, name) for name in ("input_ids", "prompt_lengths", "completion_lengths"))
    if unknown := tensors.keys() - {"input_ids", "prompt_lengths", "completion_lengths"}:
        raise malformed(f"unknown tensor {min(unknown)!r}; version {VERSION} has no such thing")
    if len(prompts) == 0:
        raise malformed("prompt_lengths is empty: send at least one sequence")
    if len(prompts) != len(completions):
        raise malformed(
            f"{len(prompts)} prompt_lengths but {len(completions)} completion_lengths: send one of each a sequence"
        )
    if prompts.min() < 1:
        raise malformed(f"a prompt length is {prompts.min()}: every prompt needs at least one token")
    if completions.min() < 0:
        raise malformed(f"a completion length is {completions.min()}: lengths cannot be negative")
    check_number("sequences", len(prompts), max_sequences)
    check_number("tokens", len(ids), max_tokens)
    lengths = prompts.astype(np.int64) + completions
    if lengths.sum() != len(ids):
        raise malformed(f"the lengths add up to {lengths.sum()} but input_ids has {len(ids)} tokens")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise malformed(f"token ids go from {ids.min()} to {ids.max()}: the vocabulary is 0 to {vocab_size - 1}")
    if lengths.max() > max_length:
        longest = int(lengths.argmax())
        raise ProtocolError(
            422,
            "sequence_too_long",
            f"sequence {longest} has {lengths[longest]} tokens: this model takes at most {max_length}",
        )
    text = metadata.get("temperature", "1.0")
    # float() alone would also accept "1_0", blanks around it and the digits of other scripts.
    temperature = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not (temperature >= _LOWEST_TEMPERATURE and math.isfinite(temperature)):
        raise malformed(f"temperature {text[:40]!r}: send a number of at least {_LOWEST_TEMPERATURE}, such as 1.0")
    names = {name: metadata.get(name, "") for name in ("request_id", "client")}
    for name, text in names.items():
        check_name(name, text)
    return LogprobsRequest(ids, prompts, completions, temperature, **names)


def encode_answer(answer: LogprobsAnswer) -> bytes:
    """Return the body of a 200 answer."""
    metadata = {"request_id": answer.request_id, "model_fingerprint": answer.model_fingerprint}
    return save({"logprobs": answer.logprobs}, metadata)


def decode_answer(body: bytes, tokens: int) -> LogprobsAnswer:
    """Read the body of a 200 answer with `tokens` log-probs. Raises ProtocolError if it is anything else."""
    tensors, metadata = read_tensors(body)
    logprobs = tensors.get("logprobs")
    if logprobs is None or logprobs.dtype != np.float32 or logprobs.shape != (tokens,):
        received = "none" if logprobs is None else f"{logprobs.dtype} {list(logprobs.shape)}"
        raise malformed(f"the answer's logprobs should be float32 [{tokens}], found {received}")
    if not np.isfinite(logprobs).all():
        raise malformed("the answer's logprobs hold NaN or infinity")
    return LogprobsAnswer(logprobs, metadata.get("model_fingerprint", ""), metadata.get("request_id", ""))
