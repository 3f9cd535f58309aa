"""What is said of a pool and its workers, and when a rank has waited too long."""

import time

from grpo.trainer.pool_sampler import GroupDeadline, describe_wait

WORKER = {"card": "", "version": -1, "state": "waiting", "message": "", "last_seen": 2.4, "reason": ""}


def test_what_is_waited_for_and_what_each_worker_does():
    workers = [
        WORKER | {"name": "box #1", "card": "RTX 4090", "version": 40, "state": "drawing", "message": "fetching 41"},
        WORKER | {"name": "old #2", "state": "apart", "reason": "group 7: a log-prob is above 0"},
    ]
    rounds = [{"round": 6, "tasks": 8, "drawn": 0}, {"round": 5, "tasks": 8, "drawn": 3}]
    assert describe_wait({"workers": workers, "rounds": rounds}, "http://a:1", 5) == (
        "3 of 8 groups are drawn; box #1 on RTX 4090 is drawing (fetching 41), version 40, 2 s ago; "
        "old #2 is apart, version -1, 2 s ago, last refused: group 7: a log-prob is above 0"
    )
    many = [WORKER | {"name": f"box #{number}"} for number in range(10)]
    said = describe_wait({"workers": many}, "http://a:1", 5)
    assert said.count("is waiting") == 8 and said.endswith("box #7 is waiting, version -1, 2 s ago; and 2 more")
    assert describe_wait({"rounds": rounds, "workers": []}, "http://a:1", 7) == (
        "no worker asks this pool: start one with 'python generate.py --pool http://a:1', on any machine"
    )


def test_a_group_of_any_rank_moves_the_deadline_on(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = GroupDeadline(20)
    assert deadline.wants_status() and not deadline.is_over({"rounds": [{"drawn": 3}]})
    assert not deadline.wants_status()
    now += 25
    assert deadline.wants_status() and not deadline.is_over({"rounds": [{"drawn": 4}]})
    now += 25
    assert deadline.is_over({"rounds": [{"drawn": 4}]})
