"""Each scheme's promise over 1,000 adversarial steps, its formula, and what it must leave alone."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import surefoot
from surefoot.geometry import RMS, Frobenius, HeadRMS, Identity, MaxNorm, MeanOperator, Paired, RowRMS, Spectral
from surefoot.momentum import Momentum
from surefoot.stabilise import (
    Free,
    Normalise,
    PostClip,
    PreDecay,
    Rescale,
    SpectralSphere,
    Stiefel,
    StreamingPostClip,
    StreamingPreDecay,
    WeightDecay,
)

from . import adversaries, oracle
from .cases import CASES, Case, frobenius
from .inputs import exact, gaussian

STEPS = 1000
RADIUS = 2.0
BOUNDED = (PostClip(RADIUS), Rescale(RADIUS))
DECAYING = (WeightDecay(1 / RADIUS), PreDecay(1 / RADIUS))
STREAMING = (StreamingPostClip(RADIUS, 4), StreamingPreDecay(1 / RADIUS, 4))
SPHERES = (Normalise(RADIUS), SpectralSphere(RADIUS), Normalise(RADIUS, Frobenius()), Normalise())
EVERY = (Free(), *STREAMING, *BOUNDED, *DECAYING, *SPHERES, Stiefel(RADIUS))
GEOMETRIES = (Spectral(), RowRMS(), HeadRMS(), MeanOperator(1.0, 2.0), MaxNorm(), RMS())

each_scheme = pytest.mark.parametrize("scheme", EVERY, ids=repr)
TRAJECTORIES = tuple(geometry for geometry in GEOMETRIES if geometry != MaxNorm())  # a clamp needs no adversaries

each_trajectory = pytest.mark.parametrize("geometry", TRAJECTORIES, ids=repr)
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=repr)


def case_of(geometry) -> Case:
    return next(case for case in CASES if case.geometry == geometry)


def shaped(values: np.ndarray, ndim: int) -> np.ndarray:
    """`(adversaries, 6, 4)` as it is for matrices, `(adversaries, 24)` for vectors."""
    return values if ndim == 2 else values.reshape(len(values), -1)


def trajectory(scheme, geometry, *, largest_eta: float, dtype=torch.float32, steps=STEPS, size=3.0, keeps=True):
    """Weights `(steps + 1, adversaries, ...)` and etas `(steps, adversaries)` of a whole run."""
    case_norm = frobenius(Frobenius()).norm
    w0 = adversaries.start(1.0)
    w0 *= size / case_norm(w0)[-1]
    w = torch.tensor(shaped(w0, geometry.ndim)).to(dtype)
    cache = scheme.init_state(w, geometry) if keeps else None
    rng, path, etas = np.random.default_rng(5), [w.clone()], []
    for step, eta in enumerate(adversaries.step_sizes(steps, largest_eta)):
        m = adversaries.gradients(w, step, rng)
        w, cache = scheme.move(w, m, torch.tensor(eta, dtype=dtype)[(..., *(None,) * geometry.ndim)], geometry, cache)
        path.append(w.clone())
        etas.append(eta)
    return torch.stack(path), np.stack(etas)


def assert_below(norms: np.ndarray, bound: np.ndarray | float, tolerance: float) -> None:
    """norms `(steps, adversaries)` below bound; the message names the adversary."""
    assert np.isfinite(norms).all()
    excess = (norms / bound).max(axis=0) - 1
    assert (excess <= tolerance).all(), dict(zip(adversaries.NAMES, excess, strict=True))


@each_trajectory
def test_the_adversaries_have_teeth(geometry):
    """Without a stabiliser the same gradients leave the ball by far, so the promises below mean something."""
    path, _ = trajectory(Free(), geometry, largest_eta=1.9, steps=200)
    assert (case_of(geometry).norm(exact(path)).max(axis=0) > 3 * RADIUS).sum() >= 4


@pytest.mark.parametrize("scheme", BOUNDED, ids=repr)
@each_trajectory
@pytest.mark.parametrize("keeps", [True, False], ids=["running bound", "pure"])
def test_radius_is_never_exceeded(scheme, geometry, keeps):
    """norm <= r after every step with eta > 0, for steps far longer than the radius too."""
    path, etas = trajectory(scheme, geometry, largest_eta=50.0, keeps=keeps)
    norms = case_of(geometry).norm(exact(path))[1:]
    moved = np.maximum.accumulate(etas > 0, axis=0)  # a weight outside the ball stays there until eta > 0
    assert_below(np.where(moved, norms, 0), RADIUS, 1e-5)


@pytest.mark.parametrize("scheme", DECAYING, ids=repr)
@each_trajectory
def test_decay_bounds_by_the_start_or_one_over_rate(scheme, geometry):
    path, _ = trajectory(scheme, geometry, largest_eta=1.9)
    norms = case_of(geometry).norm(exact(path))
    assert_below(norms[1:], np.maximum(norms[0], RADIUS), 1e-3)


@each_trajectory
def test_as_many_vectors_as_columns_hold_the_radius(geometry):
    """The streaming forms promise less: with all 4 columns kept they hold to 1 % while steps stay moderate."""
    for scheme in STREAMING:
        path, etas = trajectory(scheme, geometry, largest_eta=0.4)
        norms = case_of(geometry).norm(exact(path))
        moved = np.maximum.accumulate(etas > 0, axis=0)
        bound = RADIUS if scheme == STREAMING[0] else np.maximum(norms[0], RADIUS)
        assert_below(np.where(moved, norms[1:], 0), bound, 1e-2)


def test_one_vector_misses_the_radius_under_a_full_rank_pull():
    """Why it has a name of its own."""
    path, _ = trajectory(StreamingPostClip(RADIUS, 1), Spectral(), largest_eta=0.4)
    assert case_of(Spectral()).norm(exact(path))[1:, 1].max() > 1.05 * RADIUS


@pytest.mark.parametrize("scheme", SPHERES[:2], ids=repr)
@each_trajectory
def test_a_sphere_is_kept(scheme, geometry):
    path, etas = trajectory(scheme, geometry, largest_eta=50.0, size=1.0)
    norms = case_of(geometry).norm(exact(path))[1:]
    moved = np.maximum.accumulate(etas > 0, axis=0)
    assert np.abs(np.where(moved, norms / RADIUS, 1) - 1).max() <= 1e-5


def test_normalise_keeps_its_own_norm():
    """Hyperball: spectral steps on the Frobenius sphere; without a radius the initial norm stays."""
    own = frobenius(Frobenius())
    path, etas = trajectory(Normalise(RADIUS, Frobenius()), Spectral(), largest_eta=50.0)
    moved = np.maximum.accumulate(etas > 0, axis=0)
    assert np.abs(np.where(moved, own.norm(exact(path))[1:] / RADIUS, 1) - 1).max() <= 1e-5
    path, _ = trajectory(Normalise(None, Frobenius()), Spectral(), largest_eta=50.0)
    norms = own.norm(exact(path))
    np.testing.assert_allclose(norms[1:], np.broadcast_to(norms[0], norms[1:].shape), rtol=1e-3)


STEPS_OF_OTHERS = (MeanOperator(1.5, np.inf), MeanOperator(1.0, 2.0), MeanOperator(3.0, np.inf), Identity())


@pytest.mark.parametrize("increment", STEPS_OF_OTHERS, ids=repr)
def test_a_weight_of_one_norm_is_bounded_under_steps_of_another(increment):
    """MOGA's and Adam's steps on a linear weight: the radius is of the spectral norm."""
    pair, norm = Paired(increment, Spectral()), case_of(Spectral()).norm
    for scheme in (PostClip(RADIUS), PreDecay(1 / RADIUS)):
        path, etas = trajectory(scheme, pair, largest_eta=1.9, steps=300)
        norms = norm(exact(path))
        moved = np.maximum.accumulate(etas > 0, axis=0)
        bound = np.maximum(norms[0], RADIUS) if isinstance(scheme, PreDecay) else RADIUS
        assert_below(np.where(moved, norms[1:], 0), bound, 1e-3)
    if pair.direction_norm_bound < np.inf:
        for shape in ((6, 4), (4, 24), (32, 8)):
            directions = [
                exact(pair.direction(gaussian(shape, seed) ** power)) for seed in range(20) for power in (1, 9)
            ]
            assert norm(np.stack(directions)).max() <= pair.direction_norm_bound


def test_stiefel_makes_every_singular_value_the_radius():
    path, etas = trajectory(Stiefel(RADIUS), Spectral("svd"), largest_eta=0.5, steps=100)
    values = np.linalg.svd(exact(path[-1]), compute_uv=False)[np.any(etas > 0, axis=0)] / (6 / 4) ** 0.5
    np.testing.assert_allclose(values, RADIUS, rtol=1e-5)


@dataclass(frozen=True)
class Overshooting(Spectral):
    """A user's geometry whose direction is three times too long."""

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        return 3 * super().direction(g)


