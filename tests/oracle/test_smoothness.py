"""The smoothness exponent of operator norms: curvature along steps, and the inequality that it comes from."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf

inf = math.inf
PAIRS = ((1, 1), (1, 1.5), (1, 2), (1, 4), (1, inf), (1.5, inf), (2, inf), (2, 2))


def mean(x: np.ndarray, p: float) -> float:
    return float(np.abs(x).max() if math.isinf(p) else (np.abs(x) ** p).mean() ** (1 / p))


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_curvature_along_a_step_grows_as_the_exponent_says(p, q):
    """Second derivative of `<c, s(W x)>`, s'' = 1, along D of norm 1: `<c, (D x)^2>`, at the worst c of norm 1."""
    norm = sf.MeanOperator(p, q)
    slopes = []
    for width in (16, 256):
        one, all_ = torch.zeros(width, width, dtype=torch.float64), torch.ones(width, width, dtype=torch.float64)
        one[0] = 1
        largest = max(mean((norm.direction(g).sum(1) ** 2).numpy(), p) for g in (one, all_))
        slopes.append(math.log2(largest))
    assert (slopes[1] - slopes[0]) / 4 == pytest.approx(norm.smoothness_exponent, abs=1e-3)
    assert norm.smoothness_exponent == max(0, 2 / q - 1 / p)


@pytest.mark.parametrize(("p", "q"), [*PAIRS, (inf, inf)])
def test_hoelders_inequality_of_products_entry_by_entry(p, q):
    """`mean_p(x * y) <= n**max(0, 2/q - 1/p) mean_q(x) mean_q(y)`, and no smaller power of n will do."""
    power = sf.MeanOperator(p, q).smoothness_exponent
    generator = np.random.default_rng(0)
    for n in (1, 2, 7, 100):
        hot = np.eye(n)[0]
        attained = []
        pairs = [(generator.standard_normal(n), generator.standard_normal(n)) for _ in range(5)]
        for x, y in [*pairs, (hot, hot), (np.ones(n), np.ones(n)), (hot + 1e-3, hot), (1e-30 * hot, 1e30 * np.ones(n))]:
            bound = n**power * mean(x, q) * mean(y, q)
            assert mean(x * y, p) <= bound * (1 + 1e-12)
            attained.append(mean(x * y, p) / bound)
        assert max(attained) == pytest.approx(1, rel=1e-9)


def test_the_spectral_norm_has_the_exponent_of_2_2_and_others_none():
    assert sf.Spectral().smoothness_exponent == sf.MeanOperator(2, 2).smoothness_exponent == 0.5
    assert sf.TransposedConvSpectral(stride=2).smoothness_exponent == 0.5
    assert sf.MeanOperator(1, 1.5).smoothness_exponent == pytest.approx(1 / 3)
    assert not hasattr(sf.RowRMS(), "smoothness_exponent")
    plan = sf.Plan.of(nn.Linear(4, 4), sf.recipes.moga_column(1.5))
    assert plan.smoothness() == {"MeanOperator(p=1, q=1.5)": pytest.approx(1 / 3)}
    assert "MeanOperator(p=1, q=1.5): layers compose at every width, smoothness grows as width**0.333333" in str(plan)
