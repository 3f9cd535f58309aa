"""Pools that share a PostgreSQL database: what one stores or learns the others know, also when one of them dies.

tests/pool/test_store.py and test_pool_server.py hold for both engines.
"""

import threading
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from pools import PROMPTS, RUN, Pool
from stored import FOLDER, damage, put_version, task_of

from grpo.config.errors import ConfigError
from grpo.config.server import ServerConfig
from grpo.pool.protocol import GroupResult, Lease
from grpo.pool.store import Store

TASKS = [task_of(group, PROMPTS[group % len(PROMPTS)]) for group in range(60)]


@pytest.fixture
def config(postgres, tmp_path) -> ServerConfig:
    return ServerConfig(task="rollouts", pool_url=postgres.new_database(), pool_folder=str(tmp_path / "files"))


@pytest.fixture
def pools(config):
    """Two pools on one database, the first with a run, version 0 and the tasks."""
    first, second = Pool(config), Pool(config)
    first.put_file(FOLDER)
    assert first.post("run", RUN.to_json()).status == 200
    second.weights[0] = first.put_version(0).sha256
    first.service.store.put_tasks(TASKS)
    yield first, second
    for pool in (first, second):
        pool.service.close()


def result(group: int) -> GroupResult:
    return GroupResult(
        group=group, attempt=0, completions=[[3 + group, 2]] * 4, logprobs=[[-0.5, -0.25]] * 4, versions=[[0, 0]] * 4
    )


def test_no_task_is_leased_twice_and_the_first_result_stays(pools):
    first, second = pools
    assert second.service.store.run() == first.service.store.run() == RUN
    leased = [pool.lease(name, room=3) for name, pool in zip("abcd", (first, second) * 2, strict=True)]
    keys = [task.key for tasks in leased for task in tasks]
    assert len({*keys}) == len(keys) == 12
    assert first.send(result(0), name="a") == ["accepted"] and second.send(result(0), name="b") == ["already there"]
    assert second.take((0, 0)) == [result(0)] == first.take((0, 0))
    # Both had found none: the second that stores it changes nothing.
    task, late = TASKS[1], replace(result(1), completions=[[9, 2]] * 4)
    assert first.service.store.add_results([(task, result(1))], "a") == {(1, 0)}
    assert second.service.store.add_results([(task, late)], "b") == set()
    assert first.take((1, 0)) == [result(1)]
    assert [worker["name"] for worker in first.status()["workers"]] == ["a", "d", "c", "b"]


def test_a_worker_that_one_pool_suspends_gets_nothing_from_the_others(pools):
    first, second = pools
    first.lease("a", room=1)
    wrong = GroupResult(group=0, attempt=0, completions=[[2]], logprobs=[[-0.5]], versions=[[0]])
    assert [pool.results(wrong, name="a").status for pool in (first, second, first)] == [422] * 3
    assert second.post("lease", Lease(worker="a", room=1, holds=[], wait=0.0).to_json()).status == 403
    assert [task.key for task in second.lease("b")] == [(0, 0)]


def test_who_waits_at_one_pool_is_answered_by_what_another_stores(pools):
    first, second = pools
    threading.Timer(0.3, lambda: second.send(result(5), name="b")).start()
    assert first.take((5, 0), wait=10.0) == [result(5)]


def test_what_a_new_trainers_weights_replace_is_gone_in_all_pools(pools):
    first, second = pools
    old = dict(second.weights)
    second.lease("b")
    first.put_version(0, salt=100)
    assert second.send(result(0), name="b", weights=old) == ["not wanted"]
    with_new = {0: first.weights[0]}
    assert second.send(result(0), name="b", weights=with_new) == ["accepted"]


def test_a_database_that_cannot_be_used_is_refused_in_a_sentence(postgres, tmp_path, config):
    def refusal(url: str, folder: str = config.pool_folder) -> str:
        with pytest.raises(ConfigError) as refused:
            Store(url, damage, folder)
        assert "\n" not in str(refused.value) and "secret" not in str(refused.value)
        return str(refused.value)

    gone = refusal("postgresql://grpo:secret@127.0.0.1:9/pool")
    assert gone.startswith("pool_url='postgresql://grpo@127.0.0.1:9/pool': ") and "refused" in gone
    asked = refusal("postgresql://127.0.0.1:9/pool?user=grpo&password=secret")
    assert asked.startswith("pool_url='postgresql://127.0.0.1:9/pool': ")
    assert 'database "none" does not exist' in refusal(postgres.url("none"))
    other = postgres.new_database()
    with psycopg.connect(other, autocommit=True) as connection:
        connection.execute("CREATE TABLE tasks (text TEXT)")
        connection.execute("CREATE ROLE guest LOGIN")
    assert 'relation "tasks" already exists: give a database that its user may make tables in' in refusal(other)
    assert "permission denied" in refusal(other.replace("grpo@", "guest@"))
    with closing(Store(config.pool_url, damage, config.pool_folder)) as store:
        store.set_run(RUN)
        put_version(store, 0)
    assert "of version 0 is not here: it needs the folder of files that it had" in refusal(
        config.pool_url, str(tmp_path / "others")
    )
    with psycopg.connect(config.pool_url, autocommit=True) as connection:
        connection.execute("UPDATE pool_schema SET version = 99")
    assert "it has schema 99, and this program reads 5: use the release that made it" in refusal(config.pool_url)


def test_a_database_that_is_away_or_only_read_for_a_while_ends_no_pool(postgres, config, caplog):
    caplog.set_level("INFO")
    pool, database = Pool(config), config.pool_url.rsplit("/", 1)[1]
    pool.put_file(FOLDER)

    def set_read_only(value: str) -> None:
        with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = {value}")
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            connection.execute(others, [database])

    set_read_only("on")
    assert pool.service.summary() is None  # the connection was cut
    assert pool.post("run", RUN.to_json()).refusal[:2] == (503, "no_database")
    set_read_only("off")
    assert pool.post("run", RUN.to_json()).refusal[:2] == (503, "no_database")
    assert pool.post("run", RUN.to_json()).status == 200 and pool.service.death is None
    assert "is connected again" in caplog.text
    pool.service.close()
