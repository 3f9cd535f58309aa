"""New weights for a running server: those that it takes or refuses, and that no answer is of two models."""

import hashlib
import itertools
import os
import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from conftest import running_server
from faulty_server import code_for, fail_half_way
from rounding import assert_rounded
from safetensors.torch import save
from servers import exact, holding_server, refusal, wait_for_requests, wait_until
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.model.fingerprint import describe, fingerprint_with
from grpo.model.lora import train_adapter
from grpo.model.weights_file import WeightsFile, named_weights
from grpo.server.weight_swap import WeightSwap
from grpo.wire.logprobs import LogprobsRequest, decode_answer, encode_request

TYPE = {"Content-Type": "application/octet-stream"}
PATIENCE = 2.0  # twice the body_timeout of `updated_server`


class Update:
    """A model's weights as a client sends them."""

    def __init__(self, model, tokenizer, folder: Path, dtype=torch.float32):
        self.model = model
        self.body = save({name: tensor.to(dtype) for name, tensor in named_weights(model).items()})
        self.sha256 = hashlib.sha256(self.body).hexdigest()
        path = folder / self.sha256
        path.write_bytes(self.body)
        with open(path, "rb") as file:
            tokens = describe(model, tokenizer, "").tokenizer_fingerprint
            self.becomes = fingerprint_with(model, tokens, WeightsFile(file, len(self.body)), self.sha256)

    def send(self, server, start: int = 0, end: int | None = None, **changes) -> requests.Response:
        query = {"sha256": self.sha256, "size": len(self.body), "offset": start} | changes
        url = server.url + "/v1/weights"
        return requests.post(url, params=query, data=self.body[start:end], headers=TYPE, timeout=30)

    def commit(self, server, **changes) -> requests.Response:
        query = {"sha256": self.sha256, "replaces": served(server), "becomes": self.becomes} | changes
        return requests.post(server.url + "/v1/weights/commit", params=query, headers=TYPE, timeout=60)

    def swap(self, server) -> None:
        assert self.send(server).json() == {"received": len(self.body)}
        assert self.commit(server).json() == {"model_fingerprint": self.becomes}


def served(server) -> str:
    return requests.get(server.url + "/health", timeout=5).json()["model_fingerprint"]


def logprobs(server, prompt, completions) -> tuple[np.ndarray, str]:
    body = encode_request(LogprobsRequest.of(prompt, completions, 1.0))
    said = requests.post(server.url + "/v1/logprobs", data=body, timeout=60)
    answer = decode_answer(said.content, sum(map(len, completions)))
    return answer.logprobs, answer.model_fingerprint


@pytest.fixture
def server(updated_server):
    return updated_server


def starting(folder, tmp_path, *options, code=""):
    """A ready server of its own that takes updates."""
    return running_server(folder, tmp_path, "--update_folder", str(tmp_path / "new"), *options, code=code)


@pytest.fixture(scope="module")
def make(model_folder, tokenizer, tmp_path_factory):
    """`make(seed)`: an update to other weights, each changed in place by `change(name, tensor)`, sent in `dtype`."""

    def build(seed: int, change=lambda name, tensor: None, dtype=torch.float32) -> Update:
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=chance))
                change(name, tensor)
        return Update(model, tokenizer, tmp_path_factory.mktemp("update"), dtype)

    return build


def test_after_a_swap_the_answers_are_those_of_the_new_weights(server, make, model_folder):
    prompt, completions = [5, 6, 7], [[8, 9], [10], [11, 12, 13, 14]]
    update = make(1)
    before = logprobs(server, prompt, completions)
    assert update.send(server, end=1000).json() == {"received": 1000}
    assert update.send(server, 0, 1000).json() == {"received": 1000}  # twice
    assert update.send(server, 500, 70_000).json() == {"received": 70_000}  # half of it is there
    assert update.send(server, 0, 0).json() == {"received": 70_000}  # asks
    assert logprobs(server, prompt, completions)[0].tobytes() == before[0].tobytes()
    assert update.send(server, 70_000).json() == {"received": len(update.body)}
    assert served(server) == before[1]
    for _ in range(2):  # a commit may be asked for again
        assert update.commit(server).json() == {"model_fingerprint": update.becomes}
    after = logprobs(server, prompt, completions)
    assert_rounded(after[0], exact(update.model, prompt, completions))
    assert np.abs(after[0] - before[0]).max() > 1e-2
    assert before[1] != after[1] == update.becomes == served(server)
    health = requests.get(server.url + "/health", timeout=5).json()
    assert health["model"] == f"{model_folder}, updated to {update.sha256[:12]}" and health["takes_updates"]
    assert update.send(server, 0, 0).json() == {"received": len(update.body)}  # it is served: nothing to send
    assert not list((server.log.parent / "new").iterdir())