def test_promises_that_do_not_rely_on_the_direction():
    """Post Clip, Rescale, Normalise and Pre Decay hold for any direction; weight decay alone does not."""
    norm = case_of(Spectral()).norm
    for scheme in BOUNDED:
        path, etas = trajectory(scheme, Overshooting(), largest_eta=1.9)
        moved = np.maximum.accumulate(etas > 0, axis=0)
        assert_below(np.where(moved, norm(exact(path))[1:], 0), RADIUS, 1e-5)
    path, _ = trajectory(PreDecay(1 / RADIUS), Overshooting(), largest_eta=1.9)
    norms = norm(exact(path))
    assert_below(norms[1:], np.maximum(norms[0], RADIUS), 1e-3)
    path, _ = trajectory(WeightDecay(1 / RADIUS), Overshooting(), largest_eta=1.9)
    assert norm(exact(path)).max() > 2 * RADIUS


@pytest.mark.parametrize("scheme", [*BOUNDED, PreDecay(1 / RADIUS)], ids=repr)
def test_bfloat16_weights_keep_the_promise_to_rounding(scheme):
    path, etas = trajectory(scheme, Spectral(), largest_eta=1.9, dtype=torch.bfloat16, steps=300)
    norms = case_of(Spectral()).norm(exact(path))
    moved = np.maximum.accumulate(etas > 0, axis=0)
    bound = np.maximum(norms[0], RADIUS) if isinstance(scheme, PreDecay) else RADIUS
    assert_below(np.where(moved, norms[1:], 0), bound, 8e-3)


