"""What the live page draws, against sums and quantiles of the same numbers that share no code with it."""

import random
import time

import pytest

from grpo.server.history import POINTS, History
from grpo.server.monitor import Monitor, Pass, quantile

STATE = {"queue_tokens": 7, "queue_requests": 2, "device_use": 0.5}
NAN = float("nan")


def test_a_long_pass_is_spread_over_its_time(monkeypatch):
    def at(second: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: 10_000 + second)

    at(0)
    monitor = Monitor()
    monitor.scored(Pass(tokens=300, padded=300, fed=200, budget=400, began=10_010, seconds=12.5))
    at(22.5)
    monitor.sample({})
    at(24)
    monitor.sample({})  # nothing more was done
    at(30)
    short, middle, long = monitor.status({})["history"]
    assert (short["seconds"], middle["seconds"], long["seconds"]) == (5, 30, 360)
    assert short["tokens_per_second"][-4:] == [24, 24, 12, 0] and sum(filter(None, short["tokens_per_second"])) == 60
    assert short["busy"][-4:] == [1, 1, 0.5, 0] and short["batch_fill"][-4:] == [0.5, 0.5, 0.5, None]
    assert short["tokens_per_second"][:-5] == [None] * (POINTS - 5)  # before the server began
    assert set(long["busy"]) == {None}  # its first point is not over
    at(70)  # a point whose beginning the server has not seen is left out
    assert monitor.status({})["history"][1]["tokens_per_second"][-2:] == [None, 2]


def test_a_history_has_its_newest_points_and_forgets_the_older_ones():
    history = History(seconds=5, began=0)
    for second in range(5, 2000):
        history.add_sample(second, {**STATE, "queue_tokens": second}, memory=1000 + second, latencies=[])
    curves = history.curves(2000)
    assert curves["queue_tokens"] == [end - 3 for end in range(2000 - 5 * POINTS + 5, 2001, 5)]  # the mean of five
    assert curves["memory"] == [pytest.approx(999 + end, abs=0.5) for end in range(2000 - 5 * POINTS + 5, 2001, 5)]
    assert curves["device_use"] == [0.5] * POINTS and curves["p50"] == [None] * POINTS
    assert history.curves(2010)["queue_requests"][-3:] == [2, None, None]  # nobody took a sample
    assert set(history.curves(10**6)["queue_tokens"]) == {None}


def test_what_is_not_known_of_the_device_is_null_and_not_zero():
    history = History(seconds=5, began=0)
    history.add_sample(5, {**STATE, "device_use": NAN}, memory=NAN, latencies=[])
    history.add_sample(6, STATE, memory=NAN, latencies=[])
    curves = history.curves(10)
    assert (curves["device_use"][-1], curves["memory"][-1], curves["queue_requests"][-1]) == (None, None, 2)


def test_latencies_are_within_five_percent():
    history, rng = History(seconds=5, began=0), random.Random(0)
    latencies = [rng.lognormvariate(-2, 1.5) for _ in range(500)]
    for start in range(0, 500, 100):
        history.add_sample(5 + start / 100, STATE, memory=0, latencies=latencies[start : start + 100])
    history.add_sample(10, STATE, memory=0, latencies=[0.0, 1e6])  # beyond both ends
    first, second = ([history.curves(15)[name][place] for name in ("p50", "p99")] for place in (-2, -1))
    assert first == [pytest.approx(quantile(sorted(latencies), share), rel=0.05) for share in (0.5, 0.99)]
    assert second == [0.001, pytest.approx(181, rel=0.01)]


def test_a_second_of_many_answers_counts_the_newest(monkeypatch):
    monitor = Monitor()
    began = time.monotonic()
    for number in range(3000):
        monitor.answered("POST", "/v1/logprobs", 200, 0.01 if number < 2000 else 0.1, "10.0.0.1")
    monkeypatch.setattr(time, "monotonic", lambda: began + 6)
    monitor.sample({"one": (70, 2)})
    monkeypatch.setattr(time, "monotonic", lambda: began + 12)
    curves = monitor.status({})["history"][0]
    assert next(filter(None, curves["p50"])) == pytest.approx(0.1, rel=0.05)
    assert next(filter(None, curves["queue_tokens"])) == 70 and next(filter(None, curves["memory"])) > 50e6
