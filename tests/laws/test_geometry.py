"""The laws of a geometry's norm, direction and bounds, on every case, shape, family and dtype."""

import numpy as np
import pytest
import torch

from surefoot.geometry import dual_norm
from surefoot.geometry.base import NormBounds

from .inputs import EMPTY, SHAPES, TOLERANCE, exact, gaussian, generator, inner
from .trials import all_cases, cases_and_dtypes, feasible_points, radii, trials


@cases_and_dtypes
def test_norm_is_the_independent_norm(case, dtype):
    for label, w in trials(case, dtype):
        truth, measured = case.norm(exact(w)), exact(case.geometry.norm(w))
        assert measured.shape == truth.shape, label
        np.testing.assert_allclose(measured, truth, rtol=1e-6, err_msg=label)


@pytest.mark.parametrize(
    ("p", "q"), [(1, 1), (1, 2), (1, 4), (1, np.inf), (1.5, np.inf), (2, np.inf), (np.inf, np.inf), (2, 2)]
)
def test_closed_form_is_the_largest_amplification(p, q):
    """The operator norms by their definition: the worst input of p-mean 1 has an output of that q-mean."""
    from surefoot.geometry import MeanOperator

    from . import oracle

    for shape in ((4, 3), (3, 5), (1, 4), (4, 1)):
        w = generator(3, *shape).standard_normal(shape)
        closed = float(MeanOperator(p, q).norm(torch.tensor(w)))
        assert closed == pytest.approx(oracle.amplification(w, p, q, generator(4)), rel=1e-9)


@cases_and_dtypes
def test_unit(case, dtype):
    for label, g in trials(case, dtype):
        d = case.geometry.direction(g)
        assert d.shape == g.shape, label
        assert d.dtype == dtype, label
        norm = case.norm(exact(d))
        assert (norm <= 1 + case.overshoot + TOLERANCE[dtype]).all(), (label, norm)
        assert (norm >= 1 - case.shortfall - TOLERANCE[dtype]).all(), (label, norm)


@cases_and_dtypes
def test_dual_identity_hence_maximal(case, dtype):
    """<g, direction(g)> is the dual norm, which no feasible competitor exceeds."""
    for label, g in trials(case, dtype):
        attained = inner(exact(g), exact(case.geometry.direction(g)), case.ndim)
        best = case.dual(exact(g))
        assert (attained >= best * (1 - case.shortfall - TOLERANCE[dtype])).all(), (label, attained / best)
        assert (attained <= best * (1 + case.overshoot + TOLERANCE[dtype])).all(), (label, attained / best)
        np.testing.assert_allclose(exact(dual_norm(case.geometry, g)), best, rtol=2e-5, err_msg=label)


@all_cases
def test_no_competitor_does_better(case):
    """Random and adversarial competitors: directions of nearby gradients, the current one perturbed."""
    for label, g in trials(case, torch.float64):
        x = exact(g)
        attained = inner(x, exact(case.geometry.direction(g)), case.ndim)
        peaks = np.abs(x).max(axis=tuple(range(-case.ndim, 0)), keepdims=True)
        noise = generator(5, *x.shape).standard_normal(x.shape) * peaks
        nearby = [exact(case.geometry.direction(torch.tensor(x + size * noise))) for size in (1e-3, 0.1)]
        slack = 1e-9 + case.shortfall + case.overshoot
        for z in [*feasible_points(case, x.shape), *nearby]:
            assert (inner(x, z, case.ndim) <= attained * (1 + slack)).all(), label


@all_cases
def test_scale_free(case):
    scales = torch.tensor([1.0, 1e-30, 1e-15, 1e15, 1e30])
    for shape in SHAPES[case.ndim]:
        g = gaussian(shape, 4)
        together = torch.stack([g * scale for scale in scales])
        d = case.geometry.direction(together)
        close = {"rtol": 1e-4, "atol": 1e-4 * float(d[0].abs().max())}
        torch.testing.assert_close(d, d[:1].expand_as(d), **close)
        for scaled in together:
            torch.testing.assert_close(case.geometry.direction(scaled), d[0], **close)
        np.testing.assert_allclose(exact(case.geometry.norm(together)), case.norm(exact(together)), rtol=1e-5)
        _, limit = radii(case, together, 0.5)
        back = case.geometry.project(together, limit)[0] / scales.reshape(-1, *(1,) * g.ndim)
        torch.testing.assert_close(back, back[:1].expand_as(back), rtol=1e-4, atol=1e-4 * float(g.abs().max()))


@cases_and_dtypes
def test_zero_safe(case, dtype):
    shapes = [*SHAPES[case.ndim], *EMPTY[case.ndim]]
    for shape in shapes:
        zero = torch.zeros(shape, dtype=dtype)
        assert torch.equal(case.geometry.direction(zero), zero)
        assert torch.equal(case.geometry.project(zero, 1.0)[0], zero)
        assert torch.equal(case.geometry.project(zero, 0.0)[0], zero)
        for number in (
            case.geometry.norm(zero),
            *NormBounds.of(case.geometry).bounds(zero)[:2],
            dual_norm(case.geometry, zero),
        ):
            assert number.shape == shape[: -case.ndim]
            assert not number.any()


