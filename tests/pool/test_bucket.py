"""Pools whose files are in a bucket: one that dies, a store that is away, and what several pools do at a time.

tests/pool/test_store.py and test_pool_server.py hold with a bucket too.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import requests
from bucket import NAME
from conftest import running_server
from pools import Pool
from proxy import Plan, Proxy
from servers import wait_until
from stored import FOLDER, RUN, damage, put_file, put_version, sha, task_of, weights

from grpo.config.errors import ConfigError
from grpo.config.server import ServerConfig
from grpo.pool import files as files_module
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.files import PIECE_BYTES, open_files
from grpo.pool.store import Store
from grpo.wire.refusals import ProtocolError
from grpo.wire.tensors import FilePart

pytestmark = pytest.mark.rare


@pytest.fixture
def config(postgres, bucket) -> ServerConfig:
    return ServerConfig(task="rollouts", pool_url=postgres.new_database(), pool_folder=bucket.new_folder())


@pytest.fixture
def proxy(bucket, monkeypatch):
    """What stands between this process and the bucket."""
    with closing(Proxy(bucket.port)) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


def test_a_client_goes_on_with_another_pool_when_one_is_killed_while_it_uploads(config, bucket, tmp_path):
    options = ["--task", "rollouts", "--pool_url", config.pool_url, "--pool_folder", config.pool_folder]
    data, own = weights(0, 3 * PIECE_BYTES + 12345), {"TMPDIR": str(tmp_path)}  # where the killed one's pieces stay
    with (
        closing(Proxy(bucket.port)) as proxy,
        running_server(None, tmp_path, *options, environment=own | {"AWS_ENDPOINT_URL": proxy.url}) as first,
        running_server(None, tmp_path, *options, environment=own) as second,
        ThreadPoolExecutor() as threads,
    ):
        client = PoolClient(f"{first.url},{second.url}")
        client.url = first.url
        client.put_run(RUN)
        proxy.plan = lambda: Plan(black_hole=True)
        sent = threads.submit(Retrier(client, 60, threading.Event()), lambda: client.send_file(data, sha(data)))
        wait_until(lambda: proxy.happened["black hole"], seconds=60)
        assert not sent.done() and bucket.names(config.pool_folder) == {"run"}
        first.end()
        sent.result(timeout=60)
        assert bucket.names(config.pool_folder) == {"run", sha(data)} and client.url == second.url
        client.fetch_file(sha(data), tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == data


def test_pieces_that_another_pool_has_are_sent_again_and_a_complete_file_is_every_pools(config):
    data = weights(0, 5000)
    with closing(Pool(config).service) as first, closing(Pool(config).service) as second:
        assert first.store.files.add(FilePart(sha256=sha(data), size=5000, offset=0), data[:1000]) == 1000
        assert second.store.files.add(FilePart(sha256=sha(data), size=5000, offset=0), b"") == 0
        with pytest.raises(ProtocolError, match="0 bytes of this file are here") as refusal:
            second.store.files.add(FilePart(sha256=sha(data), size=5000, offset=1000), data[1000:])
        assert (refusal.value.status, refusal.value.code) == (409, "missing_piece")
        put_file(second.store, data)
        assert first.store.files.add(FilePart(sha256=sha(data), size=5000, offset=1000), data[1000:]) == 5000
        assert first.store.files.read(sha(data), 1000, 2000) == data[1000:2000]


def test_a_bucket_that_is_away_for_a_while_ends_no_pool_and_costs_no_file(config, proxy, bucket):
    data, pool = weights(0, 5000), Pool(config)
    with closing(pool.service) as service:
        pool.put_file(FOLDER)
        assert pool.post("run", RUN.to_json()).status == 200
        version = pool.put_version(0)
        pool.post("files", data[:1000], sha256=sha(data), size=5000, offset=0)
        asked = {
            "the rest of a file": lambda: pool.post("files", data[1000:], sha256=sha(data), size=5000, offset=1000),
            "a part of a file": lambda: pool.get("files", sha256=version.sha256),
            "a version": lambda: pool.post("versions", replace(version, version=1).to_json()),
            "a run": lambda: pool.post("run", RUN.to_json()),
            "what is not needed": lambda: pool.post("needed", version=1),
        }
        proxy.close()
        for name, ask in asked.items():
            status, code, message = ask().refusal[:3]
            assert (status, code) == (503, "no_space"), name
            assert message.startswith(f"{config.pool_folder} cannot be written or read (") and "\n" not in message
        assert service.death is None and bucket.names(config.pool_folder) == {"run", version.sha256, sha(FOLDER)}


def test_a_bucket_that_was_deleted_is_not_taken_for_an_empty_one(config, bucket):
    url = f"{bucket.environment['AWS_ENDPOINT_URL']}/deleted"
    assert requests.put(url, timeout=30).ok
    with closing(open_files("s3://deleted/files")) as files:
        assert files.size(sha(FOLDER)) is None and files.read(sha(FOLDER), 0, 1) == b""
        assert requests.delete(url, timeout=30).ok
        for ask in (
            lambda: files.size(sha(FOLDER)),
            lambda: files.read(sha(FOLDER), 0, 1),
            lambda: files.claim("a", "runs/a"),
            lambda: files.drop_unused(set(), set()),
        ):
            with pytest.raises(ProtocolError, match="bucket does not exist") as refusal:
                ask()
            assert refusal.value.status == 503


def test_what_a_pool_names_no_other_drops(config, monkeypatch):
    """While files are abandoned as soon as they are there, one pool stores versions and tasks and another drops."""
    monkeypatch.setattr(files_module, "_ABANDONED_SECONDS", 0)

    def until_stored(store) -> int:
        tries = 1
        while True:
            try:
                store()
                return tries
            except ProtocolError as error:
                assert error.code == "missing_file"
                tries += 1

    with closing(Pool(config).service) as first, closing(Pool(config).service) as second:
        first.store.set_run(RUN)
        over = threading.Event()

        def drop() -> None:
            while not over.is_set():
                second.store.drop_versions_below(0)

        with ThreadPoolExecutor() as threads:
            dropping = threads.submit(drop)
            tries = 0
            try:
                for number in range(10):
                    tries += until_stored(lambda number=number: put_version(first.store, number))
                    picture = weights(1000 + number)
                    task = task_of(number, version=number, pictures=(sha(picture),))
                    tries += until_stored(
                        lambda task=task, data=picture: [put_file(first.store, data), first.store.put_tasks([task])]
                    )
            finally:
                over.set()
            dropping.result()
        assert tries > 20  # files were dropped
        for number in range(10):
            for data in (weights(number), weights(1000 + number)):
                assert first.store.files.size(sha(data)) == 5000


def test_of_runs_that_claim_a_folder_at_once_one_has_it(bucket):
    for _ in range(5):
        folder, start = bucket.new_folder(), threading.Barrier(2)

        def claim(run: str, folder=folder, start=start) -> int:
            with closing(open_files(folder)) as files:
                start.wait()
                while True:
                    try:
                        files.claim(run, f"runs/{run}")
                        return 200
                    except ProtocolError as error:
                        if error.status == 409:
                            return 409

        with ThreadPoolExecutor() as threads:
            assert sorted(threads.map(claim, "ab")) == [200, 409]


def test_a_bucket_that_cannot_be_used_is_refused_in_a_sentence(config, bucket, monkeypatch):
    def refusal(folder: str) -> str:
        with pytest.raises(ConfigError) as refused:
            Store(config.pool_url, damage, folder)
        assert "\n" not in str(refused.value) and str(refused.value).startswith(f"pool_folder={folder!r}")
        return str(refused.value)

    assert "bucket does not exist: name a bucket where the AWS credentials may list, read" in refusal("s3://none/a")
    assert "name a bucket" in refusal("s3://")
    with monkeypatch.context() as changed:
        changed.delenv("AWS_ACCESS_KEY_ID")
        changed.setenv("AWS_EC2_METADATA_DISABLED", "true")
        assert "Unable to locate credentials: name a bucket" in refusal(config.pool_folder)
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert "Could not connect to the endpoint URL" in refusal(config.pool_folder)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert refusal(f"s3://{NAME}/a").endswith(": pip install s3fs")
