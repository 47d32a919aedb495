"""Each scheme's formula, what it must leave alone, and where it writes."""

import numpy as np
import pytest
import torch

import surefoot
from combinations import combinations
from comparisons import advanced
from surefoot.geometry import RMS, Frobenius, HeadRMS, MeanOperator, RowRMS, Spectral
from surefoot.momentum import Momentum
from surefoot.scaling import Constant
from surefoot.stabilise import (
    ColumnSphere,
    DecayedPostClip,
    Free,
    Normalise,
    PostClip,
    PreDecay,
    Rescale,
    RowSphere,
    SpectralSphere,
    Stiefel,
    WeightDecay,
)

from . import oracle
from .cases import Case
from .inputs import exact, gaussian
from .schemes import BOUNDED, DECAYING, MANIFOLDS, RADIUS, SPHERES, all_geometries, all_schemes, case_of, fitted, moved


def formulas(case: Case, w: np.ndarray, d: np.ndarray, eta: float) -> dict[object, np.ndarray]:
    """The next weight of each scheme for one block, from spec section 6 word for word."""
    rate, stepped = 1 / RADIUS, w - eta * d
    remaining = 1 - min(1.0, eta * rate)
    own = float(case.norm(w))
    shrunk = case.project(w, remaining * own) - eta * d
    sphere = float(lp_frobenius(stepped))
    return {
        Free(): stepped,
        WeightDecay(rate): remaining * w - eta * d,
        PostClip(RADIUS): case.project(stepped, RADIUS),
        DecayedPostClip(rate, Constant(), RADIUS): case.project(remaining * w - eta * d, RADIUS),
        PreDecay(rate): case.project(shrunk, max(own, RADIUS)),
        Rescale(RADIUS): stepped * min(1.0, RADIUS / float(case.norm(stepped))),
        Normalise(RADIUS): stepped * RADIUS / float(case.norm(stepped)),
        Normalise(RADIUS, Frobenius()): stepped * RADIUS / sphere,
        Normalise(): stepped * own / float(case.norm(stepped)),
    }


def lp_frobenius(w: np.ndarray) -> float:
    return float(np.linalg.norm(w)) / w.shape[0] ** 0.5


ROWS = MeanOperator(3.0, float("inf"))  # whose projection is found by iteration


@combinations(
    lambda geometry, eta: geometry != ROWS or eta == 6.0,
    geometry=[Spectral("svd"), RowRMS(), HeadRMS(), ROWS],
    eta=[0.1, 1.0, 6.0],
)
def test_next_weight_is_the_formula(geometry, eta):
    """eta = 6 has eta*rate = 3: decay is capped at 1 and never flips a weight's sign."""
    case = case_of(Spectral() if isinstance(geometry, Spectral) else geometry)
    for seed, size in enumerate((0.2, 5.0)):
        w, m = size * gaussian((6, 4), seed, torch.float64), gaussian((6, 4), 50 + seed, torch.float64)
        d = exact(geometry.direction(m))
        assert float((exact(m) * d).sum()) == pytest.approx(float(case.dual(exact(m))))
        for scheme, truth in formulas(case, exact(w), d, eta).items():
            for number in (eta, torch.full((1, 1), eta, dtype=torch.float64)):
                new, _ = advanced(scheme, w, m, number, geometry)
                np.testing.assert_allclose(exact(new), truth, atol=1e-7, err_msg=f"{scheme} {size}")


def test_pre_decay_under_rms_is_weight_decay():
    start = gaussian((5, 12), 1, torch.float64) * torch.tensor([0.1, 0.5, 1.0, 3.0, 10.0])[:, None]
    decayed, clipped = start.clone(), start.clone()
    for step in range(100):
        m = gaussian((5, 12), 100 + step, torch.float64)
        decayed, _ = advanced(WeightDecay(0.5), decayed, m, 0.1, RMS())
        clipped, _ = advanced(PreDecay(0.5), clipped, m, 0.1, RMS())
        torch.testing.assert_close(clipped, decayed, rtol=1e-6, atol=1e-6)


