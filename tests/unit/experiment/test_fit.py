"""The fit against curves whose optimum is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.fit import Point
from surefoot.experiment.sweep.search import next_rates


def basin(x, optimum=-4.3, steepening=0.03):
    """A loss that is parabolic left of its optimum and steepens on the right, as measured curves do."""
    d = x - optimum
    return 2.0 + 0.08 * d**2 + (steepening * d**3 if d > 0 else 0.0)


def sweep(loss, centre=-4.0, budget=7, seeds=(0,)):
    """What the search measures on loss(x, seed)."""
    points = []
    while new := next_rates(fit.mean_curve(points), centre, budget):
        points += [Point(x, seed, loss(x, seed)) for x in new for seed in seeds]
    return points


@pytest.mark.parametrize("offset", [-2.0, -1.0, -0.4, 0.0, 0.3, 1.0, 2.0])
def test_optimum_of_an_asymmetric_curve_wherever_the_search_starts(offset):
    fitted = fit.optimum(sweep(lambda x, _: basin(x), centre=-4.3 + offset))
    assert fitted.interior
    assert fitted.log2_lr == pytest.approx(-4.3, abs=0.09)


@pytest.mark.parametrize("wall", [None, math.nan, math.inf])
def test_diverged_runs_do_not_move_the_optimum(wall):
    exact = [Point(x, 0, basin(x, steepening=0)) for x in np.arange(-6, -2.9, 0.5)]
    diverged = [Point(x, 0, wall) for x in (-2.5, -2.0, -1.0)]
    fitted = fit.optimum(exact + diverged)
    assert fitted.log2_lr == pytest.approx(-4.3, abs=1e-9)
    assert fitted.best_loss == pytest.approx(basin(-4.5, steepening=0))


def test_runs_that_blew_up_without_becoming_infinite_do_not_move_the_optimum():
    rates = (-5.5, -5.0, -4.5, -4.0)
    points = [Point(x, 0, basin(x, steepening=0)) for x in rates] + [Point(-3.5, 0, 5.5)]
    assert fit.optimum(points).log2_lr == pytest.approx(-4.3, abs=1e-9)


def test_a_rate_that_one_seed_does_not_survive_is_not_the_best():
    points = [Point(x, seed, basin(x)) for x in (-6.0, -5.5, -5.0, -4.5, -4.0) for seed in (0, 1, 2)]
    points[-3] = Point(-4.0, 0, None)
    points = [*points, Point(-3.5, 0, 1.0)]  # and one that a single seed has run says nothing yet
    fitted = fit.optimum(points)
    assert fitted.best_rate == -4.5
    assert fitted.status == "next to divergence"
    assert fitted.log2_lr is None


@pytest.mark.parametrize(("optimum", "status"), [(-9.0, "low edge"), (1.0, "high edge")])
def test_an_optimum_at_the_edge_is_flagged_and_not_fitted(optimum, status):
    fitted = fit.optimum(Point(x, 0, basin(x, optimum)) for x in (-6.0, -5.0, -4.0, -3.0))
    assert (fitted.status, fitted.interior, fitted.log2_lr, fitted.interval) == (status, False, None, None)
    assert fitted.best_loss is not None


def test_without_a_finite_run_there_is_no_result():
    assert fit.optimum([Point(-4.0, 0, None)]) == fit.Optimum("no result", None, None, {}, None, None)


def test_best_loss_is_measured_not_extrapolated():
    points = [Point(x, 0, basin(x)) for x in (-6.0, -5.0, -4.0, -3.0)]
    assert fit.optimum(points).best_loss == min(point.loss for point in points)


@pytest.mark.parametrize(("n", "interval"), [(1, False), (2, False), (3, True)])
def test_intervals_from_three_seeds_up(n, interval):
    points = [Point(x, s, basin(x, -4.3 + 0.1 * s)) for x in np.arange(-6.0, -2.9, 0.5) for s in range(n)]
    fitted = fit.optimum(points)
    assert (fitted.interval is not None) == interval
    assert len(fitted.by_seed) == n
    assert np.mean(list(fitted.by_seed.values())) == pytest.approx(fitted.log2_lr, abs=1e-9)
    assert fit.drift(fitted, fitted).seeds == n


@pytest.mark.parametrize("seeds", [3, 5])
def test_interval_covers_the_truth_at_its_stated_rate(seeds):
    random = np.random.default_rng(seeds)
    covered = []
    for _ in range(500):
        shift = 0.05 * random.standard_normal(seeds)  # a seed's own optimum ...
        level = 0.05 * random.standard_normal(seeds)  # ... and its own level, which pairing removes

        def loss(x, s, shift=shift, level=level):
            return 2 + 0.1 * (x + 4.3 - shift[s]) ** 2 + level[s] + 0.01 * random.standard_normal()

        fitted = fit.optimum(sweep(loss, -4 + random.uniform(-0.5, 0.5), seeds=range(seeds)))
        low, high = fitted.interval
        covered.append(low <= -4.3 <= high)
    assert 0.92 <= np.mean(covered) <= 0.98  # 95 % +- 3 standard errors of 500 repetitions


def test_drift_interval_is_paired():
    """Seeds that disagree on the optimum but agree on how far it moves leave a narrow interval."""
    rates = np.arange(-7.0, -1.9, 0.5)
    shifts = {0: -0.3, 1: 0.0, 2: 0.35}
    narrow, wide = (
        fit.optimum(Point(x, s, 2 + 0.1 * (x - centre - shift) ** 2) for x in rates for s, shift in shifts.items())
        for centre in (-4.2, -5.0)
    )
    moved = fit.drift(narrow, wide)
    assert moved.value == pytest.approx(-0.8, abs=1e-6)
    assert moved.interval == pytest.approx((-0.8, -0.8), abs=1e-6)
    assert narrow.interval[1] - narrow.interval[0] > 1.0


def test_drift_is_of_the_seeds_that_both_have():
    own = {0: -4.0, 1: -3.4, 2: -3.7, 3: -3.0}  # each seed's optimum, the same at both widths
    rates = [x / 2 for x in range(-12, -2)]
    narrow, wide = (
        fit.optimum(Point(x, s, 2 + 0.1 * (x - own[s]) ** 2) for x in rates for s in seeds)
        for seeds in (range(4), range(3))
    )
    assert wide.log2_lr - narrow.log2_lr == pytest.approx(-0.175)
    moved = fit.drift(narrow, wide)
    assert (moved.value, moved.seeds) == (pytest.approx(0.0, abs=1e-9), 3)
    assert fit.drift(narrow, replace(wide, by_seed={7: -3.7})).value == pytest.approx(-0.175)  # none in common


def test_drift_is_signed_and_needs_two_interior_optima():
    rates = (-6.0, -5.0, -4.0, -3.0)
    here, there, edge = (fit.optimum(Point(x, 0, (x - centre) ** 2) for x in rates) for centre in (-4.6, -4.2, -9.0))
    assert fit.drift(here, there).value == pytest.approx(0.4)
    assert fit.drift(there, here).value == pytest.approx(-0.4)
    assert fit.drift(here, edge).value is None


def test_regret_compares_the_same_seeds_at_the_same_width():
    points = [Point(x, s, 2 + 0.1 * (x + 5) ** 2 + s) for x in (-6.0, -5.0, -4.0) for s in (0, 1, 2)]
    cost = fit.regret(points, -4.0)
    assert cost.value == pytest.approx(0.1)
    assert cost.interval == pytest.approx((0.1, 0.1))
    assert fit.regret(points, -5.0).value == 0
    assert fit.regret([*points, Point(-3.0, 0, None)], -3.0).value is None
    assert fit.regret(points, -4.5).value is None


@pytest.mark.parametrize("budget", [3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("offset", [-5.0, -1.3, 0.0, 1.3, 5.0])
def test_search_keeps_its_budget_and_never_repeats_a_rate(budget, offset):
    rates = [point.log2_lr for point in sweep(lambda x, _: basin(x), -4.3 + offset, budget)]
    assert len(rates) == len(set(rates)) <= budget


def test_search_refines_to_half_an_octave_on_both_sides():
    points = sweep(lambda x, _: basin(x), -5.0, budget=9)
    best = fit.optimum(points).best_rate
    assert {best - 1, best - 0.5, best, best + 0.5, best + 1} <= {point.log2_lr for point in points}


def test_search_halves_towards_a_divergence_beside_the_best_rate():
    fitted = fit.optimum(sweep(lambda x, _: None if x > -3.8 else basin(x), -3.5, budget=9))
    assert fitted.interior
    assert fitted.log2_lr == pytest.approx(-4.3, abs=0.09)


def test_search_goes_down_when_everything_diverges():
    assert next_rates({-1.0: None, 0.0: None, 1.0: None}, 0.0, 7) == (-2.0,)
