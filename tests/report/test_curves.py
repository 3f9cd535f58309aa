"""Smoothing, thinning, panels and phases, each held against a computation of its own."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from recorded import write

from grpo.report.curves import (
    COLOURS,
    MOST_BARS,
    MOST_POINTS,
    OTHER,
    REST,
    default_window,
    draw_curves,
    make_charts,
    make_phases,
    moving_average,
    thin,
)
from grpo.report.read import RecordedRun

KNOWN = [
    *("reward", "reward_std", "reward_std_within_groups", "frac_reward_zero_std", "resampled_groups"),
    *("rewards/own/mean", "rewards/own/std", "loss", "policy_loss", "kl", "entropy", "grad_norm", "learning_rate"),
    *("beta", "entropy_coef", "ref_step", "skipped_steps", "masked_steps", "aux_loss", "vespo/phi_seq_mean"),
    *("num_tokens", "step_time", "tokens_per_second", "off_policy_masked", "cispo_clip_ratio"),
    *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
    *(f"completions/{name}_length" for name in ("mean", "min", "max")),
    *(f"completions/{name}_terminated_length" for name in ("mean", "min", "max")),
    *("completions/clipped_ratio", "sampling/policy_lag", "sampling/sampling_logp_difference/mean"),
    *("sampling/importance_sampling_ratio/min", "eval_reward", "eval_rewards/format_reward/mean", "eval_accuracy"),
    *("eval_format", "eval_avg@8", "eval_pass@2", "eval_completions/mean_length"),
]
values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def a_run(rows: dict) -> RecordedRun:
    return RecordedRun(folder=Path("run"), rows=rows, settings={})


@settings(deadline=None)
@given(values, st.integers(1, 50))
def test_the_moving_average_is_centred_and_exact(numbers, window):
    places = range(0, len(numbers), 2)
    smooth = moving_average(np.array(numbers), window, np.array(places))
    for place, value in zip(places, smooth, strict=True):
        reach = (window - 1) // 2
        around = [Fraction(number) for number in numbers[max(0, place - reach) : place + reach + 1]]
        assert value == pytest.approx(float(sum(around) / len(around)), rel=1e-9, abs=1e-9)


def test_one_huge_value_drowns_only_its_neighbours():
    spike = np.full(50, 1.0)
    spike[10] = 1e200
    smooth = moving_average(spike, 5, np.arange(50))
    assert (smooth[13:] == 1).all() and (smooth[:8] == 1).all() and (smooth[8:13] > 1e199).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5_000), st.integers(0, 2**32))
def test_a_thinned_curve_keeps_both_ends_and_every_stretch_s_extremes(count, seed):
    numbers = np.random.default_rng(seed).normal(size=count)
    kept = thin(numbers)
    assert len(kept) <= MOST_POINTS and kept.tolist() == sorted(set(kept.tolist()))
    if count <= MOST_POINTS:
        assert len(kept) == count
        return
    assert kept[0] == 0 and kept[-1] == count - 1
    assert np.diff(kept).max() <= 2 * -(-count // 400)  # any stretch so long holds a whole part
    assert {int(numbers.argmin()), int(numbers.argmax())} <= {*kept.tolist()}


def test_every_metric_is_in_exactly_one_chart_and_what_nobody_knows_comes_last():
    unknown = ["what/is[this]?", "lonely_se"]
    row = dict.fromkeys([*KNOWN, "eval_accuracy_se", "eval_avg@8_se", "time/update", *unknown], 0.5)
    charts = make_charts([a_run({1: row})], 5)
    drawn = [name for section in charts.values() for chart in section for name in chart.curves]
    assert sorted(drawn) == sorted([*KNOWN, *unknown])
    assert list(charts)[-1] == REST
    assert [name for chart in charts[REST] for name in chart.curves] == ["num_tokens", *unknown]

    def overview(row) -> list[str]:
        charts = make_charts([a_run({1: row})], 5).values()
        return [name for section in charts for chart in section if chart.overview for name in chart.curves]

    assert overview(row) == ["reward", "eval_accuracy", "eval_format", "kl", "completions/mean_length"]
    # Without a verdict the held-out reward stands there.
    unjudged = {name: value for name, value in row.items() if name not in ("eval_accuracy", "eval_format")}
    assert overview(unjudged) == ["reward", "eval_reward", "kl", "completions/mean_length"]


def test_errors_stay_with_their_values_and_what_is_evaluated_is_not_smoothed():
    evaluated = {step: {"eval_accuracy": step / 10, "eval_accuracy_se": step / 100} for step in range(9)}
    long_run = a_run({step: row | {"reward": step} for step, row in evaluated.items()})
    short_run = a_run({5: {"reward": 1.0}})
    assert default_window([long_run, short_run]) == 5
    assert default_window([a_run({step: {} for step in range(10_000)})]) == 501
    charts = make_charts([long_run, short_run], 5)
    (line,) = charts["Held-out problems"][0].curves["eval_accuracy"]
    assert (line.run, line.values[3], line.errors[3], line.smooth) == (0, 0.3, 0.03, [])
    first, second = charts["Reward"][0].curves["reward"]
    assert first.errors == [] and first.smooth == [1, 1.5, 2, 3, 4, 5, 6, 6.5, 7]
    assert (second.run, second.steps, second.values, second.smooth) == (1, [5], [1.0], [])


@pytest.mark.parametrize("count", [1, 7, MOST_BARS, 1_000])
def test_phases_add_up_to_the_steps_time(count):
    rows = {0: {"eval_accuracy": 0.5}}
    for step in range(1, count + 1):
        rows[step] = {"time/generate": 0.01 * step, "time/update": 0.5, "step_time": 0.01 * step + 0.75}
    rows[1]["time/publish_ref"] = 0.125
    (phases,) = make_phases([a_run(rows)])
    assert list(phases.totals) == ["generate", "update", "publish_ref", OTHER]
    assert phases.totals["generate"] == pytest.approx(0.01 * count * (count + 1) / 2)
    assert phases.totals[OTHER] == pytest.approx(0.25 * count - 0.125)
    assert sum(phases.totals.values()) == pytest.approx(sum(row.get("step_time", 0) for row in rows.values()))
    assert len(phases.steps) == min(count, MOST_BARS) + 1 and (phases.steps[0], phases.steps[-1]) == (1, count + 1)
    for name, seconds in phases.seconds.items():
        widths = np.diff(phases.steps)
        assert (np.array(seconds) * widths).sum() == pytest.approx(phases.totals[name], rel=1e-3)


def test_runs_without_times_have_no_phases_and_runs_share_the_names_of_theirs():
    timed, untimed = make_phases([a_run({1: {"time/update": 1.0, "step_time": 1.5}}), a_run({1: {"reward": 1.0}})])
    assert timed.totals == {"update": 1.0, OTHER: 0.5} and untimed.totals == {"update": 0.0, OTHER: 0.0}
    assert untimed.steps == [] and untimed.seconds == {"update": [], OTHER: []}


def test_colours_stand_out_on_the_page_s_light_and_dark_cards():
    def luminance(colour: str) -> float:  # WCAG 2.2, relative luminance
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in COLOURS:
        for card in ("#ffffff", "#18191c"):
            low, high = sorted([luminance(colour), luminance(card)])
            assert (high + 0.05) / (low + 0.05) >= 3, (colour, card)


def test_the_curves_are_a_picture(tmp_path):
    rows = [{"step": 0, "eval_accuracy": 0.2, "eval_accuracy_se": 0.02, "eval_format": 0.5}]
    rows += [{"step": step, "reward": step / 9, "kl": 0.01 * step, "completions/mean_length": 9} for step in range(9)]
    image = imread(draw_curves(write(tmp_path, rows)))
    assert (tmp_path / "curves.png").exists() and image.shape[:2] == (780, 1200)
    assert image[..., :3].std() > 0.05  # something is drawn
