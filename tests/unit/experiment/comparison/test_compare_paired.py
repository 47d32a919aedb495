"""Paired differences against scipy's own t test; when a curve is at a target."""

import numpy as np
import pytest
from scipy.stats import ttest_rel

from surefoot.experiment.sweep import compare as summary
from surefoot.experiment.sweep import fit


@pytest.mark.parametrize("n", [3, 4, 10])
@pytest.mark.parametrize("shift", [0.0, 0.05, -2.0])
def test_difference_interval_and_p_are_those_of_scipy(n, shift):
    noise = np.random.default_rng(n).normal(size=(2, n))
    ours, theirs = 2 + noise[0] + 0.1 * noise[1] + shift, 2 + noise[0]
    expected = ttest_rel(ours, theirs)
    losses, others = (dict(enumerate(values.tolist(), start=1)) for values in (ours, theirs))
    shuffled = dict(reversed(others.items()))  # seeds pair, not places
    estimate = fit.difference(losses, shuffled)
    assert summary.p_value(estimate) == pytest.approx(expected.pvalue, rel=1e-9)
    assert estimate.value == pytest.approx(np.mean(ours - theirs))
    assert estimate.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_two_seeds_have_neither_interval_nor_p():
    assert summary.p_value(fit.difference({1: 2.0, 2: 2.1, 3: 2.0}, {1: 1.0, 2: 1.0})) is None
    assert fit.mean({1: 2.0, 2: 3.0}) == fit.Estimate(2.5, None, 2)
    assert fit.mean({}).value is None


def test_differences_without_spread():
    ours = {1: 2.0, 2: 2.5, 3: 3.0}
    assert summary.p_value(fit.difference(ours, ours)) == 1.0
    assert summary.p_value(fit.difference(ours, {seed: loss - 0.5 for seed, loss in ours.items()})) == 0.0


def curve(*losses):
    steps = [10 * i for i in range(len(losses))]
    return {"step": steps, "val_loss": list(losses), "seconds": [0.1 * step**2 for step in steps]}


def test_the_mean_curve_and_its_band():
    mean = summary.mean_curve([curve(4.0, 3.0, 2.0), curve(4.0, None, 2.5)])
    assert mean == {
        "step": [0, 10, 20],
        "val_loss": [4.0, None, 2.25],
        "lowest": [4.0, None, 2.0],
        "highest": [4.0, None, 2.5],
        "seconds": [0.0, 10.0, 40.0],
    }


@pytest.mark.parametrize(
    ("losses", "target", "expected"),
    [
        ((4.0, 3.0, 2.0), 2.25, (17.5, 32.5)),
        ((4.0, 3.0, 2.0), 2.0, (20.0, 40.0)),  # the baseline at its own final loss
        ((4.0, 3.0, 2.0), 3.0, (10.0, 10.0)),
        ((4.0, 3.0, 2.0), 1.99, None),
        ((4.0, 3.0, 2.0), 5.0, (0.0, 0.0)),
        ((4.0, 2.0, 3.0, 1.0), 2.5, (7.5, 7.5)),  # the first time
        ((4.0, None, 2.0), 2.5, (20.0, 40.0)),  # nothing to interpolate from
        ((4.0, None), 2.5, None),
        ((4.0, 4.0, 3.0), 4.0, (0.0, 0.0)),
    ],
)
def test_when_a_curve_is_at_a_target(losses, target, expected):
    reached = summary.reached(curve(*losses), target)
    assert reached == (None if expected is None else pytest.approx(expected))
