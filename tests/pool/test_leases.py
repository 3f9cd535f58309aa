"""Who draws which task: leases that end with their worker, and workers that are set apart."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from stored import damage

from grpo.pool import leases as leases_module
from grpo.pool.database import SqliteDatabase
from grpo.pool.leases import MOST_REFUSALS, Leases
from grpo.pool.protocol import Lease


@pytest.fixture
def leases(tmp_path) -> Iterator[Leases]:
    with closing(SqliteDatabase(str(tmp_path / "run.sqlite"), damage)) as database:
        yield Leases(database)


def held(leases: Leases) -> set[tuple[int, int]]:
    keys = [worker.holds for worker in leases.workers()]
    assert leases.count() == sum(map(len, keys))
    return set().union(*keys)


def says(name: str, *holds: tuple[int, int]) -> Lease:
    return Lease(worker=name, room=1, holds=[[*key] for key in holds], wait=0.0)


def lease(leases: Leases, name: str, *keys: tuple[int, int]) -> None:
    leases.seen(says(name))
    leases.grant(name, keys)


def test_a_worker_keeps_what_it_holds_when_the_pool_restarts_unless_another_has_it(leases):
    lease(leases, "a", (0, 0))
    leases.seen(says("b", (0, 0), (5, 0)))
    assert {worker.name: worker.holds for worker in leases.workers()} == {"a": {(0, 0)}, "b": {(5, 0)}}


def test_what_was_drawn_is_nobodys(leases):
    lease(leases, "a", (0, 0), (1, 0))
    lease(leases, "b", (2, 0))
    leases.uploaded("b", [(0, 0)], groups=1, tokens=12)  # a was slow
    assert held(leases) == {(1, 0), (2, 0)}
    leases.uploaded("a", [], unwanted=[(1, 0), (2, 0)], groups=0, tokens=0)  # b draws the second anew
    assert held(leases) == {(2, 0)}
    a, b = sorted(leases.workers(), key=lambda worker: worker.name)
    assert (a.groups, a.tokens, a.uploaded) == (0, 0, None) and (b.groups, b.tokens) == (1, 12) and b.uploaded


def test_three_refusals_in_a_row_set_a_worker_apart(leases):
    lease(leases, "a", (0, 0), (1, 0))
    for _ in range(MOST_REFUSALS - 1):
        leases.refused("a", [(0, 0)], "a log-prob is above 0")
    assert held(leases) == {(1, 0)}
    leases.uploaded("a", [(1, 0)], groups=1, tokens=5)
    for _ in range(MOST_REFUSALS - 1):
        leases.refused("a", [], "")
    leases.grant("a", [(7, 0)])
    assert held(leases) == {(7, 0)}
    leases.refused("a", [], "ids")
    (worker,) = leases.workers()
    assert (worker.refusals, worker.state(leases.now()), held(leases)) == (5, "apart", set())
    assert worker.reason == "3 uploads in a row were refused, the last: ids"
    assert not leases.seen(says("a of another process")).is_suspended


def test_a_worker_whose_log_probs_are_not_the_trainers_is_set_apart(leases):
    for name in "abc":
        leases.seen(says(name, (0, 0)) if name == "c" else says(name))
    near = [{"a": 0.04, "b": 0.21, "gone": 5.0}, {"a": 2.0}, {"a": 1.0, "b": 1.2}]  # a policy that all are behind
    for drifts in near:
        leases.drifted(drifts)
    assert not any(worker.is_suspended for worker in leases.workers())
    leases.drifted({"a": 0.04, "c": 0.58})
    leases.drifted({"a": 0.1, "c": 0.9})
    (apart,) = (worker for worker in leases.workers() if worker.is_suspended)
    assert (apart.name, apart.holds, apart.drift, leases.find("a").drift) == ("c", set(), 0.58, 0.1)
    assert apart.reason == "its log-probs are 0.58 nats a token from the trainer's, another worker's 0.04"


def test_workers_beyond_the_most_take_the_place_of_the_longest_silent(leases, monkeypatch):
    monkeypatch.setattr(leases_module, "_MOST_WORKERS", 3)
    lease(leases, "b", (0, 0))
    for name in "acad":
        leases.seen(says(name))
    assert [worker.name for worker in leases.workers()] == ["d", "a", "c"]
    assert held(leases) == set()  # also if it never comes back
    assert leases.seen(says("b", (0, 0))).holds == {(0, 0)}