@all_schemes
@all_geometries
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eta_zero_is_bit_exact(scheme, geometry, dtype):
    """Even far outside the ball, with denormals in the weight; as a number and as a tensor."""
    shape = (3, 6, 4) if geometry.ndim == 2 else (3, 24)
    w = (gaussian(shape, 1) * 100).to(dtype)
    w.view(-1)[:2] = torch.tensor([1e-40, -1e-40], dtype=dtype)
    m = gaussian(shape, 2).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for eta in (0.0, torch.tensor(0.0), torch.zeros((3, *(1,) * geometry.ndim), dtype=dtype)):
        new, _ = moved(scheme, w, m, eta, geometry)
        assert new.dtype == w.dtype
        assert torch.equal(new.view(bits), w.view(bits))
    eta = torch.tensor([0.1, 0.0, 0.1], dtype=dtype)[(..., *(None,) * geometry.ndim)]
    mixed, _ = moved(scheme, w, m, eta, geometry)
    assert torch.equal(mixed[1].view(bits), w[1].view(bits))
    assert not torch.equal(mixed[0], w[0])
    assert not torch.equal(mixed[2], w[2])


@all_schemes
def test_eta_zero_keeps_the_sign_of_zero(scheme):
    """-0.0 - 0*d would be +0.0 where d < 0: equal in value, not in bits."""
    w = torch.full((6, 4), -0.0)
    for eta in (0.0, torch.zeros(6, 1)):
        new, _ = moved(scheme, w, gaussian((6, 4), 2), eta, Spectral())
        assert torch.signbit(new).all()


@pytest.mark.parametrize("scheme", [Free(), *BOUNDED, *DECAYING], ids=repr)
@pytest.mark.parametrize("geometry", [RowRMS(), HeadRMS()], ids=repr)
def test_rows_with_eta_zero_stay(scheme, geometry):
    """An absent token's row, inside the ball: bit for bit, while its neighbours move."""
    w, m = gaussian((2, 6, 4), 1) * 0.05, gaussian((2, 6, 4), 2)
    eta = torch.full((2, 6, 1), 0.1)
    eta[:, 1::2] = 0
    new, _ = moved(scheme, w, m, eta, geometry)
    assert torch.equal(new[:, 1::2], w[:, 1::2])
    assert (new[:, ::2] != w[:, ::2]).any(-1).all()
    assert torch.isfinite(new).all()


@all_schemes
@all_geometries
def test_zero_weight_zero_gradient_and_empty(scheme, geometry):
    shape = (2, 6, 4) if geometry.ndim == 2 else (2, 24)
    zero, m = torch.zeros(shape), gaussian(shape, 1)
    scheme, sphere = fitted(scheme, geometry), scheme in (*SPHERES, *MANIFOLDS)
    still, _ = advanced(scheme, zero, zero, 0.1, geometry)
    assert torch.equal(still, zero)
    grown, _ = advanced(scheme, zero, m, 0.1, geometry)
    assert torch.isfinite(grown).all()
    if sphere:
        assert torch.equal(grown, zero)  # a zero weight has no place on a sphere
    else:
        torch.testing.assert_close(grown, -0.1 * geometry.direction(m))
    for empty in ((0, 4), (4, 0), (2, 0, 3)):
        new, _ = advanced(scheme, torch.zeros(empty), torch.zeros(empty), 0.1, geometry)
        assert new.shape == empty


