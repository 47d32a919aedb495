"""`VectorGeometry`: the largest `l_s` norm of the vectors along one dimension, times a width factor."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from surefoot.geometry import lp_balls
from surefoot.geometry.base import Cache, Geometry
from surefoot.linalg import device
from surefoot.linalg.max_abs import max_abs


class VectorGeometry(Geometry):
    """`norm(w) = scale(shape) * max_i |w_i|_s` over the vectors `w_i` along `dim`."""

    dim: int = -1

    @property
    @abstractmethod
    def exponent(self) -> float:
        """s, the exponent of the norm of one vector."""

    @abstractmethod
    def scale(self, shape: torch.Size) -> float:
        """The width factor for weights of this shape."""

    @property
    def couples(self) -> frozenset[int]:
        """The vector's dimension; nothing for the largest entry."""
        return frozenset() if self.exponent == float("inf") else frozenset({self.dim})

    def norm(self, w: Tensor) -> Tensor:
        """`scale * max_i |w_i|_s`."""
        w = w.to(torch.promote_types(w.dtype, torch.float32))
        lengths = lp_balls.length(w, self.exponent, self.dim)
        for dim in range(-self.ndim, 0):
            lengths = max_abs(lengths, dim)
        return lengths.reshape(w.shape[: -self.ndim]) * self.scale(w.shape)

    def direction(self, g: Tensor) -> Tensor:
        """Each vector's dual direction over scale."""
        precise = g.to(torch.promote_types(g.dtype, torch.float32))
        return lp_balls.direction(precise, self.exponent, self.dim, 1 / self.scale(g.shape)).to(g.dtype)

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Each vector onto its ball of radius `radius / scale`."""
        precise = w.to(torch.promote_types(w.dtype, torch.float32))
        limit = device.scalar_like(radius, w, precise.dtype) / self.scale(w.shape)
        return lp_balls.project(precise, limit, self.exponent, self.dim).to(w.dtype), cache
