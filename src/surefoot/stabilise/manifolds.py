"""Training on manifolds of matrices: rows or columns of fixed length, orthogonal matrices; steps along them."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry import MeanOperator, RowRMS, lp_balls
from surefoot.geometry.base import Cache, ChangeBounds, Eta, Geometry, Tangents
from surefoot.geometry.change_bounds import Sizes
from surefoot.geometry.constraints import Constraint, SameLengths
from surefoot.linalg.device import widened
from surefoot.stabilise.base import NORM, Ball, Checked, Known, Limit, Moved, Stabiliser, along
from surefoot.stabilise.sphere import Normalise, scaled_to


@dataclass(frozen=True)
class _Lengths(Checked):
    """Vectors along `dim` of fixed length: the best step that keeps them to first order, then each is rescaled."""

    radius: float | None = field(default=None, metadata=NORM)
    dim: ClassVar[int]
    vector: ClassVar[str]

    def constraint(self, geometry: Geometry, ball: Geometry, shape: torch.Size) -> Constraint | None:
        """The lengths."""
        return SameLengths(self.dim)

    def direct(
        self, w: Tensor, m: Tensor, geometry: Geometry, ball: Geometry, cache: Cache = None, active: Eta = 1.0
    ) -> Moved:
        """The tangent one; entries that rest have no part in what a vector's step keeps."""
        if isinstance(active, Tensor):
            w, m = torch.where(active > 0, w, 0), torch.where(active > 0, m, 0)
        return super().direct(w, m, geometry, ball, cache, active)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then back onto the spheres."""
        stepped = along(w, d, eta)
        return scaled_to(stepped, w, _lengths(stepped, self.dim), self._target(w, ball)), cache

    def scaled(self, unit: float, shape: tuple[int, ...]) -> Stabiliser:  # type: ignore[override]
        """Radius times unit; a vector is one row: `Normalise`."""
        same = super().scaled(unit, shape)
        return same if len(shape) > 2 else Normalise(same.radius)

    def _target(self, w: Tensor, ball: Geometry) -> Tensor:
        now = _lengths(w, self.dim)
        if self.radius is None:
            return now
        vectors = max(1, w.shape[-3 - self.dim])  # rows for -1, columns for -2
        return torch.where(now > 0, self.radius * Tangents.of(ball).root_square(w.shape) / math.sqrt(vectors), 0)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, orthogonal to the vectors, and the way back: by their factors, or by the lengths that they lose."""
        now, target = _lengths(w, self.dim).flatten(-2), self._target(w, ball).flatten(-2)
        shape = tuple(w.shape[-2:])
        if self.dim == -1:
            one, step = Sizes(row=1.0), eta * known.longest(RowRMS()) * math.sqrt(shape[1])
        else:
            one, step = Sizes(column=1.0), eta * known.longest(MeanOperator(1, 2)) * math.sqrt(shape[0])
            step /= max(1, shape[1])
        ends = torch.stack([now, torch.where(now > 0, now.hypot(torch.full_like(now, step)), 0)])
        gap, factor = (ends - target).abs().amax(0), torch.where(ends > 0, (target / ends - 1).abs(), 0).amax(0)
        reach = eta * known.longest(ball)
        each, whole = (ChangeBounds.of(ball).norm_bound(x.within(shape), shape) for x in (one, Sizes(whole=1.0)))
        ways = _largest(factor) * (known.upper + reach), _largest(gap) * each, gap.square().sum(-1).sqrt() * whole
        return reach + torch.stack(ways).amin(0)

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """Of each row or column."""
        if self.radius is None:
            return f"each {self.vector}'s length = initial"
        return f"each {self.vector}'s length = {self.radius:.4g} in the role's unit, or 0 where it is 0"


