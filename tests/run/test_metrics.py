"""Numbers over ranks: sums and counts, never means of means; and the files they go to."""

import json
import math
import shutil
import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.report.curves import draw_curves
from grpo.run.folder import SaveError
from grpo.run.metrics import PhaseClock, Stats, add_stats, step_metrics
from grpo.run.recorder import Recorder

numbers = st.lists(st.floats(-1e3, 1e3), max_size=10)


@settings(deadline=None)
@given(st.lists(numbers, max_size=4))
def test_parts_add_up_to_the_whole(parts):
    together = Stats()
    for part in parts:
        together += Stats.of(part)
    everything = [number for part in parts for number in part]
    assert together.count == len(everything)
    if everything:
        assert together.mean == pytest.approx(statistics.mean(everything), abs=1e-6)
        assert (together.low, together.high) == (min(everything), max(everything))
    if len(everything) > 1:
        assert together.std == pytest.approx(statistics.stdev(everything), abs=1e-3)


def test_ranks_of_different_sizes_weigh_by_their_numbers():
    assert (Stats.of([1.0, 1.0, 1.0]) + Stats.of([5.0])).mean == 2.0


def test_what_does_not_apply_is_left_out():
    assert Stats.of([1.0, math.nan, 3.0]) == Stats.of([1.0, 3.0])
    assert math.isnan(Stats.of([]).mean) and math.isnan(Stats.of([1.0]).std)


@pytest.mark.parametrize("values", [np.ones((2, 3)), torch.ones(2, 3), torch.ones(6, dtype=torch.bool), [1] * 6])
def test_any_array_will_do(values):
    assert (Stats.of(values).count, Stats.of(values).total) == (6, 6.0)


def test_every_name_becomes_a_metric_by_the_statistic_that_it_was_added_with():
    stats: dict = {}
    add_stats(
        stats,
        {
            "reward": [1.0, 3.0],
            "reward_std:std": [1.0, 3.0],
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
    deviation = pytest.approx(2**0.5)
    assert step_metrics(stats) == {
        "reward": 2.0,
        "reward_std": deviation,
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


def test_the_clock_adds_up_a_phase():
    clock = PhaseClock()
    for _ in range(2):
        with clock("reward"):
            pass
    assert 0 < clock.seconds["time/reward"] <= clock.total()


def test_a_phase_inside_another_counts_once():
    clock = PhaseClock()
    with clock("update"):
        time.sleep(0.01)
        with clock("wait_ref"):
            time.sleep(0.05)
    assert clock.seconds["time/wait_ref"] >= 0.05
    assert clock.seconds["time/update"] >= 0.01
    assert sum(clock.seconds.values()) <= clock.total()


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
    hold(9)
    hold(1)  # before the step
    clock = PhaseClock()
    with clock("generate"):
        hold(4)
        hold(1)
    hold(8)
    hold(1)  # of no phase
    for size in (2, 3):
        with clock("update"):
            hold(size)
            with clock("wait_ref"):
                pass
            with clock("optimizer"):
                hold(size + 2.5)
                hold(1)
    assert clock.memory == {
        "memory/peak_generate": 4.0,
        "memory/peak_update": 3.0,
        "memory/peak_optimizer": 5.5,
        "memory/peak_reserved": 6.5,
    }


def test_a_cpu_has_no_peaks():
    clock = PhaseClock()
    with clock("update"):
        pass
    assert clock.memory == {} and [*clock.seconds] == ["time/update"]


def test_the_record_is_appended_and_nan_is_null(tmp_path):
    config = parse_arguments(TrainerConfig, "", ["--report_to", "tensorboard"])
    for step in (1, 2):
        recorder = Recorder(config, tmp_path, after=step - 1)
        recorder.metrics(step, {"reward": 1.5, "completions/mean_terminated_length": math.nan})
        recorder.completions(step, "train", [{"completion": "ä"}])
        recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": s, "reward": 1.5, "completions/mean_terminated_length": None} for s in (1, 2)]
    assert '"ä"' in (tmp_path / "completions.jsonl").read_text()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 1.5), (2, 1.5)]


def test_tensorboard_has_what_a_killed_run_has_recorded(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder, numbers = Recorder(TrainerConfig(report_to=["tensorboard"]), tmp_path, after=-1), range(200)
    for step in range(5):
        recorder.metrics(step, {f"number/{number}": step for number in numbers})
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # as after a kill: it is not closed
        assert all(events.Scalars(f"number/{number}")[-1].step == step for number in numbers)
    recorder.close()


def test_the_curves_are_a_picture(tmp_path):
    rows = [{"step": 0, "eval_accuracy": 0.2, "eval_accuracy_se": 0.02, "eval_format": 0.5}]
    rows += [
        {"step": step, "reward": step / 9, "kl": 0.01 * step, "completions/mean_length": None} for step in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = draw_curves(tmp_path)
    assert picture == tmp_path / "curves.png"
    from matplotlib.image import imread

    image = imread(picture)
    assert image.shape[:2] == (780, 1200) and image[..., :3].std() > 0.05  # something is drawn


def test_a_folder_that_is_gone_ends_the_run_at_its_next_step(tmp_path):
    for number, change in enumerate((shutil.rmtree, lambda run: run.rename(run.with_name("moved")))):
        run = tmp_path / str(number)
        run.mkdir()
        recorder = Recorder(TrainerConfig(report_to=["none"]), run, after=-1)
        recorder.metrics(1, {})
        change(run)
        for again in (False, True):  # also where another one is in its place
            if again:
                run.mkdir()
                (run / "metrics.jsonl").touch()
            with pytest.raises(SaveError, match=f"^{run}/metrics.jsonl was moved, replaced or deleted while"):
                recorder.metrics(2, {})
        recorder.close()
