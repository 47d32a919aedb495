"""`VectorGeometry`: the largest `l_s` norm of the vectors along one dimension, times a width factor."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from surefoot.geometry import balls
from surefoot.geometry.base import Cache, Geometry
from surefoot.linalg import host


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
        lengths = balls.length(w, self.exponent, self.dim)
        for dim in range(-self.ndim, 0):
            lengths = balls.peak(lengths, dim)
        return lengths.reshape(w.shape[: -self.ndim]) * self.scale(w.shape)

    def direction(self, g: Tensor) -> Tensor:
        """Each vector's dual direction over scale."""
        precise = g.to(torch.promote_types(g.dtype, torch.float32))
        return balls.direction(precise, self.exponent, self.dim, 1 / self.scale(g.shape)).to(g.dtype)

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Each vector onto its ball of radius `radius / scale`."""
        precise = w.to(torch.promote_types(w.dtype, torch.float32))
        limit = host.number(radius, w, precise.dtype) / self.scale(w.shape)
        return balls.project(precise, limit, self.exponent, self.dim).to(w.dtype), cache