def test_weights_may_come_in_another_dtype(server, make):
    half = make(2, lambda name, tensor: tensor.copy_(tensor.bfloat16()), torch.bfloat16)
    assert len(half.body) < 0.6 * len(make(2).body)
    half.swap(server)
    values, _ = logprobs(server, [5, 6], [[7, 8, 9]])
    assert_rounded(values, exact(half.model, [5, 6], [[7, 8, 9]]))


def test_each_answer_beside_swaps_is_wholly_of_one_model(server, make):
    """Each request takes several passes; the answers of one model must be the same to the last bit."""
    prompt, completions = [5, 6, 7], [[number] * 50 for number in range(8, 16)]
    models = {update.becomes: update for update in map(make, range(10, 14))}
    answers, done = [], threading.Event()

    def ask():
        while not done.is_set():
            answers.append(logprobs(server, prompt, completions))

    first = next(iter(models.values()))
    first.swap(server)
    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(ask) for _ in range(4)]
        try:
            for update in (*models.values(), *models.values()):
                seen = len(answers)
                update.swap(server)
                wait_until(lambda seen=seen: len(answers) >= seen + 6 or clients[0].done())
        finally:
            done.set()
        for future in clients:
            future.result()
    by_model = {name: {row.tobytes() for row, fingerprint in answers if fingerprint == name} for _, name in answers}
    assert by_model.keys() == models.keys()
    for name, rows in by_model.items():
        (only,) = rows
        expected = exact(models[name].model, prompt, completions)
        assert_rounded(np.frombuffer(only, np.float32), expected)


def swapped_names(tensors: dict) -> dict:
    first, second, *_ = tensors
    return {**tensors, first: tensors[second].clone(), second: tensors[first].clone()}


WRONG = {
    "tensor 'more' is [1], and in this model missing": lambda t: {**t, "more": torch.zeros(1)},
    "tensor 'model.embed_tokens.weight' is missing, and in this model [": lambda t: dict(list(t.items())[1:]),
    "in this model": swapped_names,
    "dtype 'F64'": lambda t: {**t, "model.norm.weight": t["model.norm.weight"].double()},
    "holds NaN or infinity": lambda t: {
        name: torch.full_like(tensor, torch.nan) if name == "model.norm.weight" else tensor
        for name, tensor in t.items()
    },
}


@pytest.mark.parametrize("complaint", WRONG)
def test_weights_that_are_not_of_this_model_are_refused(server, make, complaint):
    update = make(3)
    update.body = save(WRONG[complaint](named_weights(update.model)))
    update.sha256 = hashlib.sha256(update.body).hexdigest()
    before = served(server)
    answer = update.send(server)
    if answer.status_code == 200:
        answer = update.commit(server)
    status, code, message = refusal(answer)
    assert (status, code) == (422, "wrong_weights") and complaint in message
    assert served(server) == before
    # It is forgotten: nothing of it is here.
    assert refusal(update.commit(server))[:2] == (409, "missing_piece")


def test_a_commit_must_fit_what_is_served_and_what_was_sent(server, make):
    update = make(4)
    assert refusal(update.commit(server))[:2] == (409, "missing_piece")
    update.send(server, end=len(update.body) - 1)
    assert refusal(update.commit(server))[:2] == (409, "missing_piece")
    update.send(server, len(update.body) - 1)
    status, code, message = refusal(update.commit(server, replaces="0" * 16))
    assert (status, code) == (409, "wrong_model") and served(server) in message
    assert refusal(update.commit(server, sha256="0" * 64))[:2] == (409, "missing_piece")
    status, code, message = refusal(update.commit(server, becomes="0" * 16))
    assert (status, code) == (422, "wrong_weights") and update.becomes in message

    damaged = make(4)
    damaged.body = damaged.body[:-4] + b"\0\0\0\0"
    damaged.send(server)
    assert refusal(damaged.commit(server))[:2] == (409, "damaged")
    update.swap(server)  # none of it stands in the way of the right one