@cases_and_dtypes
def test_zero_rows_among_others(case, dtype):
    """A row without a gradient gets no step, and does not disturb its neighbours; nothing is NaN."""
    shape = (2, 5, 4) if case.ndim == 2 else (2, 5)
    for seed, scale in enumerate((1.0, 1e-30, 1e30)):
        g = gaussian(shape, seed, dtype) * scale
        hole = (slice(None), 2) if case.ndim == 2 else (slice(None), slice(1, 2))
        g[hole] = 0
        d = case.geometry.direction(g)
        assert torch.isfinite(d).all()
        assert not d[hole].any()
        assert (case.norm(exact(d)) > 0.9).all()
        p, _ = case.geometry.project(g, 0.25 * float(case.norm(exact(g)).min()))
        assert torch.isfinite(p).all()
        assert not p[hole].any()


@all_cases
def test_a_zero_block_among_others(case):
    shape = (3, 4, 5) if case.ndim == 2 else (3, 5)
    g = gaussian(shape, 9)
    g[1] = 0
    d = case.geometry.direction(g)
    assert not d[1].any()
    assert torch.isfinite(d).all()
    np.testing.assert_allclose(case.norm(exact(d))[[0, 2]], 1, atol=case.shortfall + case.overshoot + 1e-5)


@all_cases
def test_input_is_untouched_and_never_aliased(case):
    """Neither a method nor a write into its result reaches the gradient or the weight."""
    for label, w in trials(case, torch.float32):
        before = w.clone()
        case.geometry.direction(w).fill_(7)
        case.geometry.project(w, radii(case, w, 0.5)[1])[0].fill_(7)
        case.geometry.project(w, 3e38)[0].fill_(7)
        case.geometry.norm(w)
        NormBounds.of(case.geometry).bounds(w)
        dual_norm(case.geometry, w)
        assert torch.equal(w, before), label


@cases_and_dtypes
def test_input_of_any_dtype_is_untouched(case, dtype):
    """Where no conversion makes a copy first, an in-place operation would show."""
    w = gaussian((2, 4, 3) if case.ndim == 2 else (2, 5), 1, dtype)
    before = w.clone()
    case.geometry.direction(w)
    case.geometry.project(w, 0.5 * float(case.norm(exact(w)).min()))
    assert torch.equal(w, before)


@all_cases
def test_batch_is_a_loop(case):
    for shape in ((5, 4, 3), (2, 3, 2, 4)) if case.ndim == 2 else ((4, 3), (2, 3, 4)):
        w = gaussian(shape, 6, torch.float64)
        lead = shape[: -case.ndim]
        radius = 0.6 * float(case.norm(exact(w)).max())
        d, p, n = case.geometry.direction(w), case.geometry.project(w, radius)[0], case.geometry.norm(w)
        for index in np.ndindex(*lead):
            close = {"rtol": 1e-9, "atol": 1e-9}
            torch.testing.assert_close(d[index], case.geometry.direction(w[index]), **close)
            torch.testing.assert_close(p[index], case.geometry.project(w[index], radius)[0], **close)
            torch.testing.assert_close(n[index], case.geometry.norm(w[index]), **close)


@cases_and_dtypes
def test_bounds_enclose_the_truth(case, dtype):
    for label, w in trials(case, dtype):
        lower, upper, _ = NormBounds.of(case.geometry).bounds(w)
        truth = case.norm(exact(w))
        assert (exact(lower) <= truth * (1 + 1e-6)).all(), label
        assert (exact(upper) >= truth * (1 - 1e-6)).all(), label
        assert (exact(upper) <= truth * 1.5).all(), label


@all_cases
def test_strided_views_are_taken_as_they_are(case):
    """A transposed or sliced tensor gives what its contiguous copy gives."""
    base = gaussian((6, 8), 3, torch.float64)
    for view in (base.mT, base[::2, 1::3], base[:, :1], base[:1]):
        radius = 0.5 * float(case.norm(exact(view)).max())
        torch.testing.assert_close(case.geometry.direction(view), case.geometry.direction(view.contiguous()))
        torch.testing.assert_close(
            case.geometry.project(view, radius)[0], case.geometry.project(view.contiguous(), radius)[0]
        )


@all_cases
def test_what_is_not_coupled_is_independent(case):
    """Rows that no problem spans may be stepped apart: the direction of some of them is a part of the direction."""
    rows = -case.ndim
    for label, g in trials(case, torch.float64):
        size = g.shape[rows]
        if rows in case.geometry.couples or size < 2:
            continue
        parts = [case.geometry.direction(part) for part in g.split(size // 2, rows)]
        torch.testing.assert_close(torch.cat(parts, rows), case.geometry.direction(g), msg=label)