def formulas(case: Case, w: np.ndarray, d: np.ndarray, eta: float) -> dict[object, np.ndarray]:
    """The next weight of each scheme for one block, from spec section 6 word for word."""
    rate, stepped = 1 / RADIUS, w - eta * d
    keep = 1 - min(1.0, eta * rate)
    own = float(case.norm(w))
    shrunk = case.project(w, keep * own) - eta * d
    sphere = float(lp_frobenius(stepped))
    return {
        Free(): stepped,
        WeightDecay(rate): keep * w - eta * d,
        PostClip(RADIUS): case.project(stepped, RADIUS),
        PreDecay(rate): case.project(shrunk, max(own, RADIUS)),
        Rescale(RADIUS): stepped * min(1.0, RADIUS / float(case.norm(stepped))),
        Normalise(RADIUS): stepped * RADIUS / float(case.norm(stepped)),
        Normalise(RADIUS, Frobenius()): stepped * RADIUS / sphere,
        Normalise(): stepped * own / float(case.norm(stepped)),
    }


def lp_frobenius(w: np.ndarray) -> float:
    return float(np.linalg.norm(w)) / w.shape[0] ** 0.5


@pytest.mark.parametrize("geometry", [Spectral("svd"), RowRMS(), HeadRMS(), MeanOperator(3.0, float("inf"))], ids=repr)
@pytest.mark.parametrize("eta", [0.1, 1.0, 6.0])
def test_next_weight_is_the_formula(geometry, eta):
    """eta = 6 has eta*rate = 3: decay is capped at 1 and never flips a weight's sign."""
    case = case_of(Spectral() if isinstance(geometry, Spectral) else geometry)
    for seed, size in enumerate((0.2, 5.0)):
        w, m = size * gaussian((6, 4), seed, torch.float64), gaussian((6, 4), 50 + seed, torch.float64)
        d = exact(geometry.direction(m))
        assert float((exact(m) * d).sum()) == pytest.approx(float(case.dual(exact(m))))
        for scheme, truth in formulas(case, exact(w), d, eta).items():
            for number in (eta, torch.full((1, 1), eta, dtype=torch.float64)):
                moved, _ = scheme.move(w.clone(), m, number, geometry)
                np.testing.assert_allclose(exact(moved), truth, atol=1e-7, err_msg=f"{scheme} {size}")


