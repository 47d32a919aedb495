"""Each scheme's promise over hundreds of adversarial steps; over a thousand in the slow tests."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from combinations import combinations
from comparisons import advanced
from surefoot.geometry import Frobenius, Identity, MaxNorm, MeanOperator, Spectral
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
from .schemes import BOUNDED, DECAYING, GEOMETRIES, RADIUS, SPHERES, STREAMING, case_of

FEW, MANY = 125, 1000  # one adversary turns round at 100, a projection lasts 16 steps
TRAJECTORIES = tuple(geometry for geometry in GEOMETRIES if geometry != MaxNorm())  # a clamp needs no adversaries
both_lengths = pytest.mark.parametrize("steps", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
all_geometries = pytest.mark.parametrize("geometry", TRAJECTORIES, ids=repr)


def shaped(values: np.ndarray, ndim: int) -> np.ndarray:
    """`(adversaries, 6, 4)` as it is for matrices, `(adversaries, 24)` for vectors."""
    return values if ndim == 2 else values.reshape(len(values), -1)


def trajectory(
    scheme, geometry, *, largest_eta, steps, dtype=torch.float32, size=3.0, step_geometry=None, stateless=False
):
    """Weights `(steps + 1, adversaries, ...)` and etas `(steps, adversaries)` of a whole run.

    geometry is the weight's norm, and the step's unless step_geometry is given. No state, no running bound.
    """
    step_geometry = step_geometry or geometry
    case_norm = frobenius(Frobenius()).norm
    w0 = adversaries.start(1.0)
    w0 *= size / case_norm(w0)[-1]
    w = torch.tensor(shaped(w0, geometry.ndim)).to(dtype)
    cache = None if stateless else scheme.init_state(w, step_geometry, geometry)
    rng, path, etas = np.random.default_rng(5), [w.clone()], []
    for step, sizes in enumerate(adversaries.step_sizes(steps, largest_eta)):
        m = adversaries.gradients(w, step, rng)
        eta = torch.tensor(sizes, dtype=dtype)[(..., *(None,) * geometry.ndim)]
        new, cache = advanced(scheme, w, m, eta, step_geometry, geometry, cache)
        w = where_moved(eta, tuple(range(-geometry.ndim, 0)), new, w)
        path.append(w.clone())
        etas.append(sizes)
    return torch.stack(path), np.stack(etas)


def from_first_step(values: np.ndarray, etas: np.ndarray, before: float = 0) -> np.ndarray:
    """Values `(steps, adversaries)`; `before` until eta > 0, as until then a weight outside the ball stays there."""
    return np.where(np.maximum.accumulate(etas > 0, axis=0), values, before)


def assert_below(norms: np.ndarray, bound: np.ndarray | float, tolerance: float) -> None:
    """norms `(steps, adversaries)` below bound; the message names the adversary."""
    assert np.isfinite(norms).all()
    excess = (norms / bound).max(axis=0) - 1
    assert (excess <= tolerance).all(), dict(zip(adversaries.NAMES, excess, strict=True))


@all_geometries
def test_without_a_stabiliser_the_adversaries_leave_the_ball(geometry):
    """By far, so the promises below mean something."""
    path, _ = trajectory(Free(), geometry, largest_eta=1.9, steps=200)
    assert (case_of(geometry).norm(exact(path)).max(axis=0) > 3 * RADIUS).sum() >= 4


@combinations(
    lambda scheme, geometry, stateless, steps: steps == FEW and (geometry.costly or not stateless),
    scheme=BOUNDED, geometry=TRAJECTORIES, stateless=[False, True], steps=[FEW, MANY],
)  # fmt: skip
def test_radius_is_never_exceeded(scheme, geometry, stateless, steps):
    """norm <= r after every step with eta > 0, for steps far longer than the radius too."""
    path, etas = trajectory(scheme, geometry, largest_eta=50.0, steps=steps, stateless=stateless)
    norms = case_of(geometry).norm(exact(path))[1:]
    assert_below(from_first_step(norms, etas), RADIUS, 1e-5)


@pytest.mark.parametrize("scheme", DECAYING, ids=repr)
@all_geometries
@both_lengths
def test_decay_bounds_by_the_start_or_one_over_rate(scheme, geometry, steps):
    path, _ = trajectory(scheme, geometry, largest_eta=1.9, steps=steps)
    norms = case_of(geometry).norm(exact(path))
    assert_below(norms[1:], np.maximum(norms[0], RADIUS), 1e-3)


@pytest.mark.parametrize("scheme", STREAMING, ids=repr)
@all_geometries
@both_lengths
def test_streaming_with_as_many_vectors_as_columns_stays_inside(scheme, geometry, steps):
    """The streaming forms promise less: with 4 vectors for 4 columns, a norm within 1 % under moderate steps."""
    path, etas = trajectory(scheme, geometry, largest_eta=0.4, steps=steps)
    norms = case_of(geometry).norm(exact(path))
    bound = RADIUS if scheme == STREAMING[0] else np.maximum(norms[0], RADIUS)
    assert_below(from_first_step(norms[1:], etas), bound, 1e-2)


def test_streaming_with_one_vector_exceeds_the_radius_under_a_full_rank_pull():
    """Why it has a name of its own."""
    path, _ = trajectory(StreamingPostClip(RADIUS, 1), Spectral(), largest_eta=0.4, steps=FEW)
    assert case_of(Spectral()).norm(exact(path))[1:, 1].max() > 1.05 * RADIUS


@combinations(  # in norms other than the spectral, SpectralSphere is Normalise, which tests/laws/linalg shows
    lambda scheme, geometry, steps: steps == FEW and (type(scheme) is Normalise or geometry == Spectral()),
    scheme=SPHERES[:2],
    geometry=TRAJECTORIES,
    steps=[FEW, MANY],
)
def test_the_norm_equals_the_spheres_radius(scheme, geometry, steps):
    path, etas = trajectory(scheme, geometry, largest_eta=50.0, size=1.0, steps=steps)
    norms = case_of(geometry).norm(exact(path))[1:]
    assert np.abs(from_first_step(norms / RADIUS, etas, before=1) - 1).max() <= 1e-5


@both_lengths
def test_normalise_takes_a_norm_other_than_the_steps(steps):
    """Hyperball: spectral steps on the Frobenius sphere; without a radius the initial norm stays."""
    own = frobenius(Frobenius())
    path, etas = trajectory(Normalise(RADIUS, Frobenius()), Spectral(), largest_eta=50.0, steps=steps)
    assert np.abs(from_first_step(own.norm(exact(path))[1:] / RADIUS, etas, before=1) - 1).max() <= 1e-5
    path, _ = trajectory(Normalise(None, Frobenius()), Spectral(), largest_eta=50.0, steps=steps)
    norms = own.norm(exact(path))
    np.testing.assert_allclose(norms[1:], np.broadcast_to(norms[0], norms[1:].shape), rtol=1e-3)


STEPS_OF_OTHERS = (MeanOperator(1.5, np.inf), MeanOperator(1.0, 2.0), MeanOperator(3.0, np.inf), Identity())


@combinations(
    lambda scheme, step_geometry: isinstance(scheme, PostClip) or step_geometry == Identity(),
    scheme=[PostClip(RADIUS), PreDecay(1 / RADIUS)],
    step_geometry=STEPS_OF_OTHERS,
)
def test_a_weight_of_one_norm_is_bounded_under_steps_of_another(scheme, step_geometry):
    """MOGA's and Adam's steps on a linear weight: the radius is of the spectral norm."""
    path, etas = trajectory(scheme, Spectral(), largest_eta=1.9, steps=FEW, step_geometry=step_geometry)
    norms = case_of(Spectral()).norm(exact(path))
    bound = np.maximum(norms[0], RADIUS) if isinstance(scheme, PreDecay) else RADIUS
    assert_below(from_first_step(norms[1:], etas), bound, 1e-3)


def test_stiefel_makes_every_singular_value_the_radius():
    path, etas = trajectory(Stiefel(RADIUS), Spectral("svd"), largest_eta=0.5, steps=100)
    values = np.linalg.svd(exact(path[-1]), compute_uv=False)[np.any(etas > 0, axis=0)] / (6 / 4) ** 0.5
    np.testing.assert_allclose(values, RADIUS, rtol=1e-5)


ROWS = MeanOperator(3.0, np.inf)


def test_stiefel_makes_the_weights_own_norm_the_radius_under_steps_of_another():
    path, etas = trajectory(Stiefel(RADIUS), Spectral("svd"), largest_eta=0.5, steps=50, step_geometry=ROWS)
    values = np.linalg.svd(exact(path[-1]), compute_uv=False)[np.any(etas > 0, axis=0)] / (6 / 4) ** 0.5
    np.testing.assert_allclose(values, RADIUS, rtol=1e-5)


def test_a_sphere_has_vectors_in_its_state_only_where_a_step_reads_them():
    w, spectral = gaussian((6, 4), 1), Spectral()
    assert SpectralSphere(RADIUS).init_state(w, spectral, spectral).keys() == {"vectors", "multiplier"}
    assert SpectralSphere(RADIUS).init_state(w, ROWS, spectral) == {}
    path, etas = trajectory(SpectralSphere(RADIUS), spectral, largest_eta=1.9, steps=50, step_geometry=ROWS)
    norms = case_of(spectral).norm(exact(path))[1:]
    assert np.abs(from_first_step(norms / RADIUS, etas, before=1) - 1).max() <= 1e-5


@dataclass(frozen=True)
class Overshooting(Spectral):
    """A user's geometry whose directions have norm 3."""

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        return 3 * super().direction(g)