@all_schemes
@all_geometries
def test_arguments_are_untouched_and_results_are_new(scheme, geometry):
    """All but the weight, which is donated."""
    shape = (3, 6, 4) if geometry.ndim == 2 else (3, 24)
    w, m = gaussian(shape, 1), gaussian(shape, 2)
    some, every = (torch.tensor(x)[(..., *(None,) * geometry.ndim)] for x in ([0.0, 0.1, 5.0], [0.1, 0.1, 5.0]))
    before = [x.clone() for x in (m, some, every)]
    for eta in (some, every, 0.0, 0.1):
        fitted(scheme, geometry).move(w.clone(), m, eta, geometry)[0].fill_(7)
    assert all(torch.equal(x, y) for x, y in zip(before, (m, some, every), strict=True))


@all_geometries
@pytest.mark.parametrize(("scheme", "remaining"), [(Free(), 1.0), (WeightDecay(0.5), 0.95)])
def test_where_everything_moves_the_weight_is_updated_in_its_place(scheme, remaining, geometry):
    shape = (3, 6, 4) if geometry.ndim == 2 else (3, 24)
    w, m = gaussian(shape, 1), gaussian(shape, 2)
    truth = remaining * w - 0.1 * geometry.direction(m)
    for eta in (0.1, torch.full((1,) * w.ndim, 0.1)):
        place = w.clone()
        new, _ = scheme.move(place, geometry.direction(m), eta, geometry)
        assert new.data_ptr() == place.data_ptr()
        torch.testing.assert_close(new, truth)


def test_where_all_problems_are_active_the_momentum_is_updated_in_its_place():
    old, g = gaussian((3, 6, 4), 1), gaussian((3, 6, 4), 2)
    for lookahead, truth in ((None, 0.9 * old + 0.1 * g), (0.5, 0.5 * old + 0.5 * g)):
        place = old.clone()
        state, smoothed = Momentum(0.9, lookahead)({"momentum": place}, g, 1.0)
        assert state["momentum"].data_ptr() == place.data_ptr()
        torch.testing.assert_close(place, 0.9 * old + 0.1 * g)
        torch.testing.assert_close(smoothed, truth)


def test_post_clip_touches_only_what_is_outside():
    """Minimal modification: singular directions below r are those of the plain step."""
    w = torch.tensor(oracle.polar(exact(gaussian((6, 4), 1)))) * torch.tensor([0.5, 0.5, 0.5, 5.0])
    m = torch.zeros(6, 4, dtype=torch.float64)
    clipped, _ = advanced(PostClip(1.0), w, m, 0.1, Spectral())
    assert torch.allclose(clipped[:, :3], w[:, :3], atol=1e-12)
    assert float(clipped[:, 3].norm()) == pytest.approx((6 / 4) ** 0.5)


@pytest.mark.parametrize(
    "scheme", [WeightDecay, PostClip, PreDecay, Rescale, Normalise, SpectralSphere, RowSphere, ColumnSphere, Stiefel]
)
def test_bad_numbers_are_refused(scheme):
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            scheme(value)


def test_public_names():
    for name in ("Free", "WeightDecay", "PostClip", "PreDecay", "Rescale", "Normalise"):
        assert getattr(surefoot, name).__name__ == name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@all_geometries
@all_schemes
def test_a_weight_that_is_not_finite_is_no_error_and_no_matter_to_the_others(scheme, geometry, bad):
    """LAPACK fails on such a matrix, and with it the batch."""
    others = [0, 2]
    for size in [(2, 3), (4, 6), (6, 4), (40, 64)]:
        shape = (3, 1, *size) if geometry.ndim == 2 else (3, 1, size[0] * size[1])
        w, m, eta = gaussian(shape, 1), gaussian(shape, 2), torch.full((3, *(1,) * (len(shape) - 1)), 0.1)
        cache = scheme.init_state(w, geometry, geometry)
        w[1].view(-1)[0] = bad
        new, _ = moved(scheme, w, m, eta, geometry, cache)
        kept = None if cache is None else {name: x[others] for name, x in cache.items()}
        alone, _ = moved(scheme, w[others], m[others], eta[others], geometry, kept)
        torch.testing.assert_close(new[others], alone)
        assert bad == torch.inf or new[1].isnan().any()  # a clamp ends an infinity
