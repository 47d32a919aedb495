"""Training on a sphere: the norm stays what it is, or becomes a radius."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry, expand
from surefoot.stabilise.base import Stabiliser, along, require_positive, step, where_moved

VECTORS, COLD = 2, 8  # leading vectors a matrix, and iterations that give the first ones


@dataclass(frozen=True)
class Normalise(Stabiliser):
    """`w - eta d`, rescaled to norm radius: training on a sphere. A zero weight (a bias at its start) stays zero.

    Args:
        radius: in the unit of the role; None keeps the norm that the weight has.
        norm: whose sphere; None is the role's own norm, `Frobenius()` gives Hyperball.
    """

    radius: float | None = None
    norm: Geometry | None = None

    def __post_init__(self) -> None:
        if self.radius is not None:
            require_positive("Normalise's radius", self.radius)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step, then rescale."""
        moved = _rescaled(step(w, m, eta, geometry), w, self.norm or geometry, self.radius)
        return where_moved(eta, geometry, moved, w), cache

    def scaled(self, unit: float) -> Normalise:
        """Radius times unit."""
        return Normalise(None if self.radius is None else self.radius * unit, self.norm)

    @property
    def promise(self) -> str:
        """The bound."""
        name = "norm" if self.norm is None else f"{type(self.norm).__name__} norm"
        return f"{name} = {'initial' if self.radius is None else f'{self.radius:.4g}'}"

    @property
    def bound(self) -> float:
        """The radius, if it is of the role's own norm."""
        return math.inf if self.radius is None or self.norm is not None else self.radius


@dataclass(frozen=True)
class SpectralSphere(Stabiliser):
    """Steepest descent on the sphere `norm(w) = radius`: the best direction that keeps the norm, then a rescaling.

    The direction maximises `<m, d>` over `norm(d) <= 1` and `|uᵀ d v| <= 0.01`, u and v being the leading singular pair
    of w as two vectors kept from step to step see it; see `linalg.spectral_sphere`. Under norms other than the spectral
    one, and wherever `direction(m)` keeps the norm by itself, it equals `Normalise(radius)`.

    Cost: about 2 directions a step (on an accelerator 10, without waiting for the host) and an exact norm.

    Args:
        radius: in the unit of the role.

    Source: "Spectral Sphere", 2026; "Beyond MuP 4" compares it.
    """

    radius: float

    def __post_init__(self) -> None:
        require_positive("SpectralSphere's radius", self.radius)

    def init_state(self, w: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """The leading vectors and the multiplier."""
        cache = geometry.init_vectors(w, VECTORS)
        for _ in range(COLD if cache and w.numel() else 0):
            _, cache = geometry.estimate_norm(w, cache)
        return cache | ({"multiplier": w.new_zeros(w.shape[:-2])} if cache else {})

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step along the sphere, then back onto it."""
        d, cache = geometry.tangent(w, m, self.init_state(w, geometry) if cache is None else cache)
        moved = _rescaled(along(w, d, eta), w, geometry, self.radius)
        return where_moved(eta, geometry, moved, w), cache

    def scaled(self, unit: float) -> SpectralSphere:
        """Radius times unit."""
        return SpectralSphere(self.radius * unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm = {self.radius:.4g}"

    @property
    def bound(self) -> float:
        """The radius."""
        return self.radius


@dataclass(frozen=True)
class Stiefel(Stabiliser):
    """`radius * direction(w - eta d)`: every singular value becomes radius; every row of a table has norm radius.

    For a matrix the nearest one with orthogonal rows or columns, times radius. The entries of a gain would all
    be +-radius: for matrices and tables only.

    Args:
        radius: in the unit of the role.
    """

    radius: float

    def __post_init__(self) -> None:
        require_positive("Stiefel's radius", self.radius)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step, then the polar factor."""
        held = geometry.direction(step(w, m, eta, geometry)) * self.radius
        return where_moved(eta, geometry, held, w), cache

    def scaled(self, unit: float) -> Stiefel:
        """Radius times unit."""
        return Stiefel(self.radius * unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"orthogonal, norm = {self.radius:.4g}"

    @property
    def bound(self) -> float:
        """The radius."""
        return self.radius


def _rescaled(stepped: Tensor, w: Tensor, sphere: Geometry, radius: float | None) -> Tensor:
    """The step's result with norm radius, or with w's; w where it is zero or would become so."""
    after = expand(sphere.norm(stepped), sphere)
    if radius is None:
        target = expand(sphere.norm(w), sphere)
    else:
        target = radius * (w != 0).any(tuple(range(-sphere.ndim, 0)), keepdim=True).to(after.dtype)
    legal = (target > 0) & (after > 0)
    scaled = stepped * (target / torch.where(legal, after, 1)).to(w.dtype)
    return torch.where(legal, scaled, w)
