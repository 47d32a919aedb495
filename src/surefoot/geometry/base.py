"""`Geometry`: a norm in natural units, and the three things a norm gives: direction, projection, bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from surefoot.linalg import device

Cache = dict[str, Tensor] | None
"""What a geometry may keep from step to step (warm vectors); optimizer state, never an attribute."""

Eta = float | Tensor
"""A step size; a tensor broadcasts against the weight."""


class Geometry(ABC):
    """A norm on matrices `(..., out, in)` or vectors `(..., n)`; leading dimensions are a batch.

    The norm carries its width factor ("natural units"): 1 means that the layer changes its output by Theta(1)
    RMS at every width. Four methods define a geometry; `surefoot.check` tests the laws that bind them.
    """

    ndim: int = 2
    """How many trailing dimensions one norm is taken over: 2 for matrices, 1 for vectors."""

    @property
    @abstractmethod
    def couples(self) -> frozenset[int]:
        """The dimensions that one independent problem spans: {} sign, {-1} rows, {-2, -1} spectral."""

    @abstractmethod
    def norm(self, w: Tensor) -> Tensor:
        """`norm(w)` in natural units, shape w.shape[:-ndim]; float32 for half precision."""

    @abstractmethod
    def direction(self, g: Tensor) -> Tensor:
        """The maximiser of `<g, d>` over `norm(d) <= 1`; 0 where g is 0.

        A tensor of its own, which the caller may write to; or g itself.
        """

    @abstractmethod
    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """The nearest point (Frobenius) with `norm <= radius`; w itself, bit for bit, if it is inside.

        A radius given as a tensor broadcasts against w, for instance `(..., 1, 1)`.
        """

    @property
    def direction_norm_bound(self) -> float:
        """No direction's norm exceeds this, rounding included; inf where that is not known."""
        return math.inf

    def init_state(self, w: Tensor) -> dict[str, Tensor]:
        """What `hold` keeps from step to step for weights w; nothing where the norm is cheap."""
        return {}

    def revalidate(self, w: Tensor, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        """The cache as far as it is true of w, which somebody else may have written."""
        return cache

    def enforce(
        self,
        w: Tensor,
        radius: float,
        eta: Eta,
        period: int | None = 1,
        cache: Cache = None,
        longest: float | None = None,
    ) -> tuple[Tensor, Cache]:
        """`project(w, radius)` for a weight that was inside before a step of eta; a costly norm may look away.

        Args:
            w: the weight after its step.
            radius: in natural units.
            eta: the step's size, broadcasting against w; a matrix whose eta is 0 stays as it is.
            period: a costly projection goes `(period - 1) * eta` inside the ball, and so is not needed for that many
                steps; None chooses, at most a quarter of the radius.
            cache: as `fresh` made it, or None for the plain projection.
            longest: how long the step's direction may be, where it is not this geometry's own.
        """
        return self.project(w, radius, cache)

    def init_vectors(self, w: Tensor, vectors: int) -> dict[str, Tensor]:
        """What `seen` keeps from step to step for weights w; nothing where the norm is cheap."""
        return {}

    def estimate_norm(self, w: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`(norm, cache)` as the cache's vectors see it: at most the truth, and the truth where the norm is cheap."""
        return self.norm(w), cache

    def clip_leading(
        self, w: Tensor, radius: float | Tensor, cache: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`project`, applied to what the cache's vectors see; all of it where the norm is cheap."""
        return self.project(w, radius)[0], cache

    def tangent(self, w: Tensor, m: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The direction for a weight that stays on its sphere; `direction(m)` where no better one is known."""
        return self.direction(m), cache

    def shrink(self, w: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """`(project(w, factor * norm(w)), norm(w))`; the factor, at most 1, broadcasts against w."""
        norm = self.norm(w)
        limit = expand(norm, self).to(w.dtype) * factor
        return self.project(w, torch.where(device.scalar_like(factor, w) < 1, limit, math.inf))[0], norm

    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        """`(lower, upper, cache)` with `lower <= norm(w) <= upper`; a closed form gives the norm twice."""
        norm = self.norm(w)
        return norm, norm, cache


def expand(norm: Tensor, geometry: Geometry) -> Tensor:
    """A norm `(...)` shaped to broadcast against its weights: `(..., 1, 1)` or `(..., 1)`."""
    return norm[(..., *(None,) * geometry.ndim)]


def dual_norm(geometry: Geometry, g: Tensor) -> Tensor:
    """The dual norm `max <g, d>` over `norm(d) <= 1`, which is `<g, direction(g)>`.

    Args:
        geometry: the norm.
        g: `(..., out, in)` or `(..., n)`, as the geometry takes it.

    Returns:
        Shape `g.shape[:-ndim]`, float32 for half precision.

    >>> from surefoot.geometry import RMS
    >>> dual_norm(RMS(), torch.tensor([3.0, 4.0]))  # sqrt(2) * 5
    tensor(7.0711)
    """
    dtype = torch.promote_types(g.dtype, torch.float32)
    dims = tuple(range(-geometry.ndim, 0))
    return (g.to(dtype) * geometry.direction(g).to(dtype)).sum(dims)
