"""Steps along manifolds: tangent, of norm 1 at most, and as good as the dual problem, minimised by scipy, allows.

Any dual value is an upper bound of the best `<m, d>` of a tangent step, however well the dual was minimised.
"""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from combinations import combinations
from laws.inputs import exact, gaussian
from surefoot.geometry import Frobenius, HeadRMS, MeanOperator, RowMean, RowRMS, Spectral
from surefoot.geometry.adaptive import RMSScaled
from surefoot.geometry.base import ChangeBounds, Tangents, dual_norm
from surefoot.geometry.constraints import SameAngles, SameLengths
from surefoot.linalg import tangent
from surefoot.linalg.polar import msign
from surefoot.linalg.tangent import rows_msign, stiefel_msign

from .spectra import best_along_rows, lowest, nuclear, unit_rows

SHAPES = {
    "square": (8, 8),
    "odd": (7, 7),
    "tall": (10, 6),
    "taller": (17, 4),
    "wide": (5, 9),
    "row": (1, 6),
    "batched": (2, 3, 9, 5),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def orthogonal(shape, seed=0):
    u, _, v = torch.linalg.svd(gaussian(shape, seed, torch.float64), full_matrices=False)
    return u @ v


def blocks(*tensors):
    """The matrices of a batch, float64."""
    return zip(*(exact(x).reshape(-1, *x.shape[-2:]) for x in tensors), strict=True)


def best_along_orthogonal(m, w):
    """`min |m + w S|_*` over symmetric S, for tall w."""
    if m.shape[0] < m.shape[1]:
        return best_along_orthogonal(m.T, w.T)
    upper = np.triu_indices(m.shape[1])

    def value(x, smoothing):
        s = np.zeros((m.shape[1],) * 2)
        s[upper] = x
        size, gradient = nuclear(m + w @ (s + s.T), smoothing)
        inner = w.T @ gradient
        return size, (inner + inner.T)[upper]

    return lowest(value, len(upper[0]))


def gradient(kind, shape, w, seed=5):
    m = gaussian(shape, seed, torch.float64)
    if kind == "leaning":
        return m + 3 * w * shape[-1] ** 0.5
    if kind == "low rank":
        return m[..., :1] * m[..., :1, :] + 0.2 * w
    if kind == "decaying":
        u, s, v = torch.linalg.svd(m, full_matrices=False)
        return (u * (1 + torch.arange(s.shape[-1])) ** -1.5) @ v + 0.05 * w
    return m


each_problem = combinations(
    lambda shape, kind, dtype: dtype == torch.float32 and (kind in ("dense", "low rank") or shape == "tall"),
    shape=list(SHAPES),
    kind=["dense", "leaning", "low rank", "decaying"],
    dtype=[torch.float32, torch.float64],
)


@each_problem
def test_steps_along_orthogonal_matrices_are_the_best(shape, kind, dtype):
    shape = SHAPES[shape]
    w = orthogonal(shape)
    m = gradient(kind, shape, w)
    for d, a, x in blocks(stiefel_msign(m.to(dtype), w.to(dtype)), m, w):
        inner = d.T @ x if shape[-2] >= shape[-1] else d @ x.T
        assert np.abs(inner + inner.T).max() <= 1e-4
        assert np.linalg.norm(d, 2) <= 1.001
        assert (d * a).sum() >= 0.99 * best_along_orthogonal(a, x) - 1e-6


@pytest.mark.parametrize("shape", [(8, 8), (7, 7), (10, 6), (17, 4), (5, 9)])
def test_the_closed_form_is_exact(shape):
    w = orthogonal(shape)
    m = gradient("dense", shape, w)
    d = stiefel_msign(m, w, "svd")
    assert float((d * m).sum()) == pytest.approx(best_along_orthogonal(exact(m), exact(w)), rel=1e-6)
    plain = SameAngles(1.0).project(w, msign(m, "svd"))  # a step in the plain direction, without its normal part
    assert float((plain * m).sum() / torch.linalg.matrix_norm(plain, 2)) < 0.99 * float((d * m).sum())


@each_problem
def test_steps_along_rows_are_within_three_percent_of_the_best(shape, kind, dtype):
    shape = SHAPES[shape]
    w = gaussian(shape, 1, torch.float64)
    m, unit = gradient(kind, shape, w / shape[-1] ** 0.5), unit_rows(w)
    d, _ = rows_msign(m.to(dtype), unit.to(dtype), torch.zeros(shape[:-1], dtype=dtype))
    for x, a, u in blocks(d, m, unit):
        assert np.abs((x * u).sum(1)).max() <= 1e-4
        assert np.linalg.norm(x, 2) <= 1.001
        assert (x * a).sum() >= 0.97 * best_along_rows(a, u) - 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_steps_do_not_depend_on_the_gradients_scale(scale):
    w = orthogonal((9, 6)).float()
    m, unit, zero = gaussian((9, 6), 2), unit_rows(w), torch.zeros(9)
    torch.testing.assert_close(stiefel_msign(m * scale, w), stiefel_msign(m, w), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows_msign(m * scale, unit, zero)[0], rows_msign(m, unit, zero)[0], atol=1e-4, rtol=1e-3)


@each_shape
def test_without_a_tangent_part_there_is_no_step(shape):
    """Rounding is not blown up to a step of norm 1."""
    for seed in range(5):
        w, unit = orthogonal(shape, seed).float(), unit_rows(gaussian(shape, seed))
        normal = gaussian(shape[:-2] + (min(shape[-2:]),) * 2, seed + 9)
        normal = normal + normal.mT
        for m in (torch.zeros(shape), 3e-20 * (w @ normal if shape[-2] >= shape[-1] else normal @ w)):
            assert not stiefel_msign(m, w).any()
        for m in (torch.zeros(shape), unit * gaussian((*shape[:-1], 1), seed + 2)):
            assert not rows_msign(m, unit, torch.ones(shape[:-1]))[0].any()


def test_rows_of_zeros_are_free_and_others_are_not():
    unit = unit_rows(gaussian((6, 9), 1, torch.float64))
    unit[2] = 0
    for turned in (False, True):  # wide and tall
        rows = torch.cat([unit, unit_rows(gaussian((12, 9), 2, torch.float64))]) if turned else unit
        m = gaussian(rows.shape, 3, torch.float64)
        d, _ = rows_msign(m, rows, torch.zeros(len(rows), dtype=torch.float64))
        assert float((d * rows).sum(1).abs().max()) <= 1e-9
        assert float((d * m).sum()) >= 0.97 * best_along_rows(exact(m), exact(rows))


def test_empty_matrices_batches_and_arguments():
    for shape in ((0, 4), (4, 0), (0, 3, 4)):
        m = torch.zeros(shape)
        assert stiefel_msign(m, m).shape == rows_msign(m, m, m.new_zeros(shape[:-1]))[0].shape == shape
    w = orthogonal((4, 9, 6)).float()
    m, unit = gaussian((4, 9, 6), 1), unit_rows(w)
    m[2] = 0
    before = [x.clone() for x in (m, w, unit)]
    turned = stiefel_msign(m, w)
    together, x = rows_msign(m, unit, torch.zeros(4, 9))
    for i in range(4):
        torch.testing.assert_close(turned[i], stiefel_msign(m[i], w[i]), atol=1e-3, rtol=1e-3)
        alone, _ = rows_msign(m[i], unit[i], torch.zeros(9))
        assert float((together[i] * m[i]).sum()) == pytest.approx(float((alone * m[i]).sum()), rel=0.02)
    assert x.shape == (4, 9)
    assert all(torch.equal(a, b) for a, b in zip(before, (m, w, unit), strict=True))


def test_from_the_previous_multipliers_fewer_iterations_are_needed(monkeypatch):
    calls = []
    monkeypatch.setattr(tangent, "msign", lambda *args: calls.append(0) or msign(*args))
    x, counts, unit = torch.zeros(24), [], unit_rows(gaussian((24, 24), 1))
    for step in range(8):
        calls.clear()
        _, x = rows_msign(gaussian((24, 24), 2) + 0.05 * gaussian((24, 24), 100 + step), unit, x)
        counts.append(len(calls))
    assert counts[0] >= 1.5 * np.mean(counts[1:])


ROWS, COLUMNS = SameLengths(-1), SameLengths(-2)
CLOSED = [
    (RowRMS(), ROWS),
    (HeadRMS(), ROWS),
    (RowMean(3.0), ROWS),
    (RowMean(math.inf), ROWS),
    (RowMean(1.0), ROWS),
    (MeanOperator(1.5, math.inf), ROWS),
    (MeanOperator(3.0, math.inf), ROWS),
    (MeanOperator(1.0, math.inf), ROWS),
    (MeanOperator(1.0, math.inf), COLUMNS),
    (MeanOperator(1.0, 2.0), COLUMNS),
    (MeanOperator(1.0, 3.0), COLUMNS),
]
"""Norms of which each vector has a problem of its own."""


def best_along_vectors(geometry, constraint, m, unit):
    """The sum over vectors of `min_x dual(m_i + x u_i)`, the dual norm being the geometry's own."""

    def dual(x):
        return float(ChangeBounds.of(geometry).dual(torch.tensor(x)))

    total = 0.0
    for i in range(m.shape[-3 - constraint.dim]):
        at = (i, slice(None)) if constraint.dim == -1 else (slice(None), i)

        def value(x, at=at):
            one = np.zeros_like(m)
            one[at] = m[at] + x * unit[at]
            return dual(one)

        total += minimize_scalar(value, bounds=(-20, 20), method="bounded", options={"xatol": 1e-11}).fun
    return total


@pytest.mark.parametrize(("geometry", "constraint"), CLOSED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_under_norms_of_vectors_steps_along_them_are_the_best(geometry, constraint, dtype):
    w, m = gaussian((5, 6), 1, torch.float64), gaussian((5, 6), 2, torch.float64)
    m = m + w
    m[1], m[:, 1] = 2 * w[1], 2 * w[:, 1]
    d, _ = Tangents.of(geometry).tangent(w.to(dtype), m.to(dtype), constraint, {})
    assert d.dtype == dtype
    d, unit = d.double(), constraint.unit(w)
    assert float((d * unit).sum(constraint.dim).abs().max()) <= 1e-5
    assert float(geometry.norm(d)) <= 1 + 1e-5
    best = best_along_vectors(geometry, constraint, exact(m), exact(unit))
    assert float((d * m).sum()) == pytest.approx(best, rel=1e-4)


def best_across(m, unit):
    """`min` over x of the sum of the rows' lengths of `m + u diag(x)`."""

    def value(x, smoothing):
        moved = m + x * unit
        sizes = np.hypot(np.linalg.norm(moved, axis=1, keepdims=True), smoothing)
        return sizes.sum(), (moved / sizes * unit).sum(0)

    return lowest(value, m.shape[1])


@pytest.mark.parametrize("geometry", [RowRMS(), HeadRMS(), MeanOperator(1.0, 2.0)], ids=repr)
def test_steps_across_the_vectors_of_the_norm_are_within_three_percent(geometry):
    rows = isinstance(geometry, MeanOperator)
    for seed in range(4):
        w, m = gaussian((7, 5), seed, torch.float64), gaussian((7, 5), seed + 50, torch.float64)
        constraint = ROWS if rows else COLUMNS
        unit = constraint.unit(w)
        d, _ = Tangents.of(geometry).tangent(w, m, constraint, {})
        assert float((d * unit).sum(constraint.dim).abs().max()) <= 1e-9
        assert 0.97 <= float(geometry.norm(d)) <= 1 + 1e-9
        one = geometry.norm(m) / m.norm(dim=-2 if rows else -1).max()  # the norm of a vector of length 1
        best = best_across(exact(m.mT), exact(unit.mT)) if rows else best_across(exact(m), exact(unit))
        assert float((d * m).sum() * one) >= 0.97 * best


@pytest.mark.parametrize(
    "geometry", [Frobenius(), RowRMS(), MeanOperator(3.0, math.inf), MeanOperator(1.0, 3.0)], ids=repr
)
@pytest.mark.parametrize("constraint", [ROWS, COLUMNS, SameAngles(0.5)], ids=repr)
def test_every_pair_has_a_tangent_step_of_norm_one_that_climbs(geometry, constraint):
    w, m = 0.5 * orthogonal((7, 5)), gaussian((7, 5), 1, torch.float64)
    d, _ = (steps := Tangents.of(geometry)).tangent(w, m, constraint, steps.init_tangent(w, constraint))
    torch.testing.assert_close(constraint.project(w, d), d, atol=1e-6, rtol=0)
    assert float(geometry.norm(d)) <= 1 + 1e-6
    climb, best = float((d * m).sum()), float(dual_norm(geometry, constraint.project(w, m)))
    assert climb == pytest.approx(best) if geometry == Frobenius() else climb >= 0.4 * best


@pytest.mark.parametrize("constraint", [ROWS, COLUMNS, SameAngles(0.5)], ids=repr)
def test_a_direction_that_was_taken_before_keeps_its_length(constraint):
    w, m = 0.5 * orthogonal((7, 5)), 0.01 * gaussian((7, 5), 1, torch.float64)
    once, twice = (RMSScaled(RowRMS()).tangent(w, factor * m, constraint, {})[0] for factor in (1, 2))
    torch.testing.assert_close(twice, 2 * once)
    torch.testing.assert_close(once, constraint.project(w, m))


def test_under_the_spectral_norm_directions_carry_its_unit():
    for constraint in (ROWS, COLUMNS, SameAngles(0.5)):
        w, m = 0.5 * orthogonal((8, 32)).float(), gaussian((8, 32), 1)
        d, _ = Spectral().tangent(w, m, constraint, Spectral().init_tangent(w, constraint))
        assert 0.95 <= float(Spectral().norm(d)) <= 1.001
        torch.testing.assert_close(constraint.project(w, d), d, atol=1e-4, rtol=0)