@both_lengths
def test_promises_that_do_not_rely_on_the_direction(steps):
    """Post Clip, Rescale, Normalise and Pre Decay hold for any direction; weight decay alone does not."""
    norm = case_of(Spectral()).norm
    for scheme in BOUNDED:
        path, etas = trajectory(scheme, Overshooting(), largest_eta=1.9, steps=steps)
        assert_below(from_first_step(norm(exact(path))[1:], etas), RADIUS, 1e-5)
    path, _ = trajectory(PreDecay(1 / RADIUS), Overshooting(), largest_eta=1.9, steps=steps)
    norms = norm(exact(path))
    assert_below(norms[1:], np.maximum(norms[0], RADIUS), 1e-3)
    path, _ = trajectory(WeightDecay(1 / RADIUS), Overshooting(), largest_eta=1.9, steps=steps)
    assert norm(exact(path)).max() > 2 * RADIUS


@pytest.mark.parametrize("scheme", [*BOUNDED, PreDecay(1 / RADIUS)], ids=repr)
def test_bfloat16_weights_keep_the_promise_to_rounding(scheme):
    path, etas = trajectory(scheme, Spectral(), largest_eta=1.9, dtype=torch.bfloat16, steps=FEW)
    norms = case_of(Spectral()).norm(exact(path))
    bound = np.maximum(norms[0], RADIUS) if isinstance(scheme, PreDecay) else RADIUS
    assert_below(from_first_step(norms[1:], etas), bound, 8e-3)
