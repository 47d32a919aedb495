"""Norms of the vectors along one dimension: `VectorGeometry`, and the row rules of tables `(V, d)`.

The input of an embedding is one-hot; the LM head's output enters the loss.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry import lp_balls
from surefoot.geometry.base import Cache, ChangeBounds, Geometry, NormBounds, State, Taken, Tangents
from surefoot.geometry.change_bounds import ROUNDED, UNKNOWN, Sizes, clipped_change
from surefoot.geometry.constraints import Constraint, SameLengths, SameNorm
from surefoot.linalg import device
from surefoot.linalg.bounds import max_abs, near_one


class VectorGeometry(NormBounds, Tangents, ChangeBounds):
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
        lengths = lp_balls.length(device.widened(w), self.exponent, self.dim)
        return max_abs(lengths, tuple(range(-self.ndim, 0))).reshape(w.shape[: -self.ndim]) * self.scale(w.shape)

    def direction(self, g: Tensor) -> Tensor:
        """Each vector's dual direction over `scale`."""
        return lp_balls.direction(device.widened(g), self.exponent, self.dim, 1 / self.scale(g.shape)).to(g.dtype)

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Vectors of l_s norm `1 / scale`, which bounds their entries; unknown for an overridden direction."""
        s, most = self.exponent, ROUNDED / self.scale(torch.Size(shape))
        length = most * max(1, shape[self.dim]) ** max(0, 0.5 - 1 / s)
        sizes = Sizes(entry=most, row=length) if self.dim == -1 else Sizes(entry=most, column=length)
        return Sizes() if self._redirected else sizes.within(shape[-self.ndim :])

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """1 in its own norm, rounding aside; in others as its sizes say."""
        bound, size = super().direction_norm_bound(norm, shape, smoothed), torch.Size(shape)
        norm = ChangeBounds.of(norm)
        if not isinstance(norm, VectorGeometry) or (norm.exponent, norm.dim) != (self.exponent, self.dim):
            return bound
        same = norm.ndim == self.ndim and norm.scale(size) == self.scale(size) and bound < math.inf
        return min(bound, ROUNDED) if same else bound

    def norm_bound(self, sizes: Sizes, shape: tuple[int, ...]) -> float:
        """From the largest entry and the longest vector: `|x|_s <= |x|_2^(2/s) |x|_inf^(1 - 2/s)` for s >= 2."""
        s, length = self.exponent, sizes.row if self.dim == -1 else sizes.column
        if s < 2:
            longest = length * max(1, shape[self.dim]) ** (1 / s - 0.5)
        else:
            longest = min(length, length ** (2 / s) * sizes.entry ** (1 - 2 / s))
        return float(self.scale(torch.Size(shape)) * longest)

    def clip_change_bound(self, excess: Tensor, reach: float) -> Tensor:
        """`clipped_change` where the nearest point is radial or an entry's, for exponent 1 the default, else inf."""
        if self.exponent in (2, math.inf):
            return clipped_change(excess, reach)
        return super().clip_change_bound(excess, reach) if self.exponent == 1 else torch.full_like(excess, math.inf)

    def retract(self, w: Tensor) -> Tensor:
        """Each vector over its own norm, as the direction is for exponent 2 alone; of entries the sign."""
        if math.isinf(self.exponent):
            return self.direction(w)
        size = lp_balls.length(w, self.exponent, self.dim)
        return w / torch.where(size == 0, 1, size * self.scale(w.shape))

    def spread(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Norms of vectors; sizes of entries."""
        if not w.numel():
            return super().spread(w)
        sizes = w.abs() if math.isinf(self.exponent) else lp_balls.length(w, self.exponent, self.dim)
        return torch.aminmax(sizes.flatten(-self.ndim) * self.scale(w.shape), dim=-1)

    def tangent(self, w: Tensor, m: Tensor, constraint: Constraint, cache: State) -> Taken:
        """The maximiser for vectors of fixed length, along `dim` or, where the norm's exponent is 2, across it."""
        s = self.exponent
        if not isinstance(constraint, SameLengths) or (s == 2 and constraint.dim == self.dim):
            return super().tangent(w, m, constraint, cache)
        unit = constraint.unit(w)
        part = constraint.project(w, near_one(m.to(unit.dtype), (-2, -1)))
        if math.isinf(s) or constraint.dim == self.dim:  # the largest entry's norm has no dimension of its own
            d = lp_balls.tangent(part, unit, s, constraint.dim, 1 / self.scale(m.shape))
        elif s == 2:
            d = lp_balls.tangent_across(part, unit, self.dim, constraint.dim) / self.scale(m.shape)
        else:
            return super().tangent(w, m, constraint, cache)
        return d.to(m.dtype), cache

    def extremes(self, radius: float, shape: torch.Size) -> Constraint:
        """The lengths of the vectors, where the norm is of Euclidean ones."""
        return SameLengths(self.dim) if self.ndim == 2 and self.exponent == 2 else SameNorm()

    def root_square(self, shape: torch.Size) -> float:
        """Of equal entries, as by default."""
        length = max(1, shape[self.dim]) ** (1 / self.exponent)
        return float(math.sqrt(math.prod(shape[-self.ndim :])) / (length * self.scale(shape)))

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Each vector onto its ball of radius `radius / scale`."""
        precise = device.widened(w)
        limit = device.scalar_like(radius, w, precise.dtype) / self.scale(w.shape)
        return lp_balls.project(precise, limit, self.exponent, self.dim).to(w.dtype), cache


class MeanGeometry(VectorGeometry):
    """A norm by `mean_q(x) = mean(|x|**q)**(1/q)` of vectors along the last dimension, of a field q."""

    q: float

    def __post_init__(self) -> None:
        if not self.q >= 1:
            raise ValueError(f"{type(self).__name__}'s exponent must be at least 1, not {self.q}")

    @property
    def exponent(self) -> float:
        """q, the exponent of the mean."""
        return self.q

    def scale(self, shape: torch.Size) -> float:
        """`n**(-1/q)`."""
        return float(max(1, shape[-1]) ** (-1 / self.q))


class RootMeanSquare(VectorGeometry):
    """A norm by the RMS of vectors along the last dimension."""

    exponent: ClassVar[float] = 2.0

    def scale(self, shape: torch.Size) -> float:
        """`1 / sqrt(n)`."""
        return 1 / math.sqrt(max(1, shape[-1]))


class _Table(VectorGeometry):
    """A norm of tables whose input is one-hot: the layer's output is a row."""

    def lipschitz(self, w: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """The largest difference of two rows: at least that from the first row, at most twice the norm."""
        return (self.norm(w - w[..., :1, :]) if w.numel() else lower), 2 * upper


@dataclass(frozen=True)
class RowMean(MeanGeometry, _Table):
    """Embedding: `max_i mean_q(E_i)`, one-hot -> q-mean; each token moves by a full step of its own.

    Args:
        q: exponent of the mean, `mean_q(x) = mean(|x|**q)**(1/q)`; 2 is the RMS, inf the largest entry.

    Raises:
        ValueError: an exponent below 1.

    Source: MOGA, Algorithm 1 (embedding rule).

    >>> RowMean(2.0).norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))  # 5 / sqrt(2)
    tensor(3.5355)
    """

    q: float = 2.0


@dataclass(frozen=True)
class RowRMS(RootMeanSquare, _Table):
    """Embedding: `max_i rms(E_i)`, direction `G_i / rms(G_i)` for each row; the same as `RowMean(2)`.

    Source: "Beyond MuP 3", embedding.

    >>> RowRMS().direction(torch.tensor([[2.0, -2.0], [0.0, 0.0]]))
    tensor([[ 1., -1.],
            [ 0.,  0.]])
    """


@dataclass(frozen=True)
class HeadRMS(VectorGeometry):
    """LM head: `d * max_i rms(w_i)`, the Lipschitz bound of the loss; the same as `MeanOperator(2, inf)`.

    Source: "Beyond MuP 3", LM head.

    >>> HeadRMS().norm(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))  # 2 * 5 / sqrt(2)
    tensor(7.0711)
    """

    exponent: ClassVar[float] = 2.0

    def scale(self, shape: torch.Size) -> float:
        """`sqrt(d)`: with the row's Euclidean length it makes `d * rms`."""
        return math.sqrt(max(1, shape[-1]))
