"""Prompts with pictures at a server of a model: its answers, and its refusals before anything waits.

The service is the server's own, with the model loaded, without its HTTP."""

import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from picture_oracle import Plain
from pictured import FAMILIES, drawing, encoded, png_claiming, save
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rounding import assert_rounded

from grpo.config.server import ServerConfig
from grpo.model import pictures
from grpo.server.model_service import ModelService, PictureCheck
from grpo.wire.logprobs import LogprobsRequest, decode_answer, encode_request
from grpo.wire.picture_files import PicturedPrompt
from grpo.wire.refusals import ProtocolError

FAMILY = "qwen2_5_vl"
SMALL, WIDE, JPEG = drawing(16, 16, 1), drawing(40, 24, 2), drawing(24, 40, 3, "JPEG")


@contextmanager
def serving(folder, **settings):
    """A ready service of a model."""
    service = ModelService(ServerConfig(model_name_or_path=str(folder), **settings))
    service.load()
    try:
        yield service
    finally:
        service.scorer.close(30)


def ask(service: ModelService, *requests: LogprobsRequest) -> list[np.ndarray | ProtocolError]:
    """Let the service read and score requests, all at a time, through their bytes."""

    def answer(request: LogprobsRequest) -> np.ndarray | ProtocolError:
        try:
            read = service.read(lambda: encode_request(request))
            body = service.score(read, f"client {id(request)}", is_gone=lambda: False)
            return decode_answer(body, int(request.completion_lengths.sum())).logprobs
        except ProtocolError as error:
            return error

    with ThreadPoolExecutor(len(requests)) as threads:
        return [*threads.map(answer, requests)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda family: save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def service(folders):
    with serving(folders(FAMILY)) as ready:
        yield ready


@pytest.fixture(scope="module")
def plain(folders):
    return Plain(folders(FAMILY))


def prompt_of(plain: Plain, *files: bytes) -> PicturedPrompt:
    """A prompt with a place for each picture."""
    place = plain.tokenizer.convert_ids_to_tokens(plain.picture_token)
    if plain.family.startswith("qwen"):
        place = f"<|vision_start|>{place}<|vision_end|>"
    text = f"see {'<start_of_image>' if plain.family == 'gemma3' else place} " * len(files) + "how many?"
    return PicturedPrompt(plain.prompt(text, files), files)


def exact(plain: Plain, prompt, completions) -> np.ndarray:
    files = getattr(prompt, "pictures", ())
    with torch.no_grad():
        rows = [plain.logprobs([*prompt], files, completion) for completion in completions]
    return torch.cat(rows).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_prompts_with_pictures_are_those_of_plain_transformers(folders, family):
    """Several clients at a time: texts, equal ids with other pictures, several pictures, a drawn picture token."""
    plain = Plain(folders(family))
    groups = [
        (prompt_of(plain, SMALL), [[5, 6, 7], [], [8, plain.picture_token, 9]]),
        (prompt_of(plain, drawing(16, 16, 4)), [[5, 6, 7], [9]]),
        (prompt_of(plain, WIDE, SMALL, JPEG), [[7], [4, 5, 6]]),
        (plain.prompt("no picture"), [[5, 6], [7]]),
    ]
    assert [*groups[0][0]] == [*groups[1][0]]
    with serving(folders(family)) as service:
        answers = ask(service, *(LogprobsRequest.of(prompt, rows, 1.0) for prompt, rows in groups))
    for (prompt, rows), answer in zip(groups, answers, strict=True):
        assert_rounded(answer, exact(plain, prompt, rows))
    assert np.abs(answers[0][:3] - answers[1][:3]).max() > 1e-3  # the picture matters


def test_a_deterministic_server_keeps_other_pictures_apart(folders, plain):
    groups = [(prompt_of(plain, SMALL), [[5, 6]]), (prompt_of(plain, drawing(16, 16, 4)), [[5, 6]])]
    ids, rows = [*groups[0][0]], [5, 6]
    request = LogprobsRequest(
        input_ids=np.array(2 * (ids + rows), np.int32),
        prompt_lengths=np.full(2, len(ids), np.int32),
        completion_lengths=np.full(2, 2, np.int32),
        pictures=[prompt.pictures for prompt, _ in groups],
    )
    with serving(folders(FAMILY), deterministic=True) as service:
        (answer,) = ask(service, request)
    assert_rounded(answer, np.concatenate([exact(plain, *group) for group in groups]))


def test_pictures_are_prepared_before_their_request_waits(service, plain, monkeypatch):
    """The scorer finds them, and opens none."""
    opened, pictures_open = [], pictures.open_picture

    def open_picture(data):
        opened.append(threading.current_thread().name)
        return pictures_open(data)

    monkeypatch.setattr(pictures, "open_picture", open_picture)
    (answer,) = ask(service, LogprobsRequest.of(prompt_of(plain, drawing(32, 32, 9), WIDE), [[5], [6, 7]], 1.0))
    assert len(answer) == 3 and opened and "scorer" not in opened


def test_few_pixels_are_decoded_at_a_time(service, plain, monkeypatch):
    """Of all clients together no more than the limit; a picture that has so many is decoded alone."""
    decoded, sums = [], []

    def open_picture(data):
        picture = pictures_open(data)
        decoded.append(pixels := picture.width * picture.height)
        sums.append(sum(decoded))
        weakref.finalize(picture, decoded.remove, pixels)
        return picture

    pictures_open = pictures.open_picture
    monkeypatch.setattr(pictures, "open_picture", open_picture)
    monkeypatch.setattr(pictures, "MOST_PIXELS", 40 * 40)
    prompts = [prompt_of(plain, *(drawing(*size, seed) for size in ((40, 40), (16, 24), (40, 20)))) for seed in (5, 6)]
    answers = ask(service, *(LogprobsRequest.of(prompt, [[5, 6]], 1.0) for prompt in prompts))
    np.testing.assert_allclose(np.stack(answers), [exact(plain, prompt, [[5, 6]]) for prompt in prompts], atol=1e-5)
    assert len(sums) == 6 and max(sums) == 40 * 40 and not decoded


def changed(prompt: PicturedPrompt, ids=None, files=None) -> PicturedPrompt:
    return PicturedPrompt([*prompt] if ids is None else ids, prompt.pictures if files is None else files)


def wrong(plain: Plain) -> dict[str, tuple]:
    """Prompts that are refused, with status, code and words of the refusal."""
    single, two = prompt_of(plain, SMALL), prompt_of(plain, SMALL, WIDE)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    png, jpeg = encoded(Image.fromarray(noise)), encoded(Image.fromarray(noise), "JPEG")
    long, bomb = encoded(Image.new("RGB", (1000, 2))), changed(single, files=[png_claiming(10**5, 10**5)])
    token = plain.picture_token
    bad, fit = (400, "malformed"), (422, "wrong_pictures")
    in_one_row = changed(two, [token] * [*two].count(token))
    return {
        "no picture": ([*single], *fit, f"sequence 0 has 4 tokens of a picture .id {token}., .* make 0"),
        "another size": (changed(single, files=[WIDE]), *fit, "has 4 tokens of .* make more"),
        "a token more": (changed(single, [*single, token]), *fit, "has 5 tokens of .* make 4"),
        "no token": (changed(single, [20, 21]), *fit, "has 0 tokens"),
        "a picture more": (changed(single, files=[SMALL, SMALL]), *fit, "make more"),
        "a picture less": (changed(two, files=[SMALL]), *fit, "make 4"),
        "in one row": (in_one_row, *fit, "has pictures that this model cannot be fed"),
        "an odd shape": (changed(single, files=[long]), *bad, "a picture of sequence 0 is refused by the model"),
        "cut PNG": (changed(single, files=[png[:-200]]), *bad, "a picture of sequence 0 is damaged"),
        "cut JPEG": (changed(single, files=[jpeg[:-200]]), *bad, "a picture of sequence 0 is damaged"),
        "a bomb": (bomb, 422, "too_many_pixels", "picture 0 has 100000 x"),
    }


def test_pictures_that_do_not_fit_are_refused_and_the_next_request_is_answered(service, plain):
    cases = wrong(plain)
    good = prompt_of(plain, SMALL)
    requests = [LogprobsRequest.of(prompt, [[5, 6]], 1.0) for prompt, *_ in cases.values()]
    *refusals, answer = ask(service, *requests, LogprobsRequest.of(good, [[5, 6]], 1.0))
    assert_rounded(answer, exact(plain, good, [[5, 6]]))
    for (name, (_, status, code, words)), refusal in zip(cases.items(), refusals, strict=True):
        assert isinstance(refusal, ProtocolError), name
        assert (refusal.status, refusal.code) == (status, code), (name, refusal)
        with pytest.raises(ProtocolError, match=words):
            raise refusal
    assert service.queue.held() == {}


def test_no_more_pictures_are_prepared_than_the_ids_stand_for(service, plain):
    """Else a small request would take much time."""
    single = prompt_of(plain, SMALL)
    check = service.pictures
    counted = []

    class Counting:
        token_id = check.processor.token_id

        def count(self, files):
            counted.append(len(files))
            return check.processor.count(files)

    with pytest.raises(ProtocolError, match="make more"):
        PictureCheck(Counting(), None).check(LogprobsRequest.of(changed(single, files=[SMALL] * 256), [[5]], 1.0))
    assert counted == [1, 1]


def test_what_is_kept_of_pictures_is_bounded_and_counts_their_files(folders, plain, monkeypatch):
    """A picture of few pixels may be a large file. Of eight of 300 kB three fit; the others are read again."""
    opened, pictures_open = [], pictures.open_picture
    monkeypatch.setattr(pictures, "open_picture", lambda data: opened.append(data) or pictures_open(data))
    with serving(folders(FAMILY)) as service:
        processor = service.pictures.processor
        processor.kept_bytes = 1 << 20
        large = PngInfo()
        large.add_text("comment", "x" * 300_000)
        files = [encoded(Image.new("RGB", (16, 16), (shade, 0, 0)), pnginfo=large) for shade in range(8)]
        prompts = [prompt_of(plain, file) for file in files]
        requests = [LogprobsRequest.of(prompt, [[20, 21]], 1.0) for prompt in prompts]
        answers = ask(service, *requests)
        opened.clear()
        ask(service, *requests)
    assert_rounded(np.stack(answers), [exact(plain, prompt, [[20, 21]]) for prompt in prompts])
    assert len({*opened}) >= 5


def test_requests_with_pictures_leave_room_for_those_of_text(service, plain, monkeypatch):
    monkeypatch.setattr(service, "picture_threads", threading.Semaphore(1))
    pictured = LogprobsRequest.of(prompt_of(plain, SMALL), [[5]], 1.0)
    with service.picture_threads:
        busy, text = ask(service, pictured), ask(service, LogprobsRequest.of([100, 101], [[5]], 1.0))
    assert (busy[0].status, busy[0].code) == (503, "busy") and text[0].shape == (1,)
    assert ask(service, pictured)[0].shape == (1,)  # its room is free again after each


def test_a_model_without_a_processor_takes_no_pictures(model_folder):
    with serving(model_folder) as service:
        assert service.info.model.processor_fingerprint == ""
        refusal, answer = ask(
            service,
            LogprobsRequest.of(PicturedPrompt([5, 6], [SMALL]), [[7]], 1.0),
            LogprobsRequest.of([5, 6], [[7]], 1.0),
        )
    assert (refusal.status, refusal.code) == (422, "no_pictures") and "takes no pictures" in refusal.message
    assert len(answer) == 1
