"""The power law of the best rate: exact on exact laws, equivariant, numpy's own line, intervals that cover."""

import math

import numpy as np
import pytest

from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.law import power_law

SIZES = (100, 200, 400)


def optimum(by_seed):
    """An optimum as `fit.optimum` gives it: the mean of the seeds' own."""
    values = list(by_seed.values())
    return fit.Optimum("interior", float(np.mean(values)), fit.interval(values), by_seed, 2.0, values[0])


def optima(table, sizes=SIZES):
    """From seeds x sizes of log2 rates."""
    return {size: optimum(dict(enumerate(np.asarray(table)[:, i].tolist()))) for i, size in enumerate(sizes)}


def noisy(seed=0, seeds=4, sizes=SIZES):
    return np.random.default_rng(seed).normal(-3.0, 0.3, size=(seeds, len(sizes)))


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.37])
@pytest.mark.parametrize("sizes", [(100, 200, 400), (3, 16), (2, 5, 7, 64)])
def test_an_exact_law_is_found_again(power, sizes):
    shifts = np.array([[-0.25], [0.0], [0.4]])  # of the seeds, the same at every size
    law = power_law(optima(-3.0 + shifts + power * np.log2(np.array(sizes) / 10), sizes))
    assert law.power.value == pytest.approx(power, abs=1e-12)
    assert law.power.interval == pytest.approx((power, power), abs=1e-12)
    for size in (1, 10, 1600):
        assert law.at(size).value == pytest.approx(-2.95 + power * math.log2(size / 10), abs=1e-12)
        assert law.at(size).interval == pytest.approx(
            tuple(end + power * math.log2(size / 10) for end in fit.interval([-3.25, -3.0, -2.6])), abs=1e-12
        )
    assert (law.rms_octaves is None) == (len(sizes) == 2)
    assert (law.rms_octaves or 0.0) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("sizes", [(100, 200, 400), (4, 8, 16, 64), (2, 3)])
def test_the_lines_are_those_of_polyfit(sizes):
    table = noisy(sizes=sizes)
    law = power_law(optima(table, sizes))
    powers, ends = [], []
    for row in table:
        power, start = np.polyfit(np.log2(sizes), row, 1)
        powers.append(power)
        ends.append(start + power * math.log2(1600))
    assert law.power.value == pytest.approx(np.mean(powers))
    assert law.power.interval == pytest.approx(fit.interval(powers))
    assert law.at(1600).value == pytest.approx(np.mean(ends))
    assert law.at(1600).interval == pytest.approx(fit.interval(ends))
    residuals = np.mean(table, axis=0) - np.polyval(
        np.polyfit(np.log2(sizes), np.mean(table, axis=0), 1), np.log2(sizes)
    )
    assert law.rms_octaves == (None if len(sizes) == 2 else pytest.approx(np.sqrt(np.mean(residuals**2))))


@pytest.mark.parametrize(("shift", "scale"), [(2.5, 1), (-7.0, 3), (0.0, 10)])
def test_other_units_of_rate_and_size_move_the_law_along(shift, scale):
    table = noisy()
    law = power_law(optima(table))
    moved = power_law(optima(table + shift, tuple(scale * size for size in SIZES)))
    assert moved.power.value == pytest.approx(law.power.value)
    assert moved.power.interval == pytest.approx(law.power.interval)
    assert moved.rms_octaves == pytest.approx(law.rms_octaves)
    for size in (50, 1600):
        assert moved.at(scale * size).value == pytest.approx(law.at(size).value + shift)
        assert moved.at(scale * size).interval == pytest.approx(tuple(end + shift for end in law.at(size).interval))


def test_between_two_sizes_the_law_is_the_drift():
    found = optima(noisy(sizes=(100, 400)), (100, 400))
    law, drift = power_law(found), fit.drift(found[100], found[400])
    assert law.power.value * 2 == pytest.approx(drift.value)
    assert tuple(2 * end for end in law.power.interval) == pytest.approx(drift.interval)


@pytest.mark.parametrize("target", [400, 1600])
def test_the_interval_covers_the_truth_nineteen_times_in_twenty(target):
    """Seeds that differ everywhere alike, and at each size by themselves; in one size more than in another."""
    random, trials, covered = np.random.default_rng(0), 1200, {"power": 0, "rate": 0}
    truth = -3.0 - 0.2 * np.log2(np.array(SIZES) / 100)
    for _ in range(trials):
        common, own = 0.2 * random.standard_normal((3, 1)), random.standard_normal((3, 3)) * (0.05, 0.1, 0.2)
        law = power_law(optima(truth + common + own))
        low, high = law.at(target).interval
        covered["rate"] += low <= -3.0 - 0.2 * math.log2(target / 100) <= high
        low, high = law.power.interval
        covered["power"] += low <= -0.2 <= high
    assert all(0.935 <= count / trials <= 0.965 for count in covered.values()), covered


def test_an_interval_does_not_contain_that_the_law_bends():
    bent = -3.0 - 0.05 * np.log2(np.array(SIZES) / 100) ** 2
    law = power_law(optima(bent + np.array([[-0.01], [0.0], [0.01]])))
    truth = -3.0 - 0.05 * math.log2(1600 / 100) ** 2
    assert law.at(1600).interval[0] > truth
    assert law.rms_octaves > 0.02  # which is what tells


def test_few_seeds_have_no_interval_and_only_common_ones_count():
    law = power_law(optima(noisy(seeds=2)))
    assert (law.power.interval, law.at(1600).interval, law.at(1600).seeds) == (None, None, 2)
    found = optima(noisy(seeds=4))
    del found[200].by_seed[0], found[400].by_seed[3]
    law = power_law(found)
    assert sorted(law.by_seed) == [1, 2]
    assert law.power.value == pytest.approx((law.by_seed[1].power + law.by_seed[2].power) / 2)


def test_without_every_optimum_there_is_no_law():
    found = optima(noisy())
    edge = fit.Optimum("high edge", None, None, {}, 2.0, -1.0)
    assert power_law({**found, 800: edge}) is None
    assert power_law({100: found[100]}) is None
    assert power_law({}) is None