def test_pre_decay_under_rms_is_weight_decay():
    start = gaussian((5, 12), 1, torch.float64) * torch.tensor([0.1, 0.5, 1.0, 3.0, 10.0])[:, None]
    decayed, clipped = start.clone(), start.clone()
    for step in range(100):
        m = gaussian((5, 12), 100 + step, torch.float64)
        decayed, _ = WeightDecay(0.5).move(decayed, m, 0.1, RMS())
        clipped, _ = PreDecay(0.5).move(clipped, m, 0.1, RMS())
        torch.testing.assert_close(clipped, decayed, rtol=1e-6, atol=1e-6)


@each_scheme
@each_geometry
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eta_zero_is_bit_exact(scheme, geometry, dtype):
    """Even far outside the ball, with denormals in the weight; as a number and as a tensor."""
    shape = (3, 6, 4) if geometry.ndim == 2 else (3, 24)
    w = (gaussian(shape, 1) * 100).to(dtype)
    w.view(-1)[:2] = torch.tensor([1e-40, -1e-40], dtype=dtype)
    m = gaussian(shape, 2).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for eta in (0.0, torch.tensor(0.0), torch.zeros((3, *(1,) * geometry.ndim), dtype=dtype)):
        moved, _ = scheme.move(w.clone(), m, eta, geometry)
        assert moved.dtype == w.dtype
        assert torch.equal(moved.view(bits), w.view(bits))
    eta = torch.tensor([0.1, 0.0, 0.1], dtype=dtype)[(..., *(None,) * geometry.ndim)]
    mixed, _ = scheme.move(w.clone(), m, eta, geometry)
    assert torch.equal(mixed[1].view(bits), w[1].view(bits))
    assert not torch.equal(mixed[0], w[0])
    assert not torch.equal(mixed[2], w[2])


@each_scheme
def test_eta_zero_keeps_the_sign_of_zero(scheme):
    """-0.0 - 0*d would be +0.0 where d < 0: equal in value, not in bits."""
    w = torch.full((6, 4), -0.0)
    moved, _ = scheme.move(w, gaussian((6, 4), 2), 0.0, Spectral())
    assert torch.signbit(moved).all()


@pytest.mark.parametrize("scheme", [Free(), *BOUNDED, *DECAYING], ids=repr)
@pytest.mark.parametrize("geometry", [RowRMS(), HeadRMS()], ids=repr)
def test_rows_with_eta_zero_stay(scheme, geometry):
    """An absent token's row, inside the ball: bit for bit, while its neighbours move."""
    w, m = gaussian((2, 6, 4), 1) * 0.05, gaussian((2, 6, 4), 2)
    eta = torch.full((2, 6, 1), 0.1)
    eta[:, 1::2] = 0
    moved, _ = scheme.move(w, m, eta, geometry)
    assert torch.equal(moved[:, 1::2], w[:, 1::2])
    assert (moved[:, ::2] != w[:, ::2]).any(-1).all()
    assert torch.isfinite(moved).all()


