"""The laws of a projection: feasible, nearest, idempotent, and still inside the ball; against float64 numpy."""

import numpy as np
import pytest
import torch

import surefoot as sf
from combinations import combinations

from .cases import CASES
from .inputs import TOLERANCE, exact, gaussian, inner
from .trials import IN_EVERY_DTYPE, all_cases, cases_and_dtypes, expand, feasible_points, radii, trials


@cases_and_dtypes
def test_projection_is_feasible_and_nearest(case, dtype):
    """<w - P(w), z - P(w)> <= 0 for all feasible z; for the worst it is `r dual(w - P(w)) - <w - P(w), P(w)>`."""
    for label, w in trials(case, dtype):
        both = torch.cat([w, w])
        x = exact(both)
        share = np.repeat([0.5, 0.01], len(w)).reshape(-1, *(1,) * (w.ndim - case.ndim - 1))
        radius, limit = radii(case, both, share)
        projected, _ = case.geometry.project(both, limit)
        assert projected.dtype == dtype, label
        assert projected.shape == both.shape, label
        p = exact(projected)
        assert (case.norm(p) <= radius * (1 + TOLERANCE[dtype])).all(), label
        worst = radius * case.dual(x - p) - inner(x - p, p, case.ndim)
        allowed = TOLERANCE[dtype] * radius * case.dual(np.abs(x))
        assert (worst <= allowed).all(), (label, worst / allowed)
        for z in feasible_points(case, x.shape) if dtype != torch.bfloat16 else ():
            gain = inner(x - p, expand(radius, case.ndim) * z - p, case.ndim)
            assert (gain <= allowed).all(), label


@all_cases
def test_projection_agrees_with_the_independent_one(case):
    for shape in ((3, 6, 3), (3, 2, 5)) if case.ndim == 2 else ((3, 7),):
        w = gaussian(shape, 11, torch.float64)
        radius, limit = radii(case, w, np.array([0.9, 0.3, 0.01]))
        projected, _ = case.geometry.project(w, limit)
        for block, number, truth in zip(projected, radius, w, strict=True):
            np.testing.assert_allclose(exact(block), case.project(exact(truth), float(number)), atol=2e-9)


@combinations(lambda case: case.name in IN_EVERY_DTYPE, case=CASES)
def test_projection_is_idempotent(case):
    for label, w in trials(case, torch.float32):
        _, limit = radii(case, w, 1 / 3)
        once, _ = case.geometry.project(w, limit)
        twice, _ = case.geometry.project(once, limit)
        top = np.abs(exact(once)).max(axis=tuple(range(-case.ndim, 0)), keepdims=True)
        assert (np.abs(exact(twice) - exact(once)) <= TOLERANCE[torch.float32] * top).all(), label


@cases_and_dtypes
def test_inside_the_ball_nothing_moves(case, dtype):
    for label, w in trials(case, dtype):
        for limit in (radii(case, w, 1.01)[1], 3e38 if dtype == torch.float32 else 1e60):
            stays, _ = case.geometry.project(w, limit)
            assert torch.equal(stays, w), label


@all_cases
def test_projection_takes_a_radius_per_block(case):
    shape = (3, 4, 5) if case.ndim == 2 else (3, 5)
    w = gaussian(shape, 2, torch.float64)
    shares = torch.tensor([2.0, 0.5, 0.0], dtype=torch.float64)[(..., *(None,) * case.ndim)]
    _, norms = radii(case, w, 1.0)
    together, _ = case.geometry.project(w, shares * norms)
    assert torch.equal(together[0], w[0])
    assert not together[2].any()
    alone, _ = case.geometry.project(w[1], 0.5 * float(norms[1]))
    torch.testing.assert_close(together[1], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("start", [1e13, 1e16, 1e30])
@pytest.mark.parametrize("radius", [0.01, 1.0])
def test_a_projection_onto_a_sum_reaches_the_ball_from_far_away(start, radius):
    """Sums of numbers of that size have no room for the radius."""
    for norm in (sf.geometry.RowMean(1.0), sf.MeanOperator(float("inf"), float("inf"))):
        w = torch.full((1, 4, 64), start)
        w[..., 0] *= 1.5
        there, _ = norm.project(w, torch.tensor(radius))
        assert float(norm.norm(there.double()).amax()) == pytest.approx(radius, rel=1e-6)