@dataclass(frozen=True)
class RowSphere(_Lengths):
    """Each row keeps its Euclidean length: the best step with `<w_i, d_i> = 0` for every row i, then a rescaling.

    The step maximises `<m, d>` over `norm(d) <= 1`:

    - Under norms of rows (row RMS, LM head, MOGA's rows, signs) each row has a closed form or one equation.
    - Under the spectral norm `linalg.tangent.rows_msign` finds the multipliers within 3 % of the best, and proves it as
      it goes (on an accelerator, where it cannot take longer, hard data may get less). It keeps one number per row from
      step to step: 4 `d_out` bytes per matrix.
    - Under MOGA's column norms with q = 2 it is near the best likewise, without proof.
    - Under others it is the tangent part of the plain direction, scaled to norm 1.

    A vector (a gain, a bias) is one row, under its own norm: `Normalise`.

    Args:
        radius: the length in the unit of the role: a row's RMS output on isotropic inputs of RMS 1 for a linear layer,
            its RMS for an embedding, `d` times that for a head. None keeps each row's length. A zero row stays zero.

    Raises:
        ValueError: a radius that is not positive and finite.

    Source: Y. Fu et al., "Nemotron-Flash", 2025, which rescales without the tangent step; "Beyond MuP 4" names it.

    >>> RowSphere().promise, RowSphere(2.0).scaled(1.0, (1, 8)).promise
    ("each row's length = initial", 'norm = 2, or 0 where it is 0')
    >>> from surefoot.geometry import RowRMS
    >>> w, m = torch.tensor([[3.0, 4.0]]), torch.tensor([[-4.0, 13.0]])
    >>> d, _ = RowSphere().direct(w, m, RowRMS(), RowRMS())  # m less its part along w is (-8, 6)
    >>> RowSphere().move(w, d, 5 / 2**0.5, RowRMS())[0]
    tensor([[4.9497, 0.7071]])
    """

    dim: ClassVar[int] = -1
    vector: ClassVar[str] = "row"


@dataclass(frozen=True)
class ColumnSphere(_Lengths):
    """Each column keeps its Euclidean length: as `RowSphere`, with one number a column under the spectral norm.

    Args:
        radius: the length in the unit of the role, such that the matrix is as large as under `RowSphere(radius)`; None
            keeps each column's length. A zero column stays zero.

    Raises:
        ValueError: a radius that is not positive and finite.

    Source: Y. Fu et al., "Nemotron-Flash", 2025.

    >>> ColumnSphere().promise
    "each column's length = initial"
    """

    dim: ClassVar[int] = -2
    vector: ClassVar[str] = "column"


@dataclass(frozen=True)
class Stiefel(Ball):
    """Orthogonal matrices: the best step along them, then the nearest one; every singular value is radius.

    The step maximises `<m, d>` over `norm(d) <= 1` with `wᵀ d` skew, or `w dᵀ` for a wide w. Under the spectral norm it
    is `msign(m wᵀ - w mᵀ) w`, for rectangular w too (`linalg.tangent.stiefel_msign`). Under other norms it is the
    tangent part of the plain direction, which is not the best. In a table each row has norm radius instead; a vector is
    one row, under its own norm: `Normalise`. A singular value of 0 stays 0 under spectral steps but becomes radius at
    once under others: start from full rank, as `Plan.initialise_` does.

    Cost: about 3 directions a step: an msign of the skew matrix, at most twice the smaller side, and one of the result.

    Args:
        radius: in the unit of the role.

    Raises:
        ValueError: a radius that is not positive and finite.

    Source: J. Bernstein, "Modular manifolds", 2025; the closed form is ours.

    >>> Stiefel(1.0).promise, Stiefel(1.0).scaled(1.0, (1, 8)).promise
    ('extreme point (spectral: orthogonal), norm = 1, or 0 where it is 0', 'norm = 1, or 0 where it is 0')
    """

    told: ClassVar[str] = "extreme point (spectral: orthogonal), {norm} = {radius:.4g}, or 0 where it is 0"

    def constraint(self, geometry: Geometry, ball: Geometry, shape: torch.Size) -> Constraint | None:
        """Equal singular values, or lengths of rows."""
        return Tangents.of(ball).extremes(self.radius, shape)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then the nearest point of the manifold."""
        there = Tangents.of(ball).retract(along(w, d, eta)) * self.radius
        return torch.where((w != 0).any(tuple(range(-ball.ndim, 0)), keepdim=True), there, w), cache

    def scaled(self, unit: float, shape: tuple[int, ...]) -> Stabiliser:  # type: ignore[override]
        """Radius times unit; a vector is one row: `Normalise`."""
        return super().scaled(unit, shape) if len(shape) > 2 else Normalise(self.radius * unit)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step and the way back, which is the shortest one; at most both norms together.

        The way is as long as the singular value (the row) that is furthest from the radius after the step is from it: a
        step lifts those that are 0, too, and then they become the radius at once.
        """
        least, most = Tangents.of(ball).spread(w)
        away = torch.maximum(most - self.radius, self.radius - least)
        reach = eta * known.longest(ball) * (most / self.radius).clamp_min(1)  # the closed form turns w as it is
        change = torch.minimum(2 * reach + away, known.upper + self.radius * (1 + 1e-4))
        return torch.where(known.upper == 0, 0, change)


def _largest(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (1, 0)).amax(-1)


def _lengths(w: Tensor, dim: int) -> Tensor:
    return lp_balls.length(widened(w), 2, dim)