@each_scheme
@each_geometry
def test_zero_weight_zero_gradient_and_empty(scheme, geometry):
    shape = (2, 6, 4) if geometry.ndim == 2 else (2, 24)
    zero, m = torch.zeros(shape), gaussian(shape, 1)
    still, _ = scheme.move(zero, zero, 0.1, geometry)
    assert torch.equal(still, zero)
    grown, _ = scheme.move(zero, m, 0.1, geometry)
    assert torch.isfinite(grown).all()
    if scheme in SPHERES:
        assert torch.equal(grown, zero)  # a zero weight has no place on a sphere
    elif not isinstance(scheme, Stiefel):
        torch.testing.assert_close(grown, -0.1 * geometry.direction(m))
    for empty in ((0, 4), (4, 0), (2, 0, 3)):
        moved, _ = scheme.move(torch.zeros(empty), torch.zeros(empty), 0.1, geometry)
        assert moved.shape == empty


@each_scheme
@each_geometry
def test_arguments_are_untouched_and_results_are_new(scheme, geometry):
    """All but the weight, which is given away."""
    shape = (3, 6, 4) if geometry.ndim == 2 else (3, 24)
    w, m = gaussian(shape, 1), gaussian(shape, 2)
    some, every = (torch.tensor(x)[(..., *(None,) * geometry.ndim)] for x in ([0.0, 0.1, 5.0], [0.1, 0.1, 5.0]))
    before = [x.clone() for x in (m, some, every)]
    for eta in (some, every, 0.0, 0.1):
        scheme.move(w.clone(), m, eta, geometry)[0].fill_(7)
    assert all(torch.equal(x, y) for x, y in zip(before, (m, some, every), strict=True))


@each_geometry
@pytest.mark.parametrize(("scheme", "keep"), [(Free(), 1.0), (WeightDecay(0.5), 0.95)])
def test_where_everything_moves_the_weight_is_updated_in_its_place(scheme, keep, geometry):
    shape = (3, 6, 4) if geometry.ndim == 2 else (3, 24)
    w, m = gaussian(shape, 1), gaussian(shape, 2)
    truth = keep * w - 0.1 * geometry.direction(m)
    for eta in (0.1, torch.full((1,) * w.ndim, 0.1)):
        place = w.clone()
        moved, _ = scheme.move(place, m, eta, geometry)
        assert moved.data_ptr() == place.data_ptr()
        torch.testing.assert_close(moved, truth)


def test_where_everything_is_live_the_momentum_is_updated_in_its_place():
    old, g = gaussian((3, 6, 4), 1), gaussian((3, 6, 4), 2)
    for lookahead, truth in ((None, 0.9 * old + 0.1 * g), (0.5, 0.5 * old + 0.5 * g)):
        place = old.clone()
        state, look = Momentum(0.9, lookahead)({"momentum": place}, g, 1.0)
        assert state["momentum"].data_ptr() == place.data_ptr()
        torch.testing.assert_close(place, 0.9 * old + 0.1 * g)
        torch.testing.assert_close(look, truth)


def test_post_clip_touches_only_what_is_outside():
    """Minimal modification: singular directions below r are those of the plain step."""
    w = torch.tensor(oracle.polar(exact(gaussian((6, 4), 1)))) * torch.tensor([0.5, 0.5, 0.5, 5.0])
    m = torch.zeros(6, 4, dtype=torch.float64)
    clipped, _ = PostClip(1.0).move(w, m, 0.1, Spectral())
    assert torch.allclose(clipped[:, :3], w[:, :3], atol=1e-12)
    assert float(clipped[:, 3].norm()) == pytest.approx((6 / 4) ** 0.5)


@pytest.mark.parametrize("scheme", [WeightDecay, PostClip, PreDecay, Rescale, Normalise, SpectralSphere, Stiefel])
def test_bad_numbers_are_refused(scheme):
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            scheme(value)


def test_public_names():
    for name in ("Free", "WeightDecay", "PostClip", "PreDecay", "Rescale", "Normalise"):
        assert getattr(surefoot, name).__name__ == name
