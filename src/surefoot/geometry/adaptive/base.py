"""Directions that depend on more than the smoothed gradient: on what they remember, or on the weight."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Around, ChangeBounds, Extent, Geometry, expand
from surefoot.geometry.constraints import Constraint, SameNorm
from surefoot.geometry.lp_base import VectorGeometry
from surefoot.geometry.sizes import UNKNOWN, Sizes
from surefoot.geometry.spectral import Spectral
from surefoot.linalg.bounds import max_abs

ROUNDED = 1 + 1e-5

Taken = tuple[Tensor, dict[str, Tensor]]
"""A direction, and what it remembers for the next step."""


class Adaptive(Around):
    """A norm whose direction is changed: rescaled by its history, by the gradient's size, or against the weight.

    A subclass is a frozen dataclass with the field `norm_of`, the norm whose direction it changes, and defines `take`.
    That norm may be adaptive itself: `RadialBrake(NormalisedRows())` takes rows, then the brake. The weight's norm, its
    bounds and its projections are the innermost one's. The direction is no longer the maximiser of `<g, d>`;
    `direction_norm_bound` says how long it can be.

    >>> DualScaled(Spectral()).plain
    Spectral(method='auto')
    """

    extent: ClassVar[Extent] = Extent.WHOLE
    """What `take` cannot be computed without: `ROW` if of its own independent problem alone."""

    reads: ClassVar[frozenset[str]] = frozenset({"m", "w"})
    """What `take` looks at: the smoothed gradient m, the weight w."""

    owned: ClassVar[tuple[str, ...]] = ()
    """What is remembered by the process alone that steps a matrix, where several hold it."""

    @abstractmethod
    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction of a step.

        Args:
            w: weights `(..., out, in)` or `(..., n)`.
            m: smoothed gradients, w's shape.
            active: 1 for problems that take a step, 0 for those that keep what is remembered of them.
            memory: at first `init_memory(w)`; donated.

        Returns:
            `(direction, memory)`, the direction 0 where m is.
        """

    def inner(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction that is changed; arguments and results as of `take`."""
        norm = self.norm_of
        return norm.take(w, m, active, memory) if isinstance(norm, Adaptive) else (norm.direction(m), memory)

    def init_memory(self, w: Tensor) -> dict[str, Tensor]:
        """That of `norm_of`."""
        return self.norm_of.init_memory(w) if isinstance(self.norm_of, Adaptive) else {}

    @property
    def changes(self) -> tuple[Adaptive, ...]:
        """This one, and those within."""
        return (self, *(self.norm_of.changes if isinstance(self.norm_of, Adaptive) else ()))

    @property
    def plain(self) -> Geometry:
        """The norm without any change."""
        return self.changes[-1].norm_of

    def tangent(
        self, w: Tensor, m: Tensor, constraint: Constraint, cache: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The part that meets the constraint of a direction m that `take` returned, scaled to norm 1 at most."""
        if isinstance(constraint, SameNorm):
            return m, cache
        d = constraint.project(w, constraint.project(w, m))  # the second takes away what the first one rounds
        return d / expand(self.norm(d), self.plain).clamp_min(1).to(d.dtype), cache


@dataclass(frozen=True)
class DualScaled(Adaptive):
    """The direction times the dual norm of the smoothed gradient: steepest descent with the length that it implies.

    `d = |m|_* direction(m)` is the minimiser of `<m, -d> + |d|^2 / 2`: steps shrink with the gradient, and no bound on
    their norm holds beforehand: of gradients above 1e15 they overflow.

    Args:
        norm_of: the norm.

    Source: J. Bernstein, L. Newhouse, "Old optimizer, new norm", 2024, arXiv:2409.20325, proposition 1.

    >>> import surefoot as sf
    >>> DualScaled(sf.RMS()).take(torch.zeros(2), torch.tensor([3.0, 4.0]), 1.0, {})[0]  # n m for the RMS norm
    tensor([6., 8.])
    """

    reads: ClassVar[frozenset[str]] = frozenset({"m"})

    norm_of: Geometry = Spectral()  # noqa: RUF009

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """`<m, d> d`, the attained part of the dual norm."""
        d, memory = self.inner(w, m, active, memory)
        attained = (m * d).sum(tuple(range(-self.norm_of.ndim, 0)))
        return d * expand(attained, self.norm_of), memory


@dataclass(frozen=True)
class RMSScaled(Adaptive):
    """The direction times the RMS of the smoothed gradient, over each problem (a row, an entry) on its own.

    `d = rms(m) direction(m)`. What `RowAdam` and `Adam` give, m over the root of its own history, has an RMS of at most
    `L = (1 - b1) / sqrt((1 - b2) (1 - b1^2/b2))`, and of less where gradients change from step to step. So noise
    shortens the steps, and none is longer than L in the norm.

    Args:
        norm_of: the norm.

    Source: Cauchy-Schwarz, see `Adam.largest`.

    >>> import surefoot as sf
    >>> RMSScaled(sf.HeadRMS()).take(torch.zeros(1, 2), torch.tensor([[0.6, -0.8]]), 1.0, {})[0]  # m / d
    tensor([[ 0.3000, -0.4000]])
    """

    extent: ClassVar[Extent] = Extent.ROW
    reads: ClassVar[frozenset[str]] = frozenset({"m"})

    norm_of: Geometry = Spectral()  # noqa: RUF009

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction times `rms(m)`, of entries `|m|`; under Euclidean norms of vectors m times a number."""
        norm = self.norm_of
        if isinstance(norm, VectorGeometry) and not norm._redirected and norm.exponent == 2 and m.numel():
            return m * (1 / (norm.scale(m.shape) * math.sqrt(m.shape[norm.dim]))), memory
        (d, memory), dims = self.inner(w, m, active, memory), tuple(self.norm_of.couples)
        if not dims or not m.numel():
            return d * m.abs(), memory
        peak = max_abs(m, dims)
        square = (m / torch.where(peak == 0, 1, peak)).square().mean(dims, keepdim=True)
        return d * (peak * square.sqrt()), memory

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """The direction's times the largest RMS; inf where the smoothed gradient has no bound."""
        known, dims = smoothed.within(shape), self.norm_of.couples
        columns, rows = max(1, shape[-1]), max(1, math.prod(shape))
        over = {frozenset[int](): known.entry, frozenset({-1}): known.row / math.sqrt(columns)}
        length = over.get(dims, known.whole / math.sqrt(rows))
        return (
            ROUNDED * length * ChangeBounds.of(self.norm_of).direction_norm_bound(norm, shape)
            if math.prod(shape)
            else 0.0
        )


@dataclass(frozen=True)
class RadialBrake(Adaptive):
    """The direction with less of what only lengthens the weight: `d + (1 - keep) max(0, -<d, w>) w / |w|^2`.

    A step is `w - eta d`: where `-<d, w> > 0` it moves outward, along the weight itself; keep multiplies that part.

    Args:
        norm_of: the norm.
        keep: part of the outward movement that remains, 0 to 1.

    Raises:
        ValueError: a part outside 0 to 1.

    >>> w = torch.tensor([[1.0, 0.0]])
    >>> RadialBrake(keep=0.0).take(w, torch.tensor([[-1.0, 0.0]]), 1.0, {})[0] + 0
    tensor([[0., 0.]])
    """

    norm_of: Geometry = Spectral()  # noqa: RUF009
    keep: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ValueError(f"RadialBrake keeps a part from 0 to 1 of the outward movement, not {self.keep}")

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction, then the brake, over the whole weight of each problem's matrix."""
        d, memory = self.inner(w, m, active, memory)
        dims = tuple(range(-self.norm_of.ndim, 0))
        outward = -(d * w).sum(dims, keepdim=True).clamp_max(0)
        square = w.square().sum(dims, keepdim=True)
        share = outward / torch.where(square == 0, 1, square)
        return torch.addcmul(d, share * (1 - self.keep), w), memory

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """That of the direction, and of what is taken back: at most as long as it in the Frobenius norm."""
        step = ChangeBounds.of(self.norm_of)
        sizes, own = step.direction_sizes(shape, smoothed), step.direction_norm_bound(norm, shape, smoothed)
        back = ChangeBounds.of(norm).norm_bound(Sizes(whole=sizes.within(shape).whole).within(shape), shape)
        return own + (1 - self.keep) * back


@dataclass(frozen=True)
class UpdateFloor(Adaptive):
    """The direction, longer where the weight is large: its norm is at least `ratio` times the weight's.

    A step then changes the weight by `eta ratio` of its norm at least, however large it has grown; the norm of a step
    has no bound beforehand. The weight's grows to `|w| + eta max(ratio |w|, |d|)` in a step at most, d the direction
    of `norm_of` (norm 1 unless that is adaptive): by a factor of `1 + eta ratio` only once `ratio |w|` is the larger.

    Args:
        norm_of: the norm.
        ratio: smallest norm of a direction over that of the weight.

    Raises:
        ValueError: a ratio that is not positive and finite.

    >>> w, m = torch.full((1, 2), 8.0), torch.ones(1, 2)
    >>> import surefoot as sf
    >>> UpdateFloor(sf.RowRMS(), 0.5).take(w, m, 1.0, {})[0]
    tensor([[4., 4.]])
    """

    norm_of: Geometry = Spectral()  # noqa: RUF009
    ratio: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"UpdateFloor's ratio must be positive and finite, not {self.ratio}")

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """`max(1, ratio |w| / |d|) d`, a direction having norm 1 unless it has been changed."""
        d, memory = self.inner(w, m, active, memory)
        floor = self.ratio * self.norm_of.norm(w)
        if isinstance(self.norm_of, Adaptive):
            length = self.norm_of.norm(d)
            floor = floor / torch.where(length == 0, 1, length)
        return d * expand(floor.clamp_min(1), self.norm_of).to(m.dtype), memory
