"""The bytes of POST /v1/logprobs, version 1: sequences go up, log-probs come back. docs/protocol.md describes them.

Requests and answers are safetensors: named, typed, bounds-checked, no pickle. Sequences are sent ragged (concatenated,
with their lengths), never padded. Pictures (version 1.1) are sent as the files that they are, once for all completions
of a prompt. A teacher is asked for the likeliest tokens too (version 1.2). A request without either is one of version 1
to the last byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from safetensors.numpy import save

from grpo.wire.picture_files import PicturedPrompt, PictureError, check_picture, pictures_of
from grpo.wire.refusals import VERSION, ProtocolError, check_name, check_number, malformed
from grpo.wire.tensors import int32, read_tensors, uint8

MOST_PICTURES = 256  # most pictures of a request
MOST_TOP_K = 256  # most likeliest tokens at each position
MOST_LIKELIEST = 1 << 24  # likeliest tokens of a request: an answer of 128 MiB
MOST_PIXELS_IN_ALL = 1 << 28  # of a request: four of the largest pictures (grpo/wire/picture_files.py)

_SEQUENCES = ("input_ids", "prompt_lengths", "completion_lengths")
_PICTURES = ("pictures", "picture_lengths", "picture_counts")
_LIKELIEST = {"top_logprobs": np.float32, "top_ids": np.int32}  # of an answer to a request with top_k


@dataclass(frozen=True, kw_only=True)
class LogprobsRequest:
    """Sequences to score: each is a prompt followed by its completion, all concatenated."""

    input_ids: np.ndarray  # int32 [N], N = prompt_lengths.sum() + completion_lengths.sum()
    prompt_lengths: np.ndarray  # int32 [S], each at least 1: the first completion token needs something to follow
    completion_lengths: np.ndarray  # int32 [S], each at least 0
    temperature: float = 1.0
    request_id: str = ""
    client: str = ""  # name under which all requests of a client take turns; empty means the sender's address
    pictures: Sequence[tuple[bytes, ...]] = ()  # of each sequence's prompt, encoded; empty without pictures
    top_k: int = 0  # how many of the likeliest tokens come with each completion token

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        completions: list[list[int]],
        temperature: float,
        *,
        request_id="",
        client="",
        top_k=0,
    ):
        """Make a request of the completions of one prompt, which may be a PicturedPrompt."""
        count, pictures = len(completions), pictures_of(prompt_ids)
        ids = np.concatenate([np.asarray([*prompt_ids, *completion], np.int32) for completion in completions])
        prompt_lengths = np.full(count, len(prompt_ids), np.int32)
        lengths = np.asarray([*map(len, completions)], np.int32)
        return cls(
            input_ids=ids,
            prompt_lengths=prompt_lengths,
            completion_lengths=lengths,
            temperature=temperature,
            request_id=request_id,
            client=client,
            pictures=[pictures] * count if pictures else (),
            top_k=top_k,
        )

    @classmethod
    def joined(cls, requests: Sequence[LogprobsRequest]):
        """Make one request of one or several requests of one client, where several have no pictures."""
        first, *others = requests
        if not others:
            return first
        name = f"{first.request_id} and {len(others)} more"
        tensors = {field: np.concatenate([getattr(request, field) for request in requests]) for field in _SEQUENCES}
        return replace(first, request_id=name, **tensors)

    def sequences(self) -> list[tuple[np.ndarray | PicturedPrompt, np.ndarray]]:
        """Return (prompt ids, completion ids) of each sequence, in order; a prompt with pictures is a PicturedPrompt.
        Successive sequences of an equal prompt share its PicturedPrompt."""
        ends = np.cumsum(self.prompt_lengths.astype(np.int64) + self.completion_lengths)
        whole = np.split(self.input_ids, ends[:-1])
        sequences = [(ids[:n], ids[n:]) for ids, n in zip(whole, self.prompt_lengths, strict=True)]
        before: PicturedPrompt | None = None
        for place, pictures in enumerate(self.pictures):
            if pictures:
                prompt, completion = sequences[place]
                if before is None or pictures != before.pictures or not np.array_equal(prompt, before):
                    before = PicturedPrompt(prompt, pictures)
                sequences[place] = before, completion
        return sequences


@dataclass(frozen=True, kw_only=True)
class LogprobsAnswer:
    """Log-probs of every completion token of a request, and with `top_k` the likeliest tokens at its position."""

    logprobs: np.ndarray  # float32 [completion_lengths.sum()]: log p(token | all before it), in the order sent
    model_fingerprint: str
    request_id: str = ""
    top_logprobs: np.ndarray | None = None  # float32 [T, top_k], the largest first; None without top_k
    top_ids: np.ndarray | None = None  # int32 [T, top_k]

    @classmethod
    def of_table(cls, table: np.ndarray, **others: str):
        """Make an answer of `table`."""
        if table.ndim == 1:
            return cls(logprobs=table, **others)
        logprobs, top_logprobs, top_ids = np.split(table, [1, (table.shape[1] + 1) // 2], axis=1)
        return cls(logprobs=logprobs[:, 0], top_logprobs=top_logprobs, top_ids=top_ids.astype(np.int32), **others)

    @property
    def table(self) -> np.ndarray:
        """Return all in one array: float32 [T], or [T, 1 + 2 top_k] of the log-prob, those of the likeliest tokens, and
        their ids, which float32 has exactly."""
        if self.top_ids is None:
            return self.logprobs
        return np.column_stack([self.logprobs, self.top_logprobs, self.top_ids.astype(np.float32)])


def encode_request(request: LogprobsRequest) -> bytes:
    tensors = {name: getattr(request, name) for name in _SEQUENCES} | _encode_pictures(request)
    names = {"request_id": request.request_id, "client": request.client}
    names |= {"top_k": str(request.top_k)} if request.top_k else {}
    return save(tensors, {"temperature": repr(float(request.temperature)), **names})


# A number without a sign, as JSON writes it (RFC 8259, section 6).
_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_COUNT = re.compile("0|[1-9][0-9]{0,8}")
_LOWEST_TEMPERATURE = 1e-6  # lowest temperature; far below it, logits / temperature overflow float32


def decode_request(
    body: bytes, *, vocab_size: int, max_length: int, max_sequences: int, max_tokens: int, max_top_k: int = MOST_TOP_K
) -> LogprobsRequest:
    """Read the body of a request, and check it in full; of pictures read only the headers. Raises ProtocolError: 400
    for anything malformed, 413 for more than `max_sequences`, `max_tokens`, MOST_PICTURES or MOST_LIKELIEST in all, 422
    for a sequence longer than `max_length` tokens or pictures of too many pixels."""
    tensors, metadata = read_tensors(body)
    ids, prompts, completions = (int32(tensors, name) for name in _SEQUENCES)
    if unknown := tensors.keys() - {*_SEQUENCES, *_PICTURES}:
        raise malformed(f"unknown tensor {min(unknown)!r}; version {VERSION} has no such thing")
    if len(prompts) != len(completions) or len(prompts) == 0:
        counts = f"{len(prompts)} prompt_lengths but {len(completions)} completion_lengths"
        raise malformed(f"{counts}: send one of each a sequence, and at least one sequence")
    if prompts.min() < 1 or completions.min() < 0:
        least = f"a prompt length is {prompts.min()} and a completion length {completions.min()}"
        raise malformed(f"{least}: a prompt has at least one token, and no length is negative")
    check_number("sequences", len(prompts), max_sequences)
    check_number("tokens", len(ids), max_tokens)
    lengths = prompts.astype(np.int64) + completions
    if lengths.sum() != len(ids):
        raise malformed(f"the lengths add up to {lengths.sum()} but input_ids has {len(ids)} tokens")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise malformed(f"token ids go from {ids.min()} to {ids.max()}: the vocabulary is 0 to {vocab_size - 1}")
    if lengths.max() > max_length:
        message = f"sequence {lengths.argmax()} has {lengths.max()} tokens: this model takes at most {max_length}"
        raise ProtocolError(422, "sequence_too_long", message)
    text = metadata.get("temperature", "1.0")
    # float() alone would also accept "1_0", blanks around it and the digits of other scripts.
    temperature = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not (temperature >= _LOWEST_TEMPERATURE and math.isfinite(temperature)):
        raise malformed(f"temperature {text[:40]!r}: send a number of at least {_LOWEST_TEMPERATURE}, such as 1.0")
    top_k = _read_top_k(metadata.get("top_k", "0"), max_top_k)
    check_number("top_ids", int(completions.sum(dtype=np.int64)) * top_k, MOST_LIKELIEST)
    names = {name: metadata.get(name, "") for name in ("request_id", "client")}
    for name, text in names.items():
        check_name(name, text)
    request = LogprobsRequest(
        input_ids=ids,
        prompt_lengths=prompts,
        completion_lengths=completions,
        temperature=temperature,
        top_k=top_k,
        **names,
    )
    return _with_pictures(request, tensors) if tensors.keys() & {*_PICTURES} else request


def _read_top_k(text: str, most: int) -> int:
    if not _COUNT.fullmatch(text) or int(text) > most:
        raise malformed(f"top_k {text[:40]!r}: send a whole number from 0 to {most}")
    return int(text)


def _encode_pictures(request: LogprobsRequest) -> dict[str, np.ndarray]:
    if not request.pictures:
        return {}
    counts, files, before = [], [], None
    for prompt, _ in request.sequences():
        counts.append(-1 if prompt is before else len(pictures_of(prompt)))
        files += pictures_of(prompt) if prompt is not before else ()
        before = prompt
    return {
        "pictures": np.frombuffer(b"".join(files), np.uint8),
        "picture_lengths": np.asarray([len(file) for file in files], np.int32),
        "picture_counts": np.asarray(counts, np.int32),
    }


def _with_pictures(request: LogprobsRequest, tensors: dict[str, np.ndarray]) -> LogprobsRequest:
    """Return the request with the pictures that its tensors hold. Raises ProtocolError, 400, 413 or 422."""
    data = uint8(tensors, "pictures")
    lengths, counts = (int32(tensors, name).astype(np.int64) for name in ("picture_lengths", "picture_counts"))
    sequences = request.sequences()
    if len(counts) != len(sequences) or counts.min() < -1:
        least = f"{len(counts)} picture_counts from {counts.min(initial=0)} on for {len(sequences)} sequences"
        raise malformed(f"{least}: send one for each, 0 or more, or -1 for the prompt before")
    check_number("pictures", len(lengths), MOST_PICTURES)
    if (taken := counts.clip(0).sum()) != len(lengths):
        raise malformed(f"picture_counts add up to {taken} but there are {len(lengths)} picture_lengths")
    if lengths.min(initial=1) < 1 or lengths.sum() != len(data):
        sizes = f"picture_lengths from {lengths.min(initial=1)} on add up to {lengths.sum()}"
        raise malformed(f"{sizes} but pictures has {len(data)} bytes: every picture has at least one byte")
    files = [data[end - length : end].tobytes() for end, length in zip(lengths.cumsum(), lengths, strict=True)]
    _check_files(files)
    pictures, left = [], iter(files)
    for row, count in enumerate(counts):
        # So each picture belongs to one prompt, and a small request cannot make the server read a large one often.
        if count == -1 and (row == 0 or not np.array_equal(sequences[row][0], sequences[row - 1][0])):
            raise malformed(f"sequence {row} has picture count -1, and its prompt is not that of the sequence before")
        pictures.append(pictures[-1] if count == -1 else tuple(islice(left, count)))
    return replace(request, pictures=pictures if files else ())


def _check_files(files: list[bytes]) -> None:
    """Raise ProtocolError, 400 for a file that is no picture, 422 for too many pixels. Decode none."""
    pixels = 0
    for number, file in enumerate(files):
        try:
            width, height = check_picture(file)
        except PictureError as error:
            message = f"picture {number} {error}"
            raise (ProtocolError(422, "too_many_pixels", message) if error.is_large else malformed(message)) from error
        pixels += width * height
    if pixels > MOST_PIXELS_IN_ALL:
        message = f"the pictures have {pixels} pixels together: the limit is {MOST_PIXELS_IN_ALL} in one request"
        raise ProtocolError(422, "too_many_pixels", message)


def encode_answer(answer: LogprobsAnswer) -> bytes:
    metadata = {"request_id": answer.request_id, "model_fingerprint": answer.model_fingerprint}
    likeliest = {} if answer.top_ids is None else {name: getattr(answer, name).ravel() for name in _LIKELIEST}
    # safetensors writes the memory under an array, whatever its strides.
    return save({"logprobs": np.ascontiguousarray(answer.logprobs), **likeliest}, metadata)


def decode_answer(body: bytes, tokens: int, *, top_k: int = 0, vocab_size: int = 1 << 24) -> LogprobsAnswer:
    """Read the body of a 200 answer with `tokens` log-probs, and `top_k` likeliest tokens for each, of a vocabulary of
    `vocab_size`. Raises ProtocolError for any other body."""
    tensors, metadata = read_tensors(body)
    logprobs = _read_numbers(tensors, "logprobs", np.float32, tokens)
    likeliest = _LIKELIEST if top_k else {}
    likeliest = {
        name: _read_numbers(tensors, name, dtype, tokens * top_k).reshape(tokens, top_k)
        for name, dtype in likeliest.items()
    }
    if top_k and tokens and not 0 <= likeliest["top_ids"].min() <= likeliest["top_ids"].max() < vocab_size:
        raise malformed(f"the answer's top_ids are not all between 0 and {vocab_size - 1}")
    return LogprobsAnswer(
        logprobs=logprobs,
        model_fingerprint=metadata.get("model_fingerprint", ""),
        request_id=metadata.get("request_id", ""),
        **likeliest,
    )


def _read_numbers(tensors: dict[str, np.ndarray], name: str, dtype: type, count: int) -> np.ndarray:
    found = tensors.get(name)
    if found is None or found.dtype != dtype or len(found) != count:
        received = "none" if found is None else f"{found.dtype} {list(found.shape)}"
        raise malformed(f"the answer's {name} should be {np.dtype(dtype)} [{count}], found {received}")
    if not np.isfinite(found).all():
        raise malformed(f"the answer's {name} hold NaN or infinity")
    return found
