"""Numbers over ranks: sums and counts, never means of means; and a step's seconds and memory by phase."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.run.metrics import PhaseClock, Stats, add_stats, step_metrics

numbers = st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=10)


@settings(deadline=None)
@given(st.lists(numbers, max_size=4))
def test_parts_add_up_to_the_whole_without_what_does_not_apply(parts):
    together = Stats()
    for part in parts:
        together += Stats.of(part)
    everything = [number for part in parts for number in part if not math.isnan(number)]
    assert together.count == len(everything)
    if everything:
        assert together.mean == pytest.approx(statistics.mean(everything), abs=1e-6)
        assert (together.low, together.high) == (min(everything), max(everything))
    if len(everything) > 1:
        assert together.std == pytest.approx(statistics.stdev(everything), abs=1e-3)
    assert math.isnan(together.mean) == (not everything) and math.isnan(together.std) == (len(everything) < 2)


def test_every_name_becomes_a_metric_by_the_statistic_that_it_was_added_with():
    stats: dict = {}
    add_stats(
        stats,
        {
            "reward": torch.tensor([[1.0], [3.0]]),
            "reward_std:std": np.array([[1.0], [3.0]]),
            "reward_std_within_groups": [0.25, 0.75, math.nan],
            "completions/min_length:min": [2, 4],
            "completions/max_length:max": [2, 4],
            "rewards/host:59876/mean": [1.0, math.nan],
            "rewards/host:59876/std:std": [1.0, math.nan],
            "a user's metric": torch.tensor([True, False]),
            "nobody: knows": 0.5,
            "loss:sum": 0.25,
            "tokens:none": [7],
        },
    )
    of_another_rank: dict = {}
    add_stats(of_another_rank, {"loss:sum": 0.5, "completions/max_length:max": [9], "tokens:none": [1]})
    add_stats(stats, of_another_rank)
    assert step_metrics(stats) == {
        "reward": 2.0,
        "reward_std": pytest.approx(2**0.5),
        "reward_std_within_groups": 0.5,
        "completions/min_length": 2,
        "completions/max_length": 9,
        "rewards/host:59876/mean": 1.0,
        "rewards/host:59876/std": pytest.approx(math.nan, nan_ok=True),
        "a user's metric": 0.5,
        "nobody: knows": 0.5,
        "loss": 0.75,
    }
    assert stats["tokens"].total == 8  # kept for the program


def test_a_users_name_that_ends_as_a_statistic_stays_whole_when_ranks_are_joined():
    numbers = {"log_metric:max": 1.0, "log_metric:len:max": 2.0, "log_metric:len:min": 3.0}
    of_rank: dict = {}
    add_stats(of_rank, {f"{name}:none": [number] for name, number in numbers.items()})
    joined: dict = {}
    add_stats(joined, of_rank)
    assert {name: stats.mean for name, stats in joined.items()} == numbers


def test_phases_add_up_and_one_inside_another_counts_once_and_a_cpu_has_no_peaks(monkeypatch):
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = PhaseClock()
    for _ in range(2):
        with clock("update"):
            work(1)
            with clock("wait_ref"):
                work(4)
            work(0.5)
        work(0.25)
    assert clock.seconds == {"time/update": 3, "time/wait_ref": 8} and clock.total() == 11.5
    assert clock.memory == {}


def test_each_phase_has_its_own_peak_on_a_card(monkeypatch):
    """What the clock makes of torch's counts; there is no card here, so a variable stands for its allocator."""
    held, peak = 0, 0

    def hold(size: float) -> None:
        nonlocal held, peak
        held = size * 2**30
        peak = max(peak, held)

    def reset() -> None:
        nonlocal peak
        peak = held

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: peak + 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    hold(9), hold(1)  # before the step
    clock = PhaseClock()
    with clock("generate"):
        hold(4), hold(1)
    hold(8), hold(1)  # of no phase
    for size in (2, 3):
        with clock("update"):
            hold(size)
            with clock("wait_ref"):
                pass
            with clock("optimizer"):
                hold(size + 2.5), hold(1)
    assert clock.memory == {
        "memory/peak_generate": 4.0,
        "memory/peak_update": 3.0,
        "memory/peak_optimizer": 5.5,
        "memory/peak_reserved": 6.5,
    }