def test_queries_bodies_and_types_that_are_not_right_are_refused(server, make):
    update = make(5)
    sizes, offsets = ("many", -1, len(update.body) - 1), ("", "9" * 19, "²", 1)
    for name, values in {"sha256": ("no", "A" * 64), "size": sizes, "offset": offsets}.items():
        for value in values:
            assert refusal(update.send(server, **{name: value}))[:2] == (400, "malformed"), (name, value)
    for changes in ({"replaces": "x" * 16}, {"becomes": "ab"}, {"sha256": ""}):
        assert refusal(update.commit(server, **changes))[:2] == (400, "malformed"), changes
    assert refusal(update.send(server, 0, 0, size=2**50))[:2] == (422, "wrong_weights")
    assert refusal(update.send(server, 10, 20))[:2] == (409, "missing_piece")
    status, code, message = refusal(update.send(server, 0, 10, size=10**6))
    assert (status, code) == (400, "malformed") and f"this upload has {len(update.body)} bytes" in message
    for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
        for path in ("/v1/weights", "/v1/weights/commit"):
            answer = requests.post(server.url + path, data=b"x", headers={"Content-Type": kind}, timeout=5)
            assert refusal(answer)[:2] == (415, "unsupported_media_type")
    assert requests.get(server.url + "/v1/weights", timeout=5).status_code == 405


def test_rubbish_is_refused_as_soon_as_it_can_be_seen(server, make):
    update = make(6)
    for body in (b"\xff" * 1000, (10).to_bytes(8, "little") + b"x" * 10, (10**5).to_bytes(8, "little") + bytes(100)):
        update.body, update.sha256 = body, hashlib.sha256(body).hexdigest()
        assert refusal(update.send(server))[:2] == (422, "wrong_weights")
    update.body, update.sha256 = b"", hashlib.sha256(b"").hexdigest()
    update.send(server)
    assert refusal(update.commit(server))[:2] == (422, "wrong_weights")


def huge(name: str, tensor: torch.Tensor) -> None:
    if name == "model.norm.weight":
        tensor.fill_(3e38)


def test_finite_weights_with_which_nothing_can_be_scored_are_refused_and_the_old_ones_answer_on(server, make):
    """Also the answers beside it name the model that they are of; and again after other weights."""
    prompt, completions = [5, 6, 7], [[number] * 50 for number in range(8, 16)]
    bad = make(30, huge)
    for good in (make(31), make(32)):
        good.swap(server)
        before = logprobs(server, prompt, completions)
        assert before[1] == good.becomes
        with ThreadPoolExecutor(4) as threads:
            clients = [threads.submit(logprobs, server, prompt, completions) for _ in range(40)]
            for _ in range(2):
                bad.send(server)
                status, code, message = refusal(bad.commit(server))
                assert (status, code) == (422, "wrong_weights") and "nothing can be scored" in message
        answers = [future.result() for future in clients] + [logprobs(server, prompt, completions)]
        assert {(row.tobytes(), name) for row, name in answers} == {(before[0].tobytes(), before[1])}
        assert served(server) == good.becomes and server.process.poll() is None


@pytest.mark.slow
def test_one_upload_at_a_time_until_it_is_not_brought_on(server, make):
    """Neither an empty piece nor one that came already is progress. Without progress it does not stay on the disk."""
    first, second = make(33), make(34)
    first.send(server, end=100)
    end = time.monotonic() + 30
    while (answer := second.send(server, end=100)).status_code == 503:
        assert time.monotonic() < end, "kept out"
        assert refusal(answer)[1] == "other_upload" and "100 of" in refusal(answer)[2]
        assert 1 <= int(answer.headers["Retry-After"]) <= PATIENCE
        assert first.send(server, 0, 0).json() == first.send(server, 0, 50).json() == {"received": 100}
        time.sleep(PATIENCE / 10)
    assert answer.json() == {"received": 100}
    assert refusal(first.send(server, 100, 300))[:2] == (503, "other_upload")
    # One file holds the served weights.
    new, open_files = str(server.log.parent / "new"), Path(f"/proc/{server.process.pid}/fd")
    wait_until(lambda: sum(os.path.realpath(link).startswith(new) for link in open_files.iterdir()) == 1)
    second.swap(server)
    assert first.send(server, 0, 0).json() == {"received": 0}
    first.swap(server)


