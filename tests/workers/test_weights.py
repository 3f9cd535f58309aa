"""How weights come to a worker: by few bytes where that goes, and whole where it does not."""

import hashlib
import re
import resource
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from pools import RUN, Trainer, running_pool
from proxy import Plan, Proxy
from safetensors.numpy import save
from stored import task_of

from grpo.client.server_errors import ServerError
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.delta import sha256_of
from grpo.workers import weights_folder
from grpo.workers.engine import WorkerFailed
from grpo.workers.weights_folder import ModelFolder

pytestmark = [pytest.mark.plain_start, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool that has version 0 whole, 1 to 9 as deltas, 9 whole too, and 10 and 11 as deltas."""
    folder = tmp_path_factory.mktemp("pool")
    with running_pool(folder) as server:
        server.file = folder / "run.sqlite"
        yield server


@pytest.fixture(scope="module")
def versions(pool, model_folder, tmp_path_factory):
    trainer = Trainer(PoolClient(pool.url), model_folder, tmp_path_factory.mktemp("trainer"))
    found = []
    for number in range(12):
        trainer.learn(seed=number)
        found.append(trainer.publish(number, whole=number in (0, 9), delta=number > 0))
    return found


@pytest.fixture
def fetched(monkeypatch):
    """What is fetched, by its SHA-256."""
    hashes, fetch = [], PoolClient.fetch_file

    def noted(self, sha256, path):
        hashes.append(sha256)
        fetch(self, sha256, path)

    monkeypatch.setattr(PoolClient, "fetch_file", noted)
    return hashes


@pytest.fixture
def folder(pool, versions, tmp_path):
    return folder_of(pool.url, tmp_path)


def folder_of(url, path) -> ModelFolder:
    client = PoolClient(url, request_timeout=2)
    return ModelFolder(path, client, Retrier(client, 20, threading.Event()))


def bring(folder, version) -> None:
    assert folder.bring(version.version, version.sha256) == version
    assert sha256_of(folder.path / "model.safetensors") == version.sha256 == folder.sha256
    assert {path.name for path in folder.path.parent.iterdir()} == {"model"}


def test_the_next_version_comes_as_a_delta_and_the_same_not_at_all(folder, versions, fetched):
    (folder.path.parent / f"{'f' * 64}.part").write_bytes(b"of an unfinished download")  # which goes
    bring(folder, versions[0])
    bring(folder, versions[1])
    bring(folder, versions[1])
    bring(folder, versions[4])
    assert fetched == [versions[0].sha256, *(version.delta for version in versions[1:5])]


def test_pictures_are_fetched_once_and_the_oldest_go(pool, tmp_path, fetched, monkeypatch):
    monkeypatch.setattr(weights_folder, "_PICTURE_BYTES", 250)
    folder, client = folder_of(pool.url, tmp_path), PoolClient(pool.url)
    files = {hashlib.sha256(file).hexdigest(): file for file in (bytes([number]) * 100 for number in range(3))}
    for name, file in files.items():
        client.send_file(file, name)
    first, *others = files
    task = task_of(0, [5, 6])
    for names in ((first, first), (first,), (*others, first)):
        prompt = folder.with_pictures(replace(task, pictures=names)).prompt_ids
        assert [*prompt] == [5, 6] and prompt.pictures == tuple(files[name] for name in names)
    assert fetched == [first, *others, first]
    (tmp_path / "pictures" / first).write_bytes(b"")  # a power cut may have emptied it
    assert folder.with_pictures(replace(task, pictures=(first,))).prompt_ids.pictures == (files[first],)
    assert fetched == [first, *others, first, first]
    assert folder.with_pictures(task) is task
    with pytest.raises(ServerError, match=f"no complete file '{'f' * 64}' is here"):
        folder.with_pictures(replace(task, pictures=("f" * 64,)))


def test_a_new_worker_and_a_late_one_begin_with_the_nearest_whole_file(folder, versions, fetched):
    bring(folder, versions[11])
    assert fetched == [versions[9].sha256, versions[10].delta, versions[11].delta]
    bring(folder, versions[0])
    fetched.clear()
    bring(folder, versions[9])  # nine deltas, or one file
    assert fetched == [versions[9].sha256]


def test_a_worker_that_starts_again_has_what_it_had(folder, versions, fetched, pool, tmp_path):
    bring(folder, versions[2])
    fetched.clear()
    bring(folder_of(pool.url, tmp_path), versions[3])
    assert fetched == [versions[3].delta]


def test_weights_that_were_damaged_here_are_fetched_whole(folder, versions, fetched, caplog):
    bring(folder, versions[1])
    with open(folder.path / "model.safetensors", "r+b") as file:
        file.seek(-100, 2)
        file.write(b"x")
    fetched.clear()
    bring(folder, versions[2])
    assert fetched[-3:] == [versions[0].sha256, versions[1].delta, versions[2].delta]
    assert "(the result has another SHA-256); fetching the whole file" in caplog.text


def test_a_version_that_went_is_none(folder, versions):
    assert folder.bring(3, versions[4].sha256) is None
    assert folder.bring(12, versions[4].sha256) is None


def test_a_pool_whose_file_is_damaged_ends_the_worker_in_a_sentence(pool, versions, tmp_path, model_folder):
    with running_pool(tmp_path) as other:
        trainer = Trainer(PoolClient(other.url), model_folder, tmp_path / "other")
        version = trainer.publish(0)
        other.end()
        (tmp_path / "run.sqlite.files" / version.sha256).write_bytes(bytes(version.size))
        with running_pool(tmp_path, port=other.port):
            (tmp_path / "worker").mkdir()
            with pytest.raises(ServerError, match="gives no weights that fit together .*sent a damaged file"):
                folder_of(other.url, tmp_path / "worker").bring(0, version.sha256)


def test_a_folder_without_room_ends_the_worker_in_a_sentence(folder, versions, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(WorkerFailed) as failure:
            folder.bring(0, versions[0].sha256)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    says = f"weights_folder='{tmp_path}': File too large: make room there, or name another folder"
    assert str(failure.value) == says
    bring(folder, versions[0])


def test_a_download_goes_on_where_it_was_cut(pool, versions, tmp_path):
    """Every connection ends after 100,000 bytes of an answer."""
    sent = []
    with closing(Proxy(pool.port, lambda: sent.append(1) or Plan(answer_bytes=100_000))) as proxy:
        bring(folder_of(proxy.url, tmp_path), versions[0])
    assert versions[0].size / 100_000 < len(sent) < versions[0].size / 100_000 + 4


def test_an_upload_goes_on_where_it_was_cut(pool, versions, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.client.sessions.PIECE_BYTES", 10_000)
    content = bytes(range(256)) * 1000
    (tmp_path / "file").write_bytes(content)
    sha256 = sha256_of(tmp_path / "file")
    with closing(Proxy(pool.port, lambda: Plan(request_bytes=100_000))) as proxy:
        client = PoolClient(proxy.url, request_timeout=2)
        Retrier(client, 20, threading.Event())(lambda: client.send_file(tmp_path / "file", sha256))
        assert proxy.happened
    client = PoolClient(pool.url)
    client.send_file(content, sha256)  # nothing is left to send
    client.fetch_file(sha256, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content


def bring_files(folder, client, *names) -> None:
    packed = save({name: np.frombuffer(name.encode(), np.uint8) for name in names})
    sha256 = hashlib.sha256(packed).hexdigest()
    client.send_file(packed, sha256)
    folder.bring_model(replace(RUN, model_files=sha256))


def test_the_models_files_replace_others_and_not_the_weights(folder, versions, pool):
    bring(folder, versions[0])
    bring_files(folder, PoolClient(pool.url), "config.json", "old/code.py")
    bring_files(folder, PoolClient(pool.url), "config.json", "code/new.py")
    files = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file()}
    assert files == {"config.json", "code/new.py", "model.safetensors"}
    assert (folder.path / "code/new.py").read_text() == "code/new.py"


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "model.safetensors"])
def test_the_models_files_stay_in_the_folder(folder, pool, tmp_path, name):
    with pytest.raises(ServerError, match=re.escape(f"{pool.url} has a model file that is called {name!r}")):
        bring_files(folder, PoolClient(pool.url), "config.json", name)
    assert not [*folder.path.iterdir()] and not [*tmp_path.rglob("out")]
