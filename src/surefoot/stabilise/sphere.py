"""Training on a sphere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry, expand
from surefoot.stabilise.base import Stabiliser, require_positive, step, where_moved


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
        sphere = self.norm or geometry
        stepped = step(w, m, eta, geometry)
        before = expand(sphere.norm(w), sphere)
        target = before if self.radius is None else torch.full_like(before, self.radius)
        after = expand(sphere.norm(stepped), sphere)
        legal = (before > 0) & (after > 0)
        scaled = stepped * (target / torch.where(legal, after, 1)).to(w.dtype)
        return where_moved(eta, geometry, torch.where(legal, scaled, w), w), cache

    def in_units(self, unit: float) -> Normalise:
        """Radius times unit."""
        return Normalise(None if self.radius is None else self.radius * unit, self.norm)

    @property
    def promise(self) -> str:
        """The bound."""
        name = "norm" if self.norm is None else f"{type(self.norm).__name__} norm"
        return f"{name} = {'initial' if self.radius is None else f'{self.radius:.4g}'}"
