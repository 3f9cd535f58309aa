"""The journal that a worker keeps in a pool, as the next worker finds it."""

import threading
from concurrent.futures import Future

import pytest
from servers import wait_until
from stored import FOLDER, PROBE, RUN, sha, task_of, weights

from grpo.client.server_errors import ServerError
from grpo.data.records import Outcome, Rollout
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.protocol import Task, Version
from grpo.sampling.drawer import Drawn
from grpo.workers.worker_episodes import PoolJournal

pytestmark = pytest.mark.slow

TASKS = [task_of(group, attempt=group % 2) for group in range(3)]
ENDED = Rollout(
    completion_ids=[],
    finished=True,
    text="é",
    sampling_logprobs=[],
    policy_version=0,
    outcome=Outcome(finished=True, messages=[]),
    branches=[],
)
WEIGHTS = sha(weights(0))


@pytest.fixture
def client(pool):
    client = PoolClient(pool.url)
    client.put_run(RUN)
    for data in (FOLDER, weights(0)):
        client.send_file(data, sha(data))
    version = {"version": 0, "sha256": WEIGHTS, "size": 5000, "whole": True}
    client.put_version(Version(**version, base=None, delta=None, probe=PROBE))
    client.put_tasks(TASKS)
    return client


@pytest.fixture
def open_journal(client):
    """`open_journal(worker, *tasks)`: a worker's journal with these tasks; `journal.failures` is what it could not
    keep."""

    def open_journal(worker: str, *tasks: Task, weights: str = WEIGHTS) -> PoolJournal:
        failures = []
        journal = PoolJournal(RUN, worker, client, Retrier(client, 5, threading.Event()), failures.append)
        journal.failures = failures
        for task in tasks:
            journal.open(task, weights)
        return journal

    return open_journal


def name_of(task: Task, number: int) -> tuple[int, int, int]:
    return RUN.seed + (task.attempt << 32), task.group, number


def test_the_next_worker_finds_what_one_had_before_its_programs(open_journal):
    mine, drawn = open_journal("a", *TASKS), {}
    for task in TASKS:
        for number in range(2):
            for request in "xyz":
                drawn[name_of(task, number), request] = Drawn(ids=[task.group, number], logprobs=[-0.25, -1 / 3])
    waiting = {key: Future() for key in drawn}
    for (episode, request), done in waiting.items():
        mine.add(episode, request, drawn[episode, request], done)
    for key, done in waiting.items():
        assert done.result(10) == drawn[key]
    next_one = open_journal("b", *TASKS)
    for (episode, request), value in drawn.items():
        assert next_one.find(episode, request) == mine.find(episode, request) == value
    mine.end(name_of(TASKS[1], 0), ENDED)
    after = Future()
    mine.add(name_of(TASKS[1], 1), "after", Drawn(ids=[], logprobs=[]), after)
    after.result(10)
    other = open_journal("b", TASKS[1])
    assert other.find_rollout(name_of(TASKS[1], 0)) == ENDED and other.find(name_of(TASKS[0], 0), "x") is None
    other.close(TASKS[1])
    late = Future()  # of a request that a program gave up
    other.add(name_of(TASKS[1], 0), "x", Drawn(ids=[1], logprobs=[-1.0]), late)
    assert late.result(10).ids == [1]
    assert other.find_rollout(name_of(TASKS[1], 0)) is None and other.find(name_of(TASKS[1], 0), "x") is None
    assert open_journal("c", *TASKS, weights="f" * 64).find(name_of(TASKS[0], 0), "x") is None


def test_what_the_pool_does_not_take_no_program_gets(open_journal, client, caplog):
    client.add_to_journal("a", TASKS[0].key, WEIGHTS, b'{"episode": 1}\nnothing\n[]\n{"episode": [1], "ids": 1}\n')
    journal = open_journal("x" * 129, TASKS[0])
    assert caplog.text.count("the pool has a damaged line of the journal of group 0: it is drawn again") == 4
    done = Future()
    journal.add(name_of(TASKS[0], 0), "x", Drawn(ids=[1], logprobs=[-1.0]), done)
    wait_until(lambda: journal.failures, 10)
    [failure] = journal.failures
    assert isinstance(failure, ServerError) and "worker has 129 characters" in str(failure)
    assert not done.done() and journal.find(name_of(TASKS[0], 0), "x") is None
