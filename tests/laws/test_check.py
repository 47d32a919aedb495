"""`surefoot.check`, by which a user judges a geometry of their own: ours pass, and broken laws are named."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import surefoot
from surefoot.geometry import MeanOperator, RowMean, RowRMS, Spectral

from .cases import CASES


@pytest.mark.parametrize("case", [c for c in CASES if not c.shortfall], ids=lambda case: case.name)
def test_exact_geometries_pass(case):
    surefoot.check(case.geometry)


def test_spectral_passes_with_its_stated_error():
    for geometry in (Spectral("svd"), Spectral(), MeanOperator(2, 2)):
        surefoot.check(geometry)
    surefoot.check(Spectral("qdwh"), tolerance=1e-2)


@dataclass(frozen=True)
class Halved(RowRMS):
    """A sound geometry: the row norm in half its unit."""

    def norm(self, w):
        return 2 * super().norm(w)

    def direction(self, g):
        return super().direction(g) / 2

    def project(self, w, radius, cache=None):
        return super().project(w, radius / 2, cache)


def test_torch_s_default_device_changes_nothing():
    plain = surefoot.check(Halved())
    with torch.device("meta"):
        assert surefoot.check(Halved()) == plain


def test_a_sound_geometry_passes():
    assert max(surefoot.check(Halved()).values()) < 1e-9


@dataclass(frozen=True)
class WrongSign(RowRMS):
    def direction(self, g):
        return -super().direction(g)


@dataclass(frozen=True)
class WrongExponent(MeanOperator):
    """A feasible direction that is not the maximiser: the sign rule under a row norm."""

    p: float = 3.0
    q: float = float("inf")

    def direction(self, g):
        return g.sign() / super().norm(g.sign())[..., None, None]


@dataclass(frozen=True)
class AdditiveEps(RowRMS):
    def direction(self, g):
        return g / (g.square().mean(-1, keepdim=True).sqrt() + 1e-8)


@dataclass(frozen=True)
class NoEps(RowRMS):
    def direction(self, g):
        return g / g.square().mean(-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class InPlace(RowRMS):
    def direction(self, g):
        return g.copy_(super().direction(g))


@dataclass(frozen=True)
class TooLong(RowRMS):
    def direction(self, g):
        return 1.2 * super().direction(g)


class InPlaceAfterwards(Halved):
    def direction(self, g):
        d = super().direction(g)
        g.mul_(2)
        return d


class TooShort(Halved):
    def direction(self, g):
        return super().direction(g) / 3


class SignsOfRows(Halved):
    def direction(self, g):
        return g.sign() / 2


class RowsOfTheBatch(Halved):
    """Right for a stack, too short for one matrix."""

    def direction(self, g):
        return super().direction(g.flatten(0, -2)[None]).reshape(g.shape) * (1 if len(g.shape) > 2 else 0.9)


class ProjectionToTwiceTheRadius(Halved):
    def project(self, w, radius, cache=None):
        return super().project(w, 2 * radius, cache)


class ProjectionToHalfTheRadius(Halved):
    def project(self, w, radius, cache=None):
        nearest, cache = super().project(w, radius, cache)
        return torch.where(nearest == w, w, nearest / 2), cache


class Remembered(RowRMS):
    """Returns the tensor that it returned for the same gradient before."""

    directions: ClassVar[dict] = {}

    def direction(self, g):
        key = (tuple(g.shape), float(g.sum()))
        if key not in self.directions:
            self.directions[key] = super().direction(g)
        return self.directions[key]


@dataclass(frozen=True)
class AcrossTheBatch(RowRMS):
    """One norm over a whole expert stack."""

    def direction(self, g):
        return g / g.square().mean().sqrt().clamp_min(1e-300)


@dataclass(frozen=True)
class RadialProjection(RowRMS):
    """Feasible, but not the nearest point: all rows shrink where one is outside."""

    def project(self, w, radius, cache=None):
        return w * (radius / self.norm(w)[..., None, None]).clamp(max=1), cache


@dataclass(frozen=True)
class NoProjection(RowRMS):
    def project(self, w, radius, cache=None):
        return w.clone(), cache


@dataclass(frozen=True)
class LowUpperBound(RowRMS):
    def bounds(self, w, cache=None):
        return 0.5 * self.norm(w), 0.9 * self.norm(w), cache


class SaysRowsAreIndependent(Spectral):
    """A direction of whole matrices that is declared one of rows."""

    couples = frozenset({-1})


class SaysRowsAreCoupled(RowRMS):
    couples = frozenset({-2, -1})


class SaysEntriesAreIndependent(RowMean):
    """Of `q = 1`, whose direction is a sign over the row's largest entries' share."""

    couples = frozenset()


class ScaledByRows(RowRMS):
    """A width factor of the number of rows: a part of the table would step further than the whole."""

    def scale(self, shape):
        return super().scale(shape) / shape[-2]


class NormOfEverything(RowRMS):
    def norm(self, w):
        return super().norm(w).amax()


class LowCertificate(RowRMS):
    def certificate(self, w):
        return 0.9 * self.norm(w)


class AlwaysBelow(RowRMS):
    def is_below(self, w, limit):
        return torch.ones_like(limit, dtype=torch.bool)


@pytest.mark.parametrize(
    ("geometry", "law"),
    [
        (SaysRowsAreIndependent("svd"), "independent"),
        (SaysRowsAreCoupled(), "coupled"),
        (SaysEntriesAreIndependent(1.0), "independent"),
        (ScaledByRows(), "cut"),
        (NormOfEverything(), "shapes"),
        (LowCertificate(), "bounds"),
        (AlwaysBelow(), "bounds"),
        (WrongSign(), "maximal"),
        (WrongExponent(), "maximal"),
        (AdditiveEps(), "scale-free"),
        (NoEps(), "zero-safe"),
        (InPlace(), "untouched"),
        (Remembered(), "own by 1"),
        (TooLong(), "unit"),
        (TooShort(), "unit"),
        (SignsOfRows(), "maximal"),
        (InPlaceAfterwards(), "untouched"),
        (RowsOfTheBatch(), "batch"),
        (ProjectionToTwiceTheRadius(), "feasible"),
        (ProjectionToHalfTheRadius(), "nearest"),
        (AcrossTheBatch(), "batch"),
        (RadialProjection(), "nearest"),
        (NoProjection(), "feasible"),
        (LowUpperBound(), "bounds"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_broken_law_is_named(geometry, law):
    with pytest.raises(ValueError, match=law):
        surefoot.check(geometry)


AS_ASKED = r": return a tensor of shape \(1, 3, 12, 8\) and torch.float64$"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda g: None, "Given.*: its direction is None" + AS_ASKED),
        (lambda g: g[..., :-1], r"its direction has shape \(1, 3, 12, 7\) and torch.float64" + AS_ASKED),
        (lambda g: g.sign().int(), r"its direction has shape \(1, 3, 12, 8\) and torch.int32" + AS_ASKED),
    ],
)
def test_a_direction_that_is_none_is_named(returned, message):
    class Given(RowRMS):
        def direction(self, g):
            return returned(g)

    with pytest.raises(ValueError, match=message):
        surefoot.check(Given())


@pytest.mark.parametrize("shape", [(3, 1, 8), (3, 12, 1), (1, 2, 2)])
def test_sides_of_one_have_nothing_to_couple(shape):
    surefoot.check(RowRMS(), shape=shape)
    surefoot.check(Spectral("svd"), shape=shape)


@pytest.mark.parametrize("shape", [(), (4,), (12, 8), (3, 0, 4)])
def test_a_shape_without_a_batch_or_entries_is_refused(shape):
    with pytest.raises(ValueError, match="no batch and 2 dimensions"):
        surefoot.check(RowRMS(), shape=shape)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 1, 2), (1, 12, 8)])
def test_small_data_is_enough_for_norms_whose_direction_is_sparse(shape):
    surefoot.check(RowMean(1.0), shape=shape)
    surefoot.check(MeanOperator(float("inf"), float("inf")), shape=shape)


def test_a_coupled_dimension_that_the_norm_is_not_over_is_refused():
    class Batch(RowRMS):
        couples = frozenset({-3})

    with pytest.raises(ValueError, match="couples dimension -3"):
        surefoot.check(Batch())


def test_check_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    surefoot.check(RowRMS())
    assert torch.equal(before, torch.random.get_rng_state())
