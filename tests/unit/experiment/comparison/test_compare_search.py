"""The search with an exact budget: so many rates for every recipe, whatever their curves look like."""

import math
from itertools import pairwise

import pytest

from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.search import Exact, Own

CENTRE = -4.0


def parabola(rate):
    return 2 + 0.1 * (rate + 4.3) ** 2


CURVES = {
    "a parabola": parabola,
    "a parabola far from the start": lambda rate: 2 + 0.1 * (rate + 6.2) ** 2,
    "all diverged": lambda rate: None,
    "a plateau": lambda rate: 2.0,
    "falling to the left": lambda rate: 2 + 0.1 * rate,
    "falling to the right": lambda rate: 2 - 0.1 * rate,
    "next to divergence": lambda rate: None if rate > -4.1 else 2 - 0.1 * rate,
    "finite at one rate": lambda rate: 2.0 if rate == CENTRE else None,
    "a needle": lambda rate: 2 + abs(rate + 4.3) ** 0.1,
    "noise": lambda rate: 2 + math.sin(1000 * rate),
}


def searched(curve, budget):
    search, means = Exact({"muon": CENTRE}, budget), {}
    while new := search.next("muon", dict(sorted(means.items()))):
        assert len(set(new)) == len(new)
        assert not means.keys() & set(new)
        means |= {rate: curve(rate) for rate in new}
    return means


def found(means):
    return fit.optimum(fit.Point(rate, 0, loss) for rate, loss in means.items())


@pytest.mark.parametrize("budget", [3, 4, 5, 6, 7, 8, 13, 60])
@pytest.mark.parametrize("name", CURVES)
def test_exactly_the_budget_is_spent(name, budget):
    assert len(searched(CURVES[name], budget)) == budget


def test_what_is_left_of_the_budget_goes_between_the_rates_around_the_best():
    few, many = (sorted(searched(parabola, budget)) for budget in (6, 10))
    assert set(few) < set(many)
    assert (few[0], few[-1]) == (many[0], many[-1]) == (-5.5, -3.0)
    gaps = [high - low for low, high in pairwise(many) if high <= -3.5]
    assert gaps == [0.25] * 8
    assert found(searched(parabola, 10)).log2_lr == pytest.approx(-4.3)


@pytest.mark.parametrize(
    ("name", "status", "best"),
    [
        ("all diverged", "no result", None),
        ("a plateau", "low edge", -9.0),
        ("falling to the left", "low edge", -9.0),
        ("falling to the right", "high edge", 1.0),
        ("next to divergence", "next to divergence", -4.25),
    ],
)
def test_a_best_rate_that_is_not_bracketed_is_said_to_lie_at_its_edge(name, status, best):
    optimum = found(searched(CURVES[name], 7))
    assert (optimum.status, optimum.log2_lr) == (status, None)
    assert optimum.best_rate == best


def test_below_a_start_that_diverges_the_search_goes_down():
    assert sorted(searched(CURVES["all diverged"], 7)) == [-9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0]


def test_between_two_diverged_rates_nothing_is_run():
    rates = sorted(rate for rate, loss in searched(CURVES["next to divergence"], 30).items() if loss is None)
    assert rates[-1] == -3.0
    assert all(rate <= -3.5 for rate in rates[:-1])


def test_each_recipe_has_its_own_rates_once():
    own = Own({"muon": (-3.0, -5.5), "adamw": (-6.0,)})
    assert own.next("muon", {}) == (-5.5, -3.0)
    assert own.next("muon", {-5.5: 2.0, -3.0: None}) == ()
