"""Alarms: for which layers, when, how often, and for which none."""

import math

import pytest

from surefoot.experiment.training.norm_alarm import HYSTERESIS, MARGIN, WINDOW, Alarm, Alarms, Layer, extrapolate

FREE = Layer("linear", 1.0, None, 10.0)
BOUNDED = Layer("linear", 1.0, 2.0, 2.0 * MARGIN)


def raised(layer, norms, times=None, end=1000.0):
    """`(index, reason)` of the alarms of one layer over a run."""
    alarms = Alarms({"w": layer}, end)
    times = times or [10.0 * (i + 1) for i in range(len(norms))]
    updates = [alarms.update(time, {"w": norm}) for time, norm in zip(times, norms, strict=True)]
    return [(i, alarm.reason) for i, new in enumerate(updates) for alarm in new]


def test_a_layer_alarms_once_and_again_after_it_was_back():
    assert raised(FREE, [9.0, 10.5, 30.0, 9.5, 10.5, 8.0, 8.0, 8.0, 8.0, 8.0, 11.0]) == [(1, "limit"), (10, "limit")]
    assert HYSTERESIS * 10.0 < 9.5


def test_an_alarm_names_the_layer_its_norm_and_its_limit():
    alarms = Alarms({"up": FREE, "down": Layer("head", 5.0, None, 50.0)}, end=1.0)
    assert alarms.update(0.5, {"up": 11.0, "down": 49.0}) == [Alarm("up", 11.0, 10.0, "limit")]


def test_norms_that_are_not_finite_alarm():
    assert raised(FREE, [1.0, None, None]) == [(1, "limit")]
    assert raised(BOUNDED, [None]) == [(0, "limit")]
    assert str(Alarm("w", None, 10.0, "limit")) == "w: its norm is not finite"


def test_a_bound_has_one_percent_of_room():
    assert raised(BOUNDED, [1.0, 2.0, 2.0 * 1.0099]) == []
    assert raised(BOUNDED, [1.0, 2.0, 2.0 * 1.0101]) == [(2, "limit")]


def test_decay_may_come_down_from_above_its_bound():
    assert raised(BOUNDED, [5.0, 4.0, 3.0, 2.5, 2.2, 2.1]) == []
    assert raised(BOUNDED, [5.0, 5.2]) == [(1, "limit")]


def test_a_layer_that_grows_towards_its_bound_raises_no_alarm():
    assert raised(BOUNDED, [0.5, 0.8, 1.1, 1.4, 1.7, 1.95, 2.0, 2.0]) == []


def test_growth_that_slows_as_training_ends_raises_no_alarm():
    """The norms of a hidden matrix in 300 steps of the default recipe; from 1 to 4.4, and steepest at the start."""
    assert raised(FREE, [0.97, 1.3, 1.6, 1.8, 2.0, 2.3, 2.6, 2.9, 3.14, 3.3, 3.5, 3.6, 3.76, 4.17, 4.4, 4.42]) == []


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_free_growth_alarms_before_the_limit(power):
    norms = [2.0 * (i + 1) ** power for i in range(30)]
    (first, reason), (second, then) = raised(FREE, norms)
    assert (reason, then) == ("trend", "limit")
    assert WINDOW - 1 <= first < second
    assert norms[second - 1] <= 10.0 < norms[second]


def test_a_trend_ends_with_the_run():
    norms = [1.5, 3.0, 4.5, 6.0, 7.5]
    assert raised(FREE, norms, end=1000.0) == [(4, "trend")]
    assert raised(FREE, norms, end=55.0) == []


def test_a_run_away_alarms():
    assert [reason for _, reason in raised(FREE, [2.0 ** (i / 2) for i in range(12)])] == ["trend", "limit"]


def test_time_is_what_the_schedule_makes_it():
    """The same norms, the rate falling: less time is left in which to grow."""
    norms = [2.0, 4.0, 5.5, 6.6, 7.4, 7.9, 8.2, 8.35, 8.4]
    falling = [2.0, 4.0, 5.5, 6.6, 7.4, 7.9, 8.2, 8.35, 8.4]
    assert raised(FREE, norms, falling, end=8.4) == []
    assert (4, "trend") in raised(FREE, norms, [float(i) for i in range(1, 10)], end=100.0)


def test_what_has_no_trend():
    assert extrapolate([(1.0, 0.0), (2.0, 3.0)], 10.0) == 0.0
    assert extrapolate([(1.0, math.inf), (2.0, 3.0)], 10.0) == 0.0
    assert extrapolate([(1.0, 1e-300), (1.001, 9.0)], 10.0) > 10.0  # and no overflow
    for last in (1e5, math.nextafter(1e5, math.inf)):  # as under `power:12`, whose last rates do not count in the sum
        assert extrapolate([(1e5, 3.0), (last, 3.5)], 1e5) == 3.5


def test_the_start_is_no_part_of_a_trend():
    norms = [2.0, 2.0, 4.0, 5.5, 6.6]
    assert raised(FREE, norms, [0.0, 1.0, 2.0, 3.0, 4.0]) == []
    assert raised(FREE, [*norms, 7.4], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == [(5, "trend")]
