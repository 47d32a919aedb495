"""Norms of vectors `(..., n)` (gains, biases, scalars) and the entrywise norm of matrices (Frobenius)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Around, Cache, ChangeBounds, Geometry, State, Taken
from surefoot.geometry.change_bounds import ROUNDED, UNKNOWN, Sizes, clipped_change
from surefoot.geometry.constraints import Constraint
from surefoot.geometry.vectors import MeanGeometry, RootMeanSquare, VectorGeometry
from surefoot.linalg import device


@dataclass(frozen=True)
class MaxNorm(VectorGeometry):
    """Gain, scalar: `max |w_i|` (a diagonal linear layer), direction `sign(g)`, projection a clamp.

    >>> MaxNorm().direction(torch.tensor([2.0, 0.0, -1e-30]))
    tensor([ 1.,  0., -1.])
    """

    ndim = 1
    exponent: ClassVar[float] = math.inf

    def scale(self, shape: torch.Size) -> float:
        """1 for every shape."""
        return 1.0


class _Bias(VectorGeometry):
    ndim = 1

    def lipschitz(self, w: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """0: a bias is added, whatever the input."""
        return torch.zeros_like(lower), torch.zeros_like(upper)


@dataclass(frozen=True)
class VectorMean(MeanGeometry, _Bias):
    """Bias: `mean_q(b) = mean(|b|**q)**(1/q)`; RMS for q = 2, the largest entry for q = inf.

    Args:
        q: exponent of the mean, at least 1.

    Raises:
        ValueError: an exponent below 1.

    Source: MOGA, Algorithm 1, the alternative rule for biases.

    >>> VectorMean(4.0).norm(torch.tensor([2.0, 0.0, 0.0, 0.0]))  # 2 / 4**(1/4)
    tensor(1.4142)
    """

    q: float


@dataclass(frozen=True)
class RMS(RootMeanSquare, _Bias):
    """Bias: `rms(b)`, direction `g / rms(g)`, projection radial.

    >>> RMS().norm(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    tensor(2.5000)
    """


@dataclass(frozen=True)
class Frobenius(ChangeBounds):
    """`|W|_F / sqrt(d_out)`: the RMS of a matrix's output over isotropic inputs of RMS 1.

    Weaker than `Spectral` (it bounds the average input, not the worst); the norm of Hyperball's sphere.

    >>> Frobenius().norm(torch.eye(4))
    tensor(1.)
    """

    couples: ClassVar[frozenset[int]] = frozenset({-2, -1})

    def norm(self, w: Tensor) -> Tensor:
        """`|W|_F / sqrt(d_out)`."""
        return RMS().norm(w.flatten(-2)) * math.sqrt(w.shape[-1])

    def direction(self, g: Tensor) -> Tensor:
        """`sqrt(d_out) G / |G|_F`."""
        return (RMS().direction(g.flatten(-2)) / math.sqrt(max(1, g.shape[-1]))).reshape(g.shape)

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Of Frobenius norm `sqrt(d_out)`; unknown for an overridden direction."""
        return Sizes() if self._redirected else Sizes(whole=ROUNDED * math.sqrt(shape[-2])).within(shape[-2:])

    def norm_bound(self, sizes: Sizes, shape: tuple[int, ...]) -> float:
        """The whole over `sqrt(d_out)`."""
        return sizes.whole / math.sqrt(max(1, shape[-2] if len(shape) > 1 else 1))

    def clip_change_bound(self, excess: Tensor, reach: float) -> Tensor:
        """`clipped_change`: the nearest point is radial."""
        return clipped_change(excess, reach)

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Scaled down to the radius."""
        limit = device.scalar_like(radius, w, torch.promote_types(w.dtype, torch.float32))
        limit = limit.expand((*w.shape[:-2], 1, 1))[..., 0]
        flat, cache = RMS().project(w.flatten(-2), limit / math.sqrt(max(1, w.shape[-1])), cache)
        return flat.reshape(w.shape), cache


@dataclass(frozen=True)
class Identity(Around):
    """No norm: the direction is the argument, of any shape. For methods that compute their own step, such as Adam's.

    None of the laws behind bounds holds for it; its norm, used for metrics, is the largest entry.

    >>> Identity().direction(torch.tensor([3.0, 0.5]))
    tensor([3.0000, 0.5000])
    """

    ndim = 1

    @property
    def norm_of(self) -> Geometry:  # type: ignore[override]
        """For metrics, the largest entry."""
        return MaxNorm()

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Those of the argument."""
        return smoothed.within(shape)

    def norm_bound(self, sizes: Sizes, shape: tuple[int, ...]) -> float:
        """The largest entry."""
        return sizes.entry

    def direction(self, g: Tensor) -> Tensor:
        """g itself, unchanged."""
        return g

    def tangent(self, w: Tensor, m: Tensor, constraint: Constraint, cache: State) -> Taken:
        """The tangent part of m, scaled so that no entry exceeds m's largest."""
        d = constraint.project(w, m)
        if d is m or not m.numel():
            return d, cache
        dims = tuple(range(-min(2, m.ndim), 0))
        before, after = (x.abs().amax(dims, keepdim=True) for x in (m, d))
        return d * torch.where(after > before, before / after, 1), cache