@pytest.mark.slow
def test_commits_that_wait_leave_threads_for_everything_else(make, model_folder, tmp_path):
    """More than the server has threads, while the model answers what came before them."""
    update, count = make(10), 135
    options = ["--update_folder", str(tmp_path / "new")]
    with holding_server(model_folder, tmp_path, *options) as (server, go), ThreadPoolExecutor(count + 1) as threads:
        update.send(server)
        waiting = threads.submit(logprobs, server, [5], [[6]])
        wait_for_requests(server, 1)
        replaces = served(server)
        commits = [threads.submit(update.commit, server, replaces=replaces) for _ in range(count)]
        refused = list(itertools.islice(as_completed(commits), count - 4))
        assert {refusal(commit.result())[:2] for commit in refused} == {(503, "busy")}
        assert int(refused[0].result().headers["Retry-After"]) >= 1
        assert served(server) == replaces and not waiting.done()
        go.touch()
        assert waiting.result()[1] == replaces
        assert [commit.result().status_code for commit in commits if commit not in refused] == [200] * 4
        assert served(server) == update.becomes and server.log.read_text().count("new weights: ") == 1


def test_a_folder_that_cannot_be_written_is_refused(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="update_folder='.*/file': .*: name a folder to write to"):
        WeightSwap(None, model, inputs="tokens", folder=str(tmp_path / "file"), patience=1.0, on_swap=print)


def test_a_server_of_an_adapter_cannot_be_updated(model_folder, tmp_path):
    pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    train_adapter(model, TrainerConfig(use_peft=True))
    with pytest.raises(ConfigError, match="update_folder='.*': whole models come, and this one is an adapter"):
        WeightSwap(None, model, inputs="tokens", folder=str(tmp_path), patience=1.0, on_swap=print)


@pytest.mark.slow
def test_a_model_over_all_devices_takes_updates_too(model_folder, make, tmp_path):
    pytest.importorskip("accelerate")
    update = make(1)
    with starting(model_folder, tmp_path, "--device_map", "auto") as server:
        update.swap(server)
        values, _ = logprobs(server, [5, 6], [[7, 8, 9]])
        assert_rounded(values, exact(update.model, [5, 6], [[7, 8, 9]]))


@pytest.mark.slow
def test_a_full_disk_is_said_before_the_weights_come(model_folder, make, tmp_path):
    """A file-size limit stands in for it."""
    update = make(1)
    with starting(model_folder, tmp_path) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
        status, code, message = refusal(answer := update.send(server, 0, 0))
        assert (status, code) == (503, "no_space") and str(tmp_path / "new") in message
        assert answer.headers["Retry-After"]
        assert logprobs(server, [5], [[6]])[1] == served(server)


@pytest.mark.slow
def test_a_swap_that_fails_half_way_ends_the_server(model_folder, make, tmp_path):
    """Half of the old and half of the new weights must answer nobody."""
    update = make(1)
    with starting(model_folder, tmp_path, code=code_for(fail_half_way)) as server:
        update.send(server)
        assert refusal(update.commit(server))[:2] == (503, "worker_died")
        assert server.process.wait(timeout=30) == 1
        assert "KeyError: 'model.norm.weight'" in server.log.read_text()


@pytest.mark.slow
def test_memory_holds_a_piece_and_not_the_model(tokenizer, tmp_path):
    """160 MiB of weights go through; the server's peak rises by far less."""
    sizes = dict(hidden_size=512, intermediate_size=6656, num_hidden_layers=4, max_position_embeddings=512)
    heads = dict(num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads))
    model.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.01)
    update = Update(model.eval(), tokenizer, tmp_path)
    assert len(update.body) > 160 << 20
    with starting(tmp_path / "wide", tmp_path) as server:
        logprobs(server, [5], [[6] * 100])
        process = Path(f"/proc/{server.process.pid}")

        def mebibytes(name: str) -> int:
            return int(re.search(rf"{name}:\s+(\d+) kB", (process / "status").read_text())[1]) >> 10

        (process / "clear_refs").write_text("5")  # the peak begins anew
        before = mebibytes("VmRSS")
        for start in range(0, len(update.body), 16 << 20):
            update.send(server, start, start + (16 << 20))
        assert update.commit(server).status_code == 200
        assert mebibytes("VmHWM") - before < 100
        assert_rounded(logprobs(server, [5], [[6, 7]])[0], exact(model, [5], [[6, 7]]))
