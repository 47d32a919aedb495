"""The stabilisers and geometries of the laws about a scheme's next weight."""

import pytest

from comparisons import advanced
from surefoot.geometry import RMS, Frobenius, HeadRMS, MaxNorm, MeanOperator, RowRMS, Spectral
from surefoot.geometry.base import Extent
from surefoot.scaling import Constant
from surefoot.stabilise import (
    ColumnSphere,
    DecayedPostClip,
    Free,
    Hyperball,
    Normalise,
    PostClip,
    PreDecay,
    Rescale,
    RowSphere,
    SpectralSphere,
    Stiefel,
    StreamingPostClip,
    StreamingPreDecay,
    WeightDecay,
)
from surefoot.stabilise.base import where_moved

from .cases import CASES, Case

RADIUS = 2.0
BOUNDED = (PostClip(RADIUS), DecayedPostClip(1 / RADIUS, Constant(), RADIUS), Rescale(RADIUS))
DECAYING = (WeightDecay(1 / RADIUS), PreDecay(1 / RADIUS))
STREAMING = (StreamingPostClip(RADIUS, 4), StreamingPreDecay(1 / RADIUS, 4))
SPHERES = (Normalise(RADIUS), SpectralSphere(RADIUS), Normalise(RADIUS, Frobenius()), Normalise())
MANIFOLDS = (RowSphere(), ColumnSphere(RADIUS), Stiefel(RADIUS), Hyperball())
EVERY = (Free(), *STREAMING, *BOUNDED, *DECAYING, *SPHERES, *MANIFOLDS)
GEOMETRIES = (Spectral(), RowRMS(), HeadRMS(), MeanOperator(1.0, 2.0), MaxNorm(), RMS())
all_schemes = pytest.mark.parametrize("scheme", EVERY, ids=repr)
all_geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=repr)


def moved(scheme, w, m, eta, geometry, cache=None):
    """The next weight as a step makes it: the scheme's, and the old one where eta is 0."""
    new, cache = advanced(fitted(scheme, geometry), w, m, eta, geometry, cache=cache)
    dims = () if scheme.extent == Extent.ENTRY else tuple(range(-geometry.ndim, 0))
    return where_moved(eta, dims, new, w), cache


def fitted(scheme, geometry):
    """The scheme for matrices or vectors, as a plan has it."""
    return scheme.scaled(1.0, (1, 6, 4) if geometry.ndim == 2 else (1, 24))


def case_of(geometry) -> Case:
    return next(case for case in CASES if case.geometry == geometry)
