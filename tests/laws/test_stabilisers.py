"""Each scheme's promise over 1,000 adversarial steps."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from surefoot.geometry import Frobenius, Geometry, Identity, MaxNorm, MeanOperator, Spectral
from surefoot.stabilise import (
    Free,
    Normalise,
    PostClip,
    PreDecay,
    SpectralSphere,
    Stiefel,
    StreamingPostClip,
    WeightDecay,
)
from surefoot.stabilise.base import where_moved

from . import adversaries
from .cases import frobenius
from .inputs import exact, gaussian
from .schemes import (
    BOUNDED,
    DECAYING,
    GEOMETRIES,
    RADIUS,
    SPHERES,
    STREAMING,
    case_of,
)

STEPS = 1000
TRAJECTORIES = tuple(geometry for geometry in GEOMETRIES if geometry != MaxNorm())  # a clamp needs no adversaries
each_trajectory = pytest.mark.parametrize("geometry", TRAJECTORIES, ids=repr)


def shaped(values: np.ndarray, ndim: int) -> np.ndarray:
    """`(adversaries, 6, 4)` as it is for matrices, `(adversaries, 24)` for vectors."""
    return values if ndim == 2 else values.reshape(len(values), -1)


def trajectory(scheme, geometry, *, largest_eta: float, dtype=torch.float32, steps=STEPS, size=3.0, increment=None):
    """Weights `(steps + 1, adversaries, ...)` and etas `(steps, adversaries)` of a whole run.

    geometry is the weight's norm, and the step's unless `increment` is given; `increment="pure"` keeps no state.
    """
    step_geometry = increment if isinstance(increment, Geometry) else geometry
    case_norm = frobenius(Frobenius()).norm
    w0 = adversaries.start(1.0)
    w0 *= size / case_norm(w0)[-1]
    w = torch.tensor(shaped(w0, geometry.ndim)).to(dtype)
    cache = None if increment == "pure" else scheme.init_state(w, step_geometry, geometry)
    rng, path, etas = np.random.default_rng(5), [w.clone()], []
    for step, eta in enumerate(adversaries.step_sizes(steps, largest_eta)):
        m = adversaries.gradients(w, step, rng)
        each = torch.tensor(eta, dtype=dtype)[(..., *(None,) * geometry.ndim)]
        new, cache = scheme.move(w.clone(), m, each, step_geometry, geometry, cache)
        w = where_moved(each, tuple(range(-geometry.ndim, 0)), new, w)
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
@pytest.mark.parametrize("increment", [None, "pure"], ids=["running bound", "pure"])
def test_radius_is_never_exceeded(scheme, geometry, increment):
    """norm <= r after every step with eta > 0, for steps far longer than the radius too."""
    path, etas = trajectory(scheme, geometry, largest_eta=50.0, increment=increment)
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
    norm, longest = case_of(Spectral()).norm, increment.direction_norm_bound(Spectral())
    for scheme in (PostClip(RADIUS), PreDecay(1 / RADIUS)):
        path, etas = trajectory(scheme, Spectral(), largest_eta=1.9, steps=300, increment=increment)
        norms = norm(exact(path))
        moved = np.maximum.accumulate(etas > 0, axis=0)
        bound = np.maximum(norms[0], RADIUS) if isinstance(scheme, PreDecay) else RADIUS
        assert_below(np.where(moved, norms[1:], 0), bound, 1e-3)
    if longest < np.inf:
        for shape in ((6, 4), (4, 24), (32, 8)):
            directions = [
                exact(increment.direction(gaussian(shape, seed) ** power)) for seed in range(20) for power in (1, 9)
            ]
            assert norm(np.stack(directions)).max() <= longest


def test_stiefel_makes_every_singular_value_the_radius():
    path, etas = trajectory(Stiefel(RADIUS), Spectral("svd"), largest_eta=0.5, steps=100)
    values = np.linalg.svd(exact(path[-1]), compute_uv=False)[np.any(etas > 0, axis=0)] / (6 / 4) ** 0.5
    np.testing.assert_allclose(values, RADIUS, rtol=1e-5)


ROWS = MeanOperator(3.0, np.inf)


def test_stiefel_makes_the_weights_own_norm_the_radius_under_steps_of_another():
    path, etas = trajectory(
        Stiefel(RADIUS), Spectral("svd"), largest_eta=0.5, steps=50, increment=MeanOperator(3.0, np.inf)
    )
    values = np.linalg.svd(exact(path[-1]), compute_uv=False)[np.any(etas > 0, axis=0)] / (6 / 4) ** 0.5
    np.testing.assert_allclose(values, RADIUS, rtol=1e-5)


def test_a_sphere_keeps_vectors_only_where_a_step_reads_them():
    w, spectral = gaussian((6, 4), 1), Spectral()
    assert SpectralSphere(RADIUS).init_state(w, spectral, spectral).keys() == {"vectors", "multiplier"}
    assert SpectralSphere(RADIUS).init_state(w, ROWS, spectral) == {}
    path, etas = trajectory(
        SpectralSphere(RADIUS), spectral, largest_eta=1.9, steps=50, increment=MeanOperator(3.0, np.inf)
    )
    norms = case_of(spectral).norm(exact(path))[1:]
    moved = np.maximum.accumulate(etas > 0, axis=0)
    assert np.abs(np.where(moved, norms / RADIUS, 1) - 1).max() <= 1e-5


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
