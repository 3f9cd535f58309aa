"""The bytes of POST /v1/logprobs, version 1: sequences go up, log-probs come back. docs/protocol.md describes them.

Requests and answers are safetensors: named, typed, bounds-checked, no pickle. Sequences are sent ragged (concatenated,
with their lengths), never padded. Pictures (version 1.1) are sent as the files that they are, once for all completions
of a prompt; a request without them is one of version 1 to the last byte.
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
MOST_PIXELS_IN_ALL = 1 << 28  # of a request: four of the largest pictures (grpo/wire/picture_files.py)

_SEQUENCES = ("input_ids", "prompt_lengths", "completion_lengths")
_PICTURES = ("pictures", "picture_lengths", "picture_counts")


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

    @classmethod
    def of(
        cls, prompt_ids: Sequence[int], completions: list[list[int]], temperature: float, *, request_id="", client=""
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
    """Log-probs of every completion token of a request."""

    logprobs: np.ndarray  # float32 [completion_lengths.sum()]: log p(token | all before it), in the order sent
    model_fingerprint: str
    request_id: str = ""


def encode_request(request: LogprobsRequest) -> bytes:
    tensors = {name: getattr(request, name) for name in _SEQUENCES} | _encode_pictures(request)
    names = {"request_id": request.request_id, "client": request.client}
    return save(tensors, {"temperature": repr(float(request.temperature)), **names})


# A number without a sign, as JSON writes it (RFC 8259, section 6).
_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LOWEST_TEMPERATURE = 1e-6  # lowest temperature; far below it, logits / temperature overflow float32


def decode_request(
    body: bytes, *, vocab_size: int, max_length: int, max_sequences: int, max_tokens: int
) -> LogprobsRequest:
    """Read the body of a request, and check it in full; of pictures read only the headers. Raises ProtocolError: 400
    for anything malformed, 413 for more than `max_sequences`, `max_tokens` or MOST_PICTURES in all, 422 for a sequence
    longer than `max_length` tokens or pictures of too many pixels."""
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
    names = {name: metadata.get(name, "") for name in ("request_id", "client")}
    for name, text in names.items():
        check_name(name, text)
    request = LogprobsRequest(
        input_ids=ids, prompt_lengths=prompts, completion_lengths=completions, temperature=temperature, **names
    )
    return _with_pictures(request, tensors) if tensors.keys() & {*_PICTURES} else request


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
    return save({"logprobs": answer.logprobs}, metadata)


def decode_answer(body: bytes, tokens: int) -> LogprobsAnswer:
    """Read the body of a 200 answer with `tokens` log-probs. Raises ProtocolError for any other body."""
    tensors, metadata = read_tensors(body)
    logprobs = tensors.get("logprobs")
    if logprobs is None or logprobs.dtype != np.float32 or logprobs.shape != (tokens,):
        received = "none" if logprobs is None else f"{logprobs.dtype} {list(logprobs.shape)}"
        raise malformed(f"the answer's logprobs should be float32 [{tokens}], found {received}")
    if not np.isfinite(logprobs).all():
        raise malformed("the answer's logprobs hold NaN or infinity")
    return LogprobsAnswer(
        logprobs=logprobs,
        model_fingerprint=metadata.get("model_fingerprint", ""),
        request_id=metadata.get("request_id", ""),
    )
