"""`Geometry`: a norm in natural units, with its direction, projection and bounds."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from surefoot.geometry.change_bounds import UNKNOWN, Sizes
from surefoot.geometry.constraints import Constraint, SameNorm
from surefoot.geometry.returned import direction_of
from surefoot.linalg import device
from surefoot.linalg.bounds import near_one

State = dict[str, Tensor]
"""Named tensors that are kept from step to step, such as momentum or singular-vector estimates: optimizer state."""

Cache = State | None
"""The same, or nothing at first."""

Taken = tuple[Tensor, State]
"""A direction or a weight, and what is kept for the next step."""

Eta = float | Tensor
"""A step size in natural units, or a mask of what moves; a tensor broadcasts against the weight."""


class Extent(IntEnum):
    """How much of a weight a part of a step (smoothing, direction, move) must see to compute one entry."""

    ENTRY = 0
    """The entry itself."""
    ROW = 1
    """Its row, or its independent problem (`Geometry.couples`)."""
    NORM = 2
    """Its row, and the norm of the whole weight or whether that is zero."""
    WHOLE = 3
    """All of the weight's block."""


class Geometry(ABC):
    """A norm on matrices `(..., out, in)` or vectors `(..., n)`; leading dimensions are a batch.

    The norm carries its width factor ("natural units"): 1 means that the layer changes its output by Theta(1) RMS at
    every width. `couples`, `norm`, `direction` and `project` define a geometry; all else that schemes need
    (`NormBounds`, `NormEstimates`, `Tangents`, `ChangeBounds`) follows. `surefoot.check` tests their laws.

    >>> import surefoot as sf
    >>> class HalfMaximum(sf.Geometry):
    ...     couples = frozenset()
    ...     def norm(self, w): return 2 * w.abs().amax((-2, -1))
    ...     def direction(self, g): return g.sign() / 2
    ...     def project(self, w, radius, cache=None): return w.clamp(-radius / 2, radius / 2), cache
    >>> max(sf.check(HalfMaximum()).values()) < 1e-6
    True
    """

    ndim: int = 2
    """How many trailing dimensions one norm is taken over: 2 for matrices, 1 for vectors."""

    costly: bool = False
    """True if `project` costs about as much as a direction; `PostClip` then keeps a bound, and projects rarely."""

    @property
    @abstractmethod
    def couples(self) -> frozenset[int]:
        """The dimensions that one independent problem spans: {} sign, {-1} rows, {-2, -1} spectral."""

    @abstractmethod
    def norm(self, w: Tensor) -> Tensor:
        """`norm(w)` in natural units, shape `w.shape[:-ndim]`; float32 for half precision."""

    @abstractmethod
    def direction(self, g: Tensor) -> Tensor:
        """Maximiser of `<g, d>` over `norm(d) <= 1`; 0 where g is 0. A new tensor of g's dtype, or g itself."""

    @abstractmethod
    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Nearest point (Frobenius) with `norm <= radius`, and the cache; w itself, bit for bit, if it is inside.

        Args:
            w: weights.
            radius: in natural units; a tensor broadcasts against w, for instance `(..., 1, 1)`.
            cache: returned as it is, unless the geometry keeps something.

        Returns:
            `(projected weights, cache)`.
        """


class Delegate(Geometry):
    """A norm defined by another, `norm_of`, whose parts it has."""

    norm_of: Geometry

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """That of `norm_of`."""
        return self.norm_of.ndim

    @property
    def couples(self) -> frozenset[int]:
        """Those of `norm_of`."""
        return self.norm_of.couples

    def norm(self, w: Tensor) -> Tensor:
        """That of `norm_of`."""
        return self.norm_of.norm(w)

    def direction(self, g: Tensor) -> Tensor:
        """That of `norm_of`."""
        return direction_of(self.norm_of, g)

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """That of `norm_of`."""
        return self.norm_of.project(w, radius, cache)


class Part(Geometry):
    """Methods of a norm that only some schemes need. A norm derives from a part to improve its defaults."""

    @classmethod
    def of(cls, geometry: Geometry) -> Self:
        """The geometry, or the one it delegates to, if that has this part; else a wrapper by its four methods."""
        if isinstance(geometry, cls):
            return geometry
        if isinstance(geometry, Delegate):
            if all(getattr(type(geometry), name) is getattr(Delegate, name) for name in Geometry.__abstractmethods__):
                return cls.of(geometry.norm_of)
        elif stray := [name for name in vars(cls) if name[0] != "_" and hasattr(geometry, name)]:
            raise TypeError(f"{geometry} defines `{stray[0]}`: derive it from `{cls.__name__}`, whose method that is")
        return cast("Self", Completed(geometry))


class NormBounds(Part):
    """What clips, spheres and reports need: bounds on the norm that are cheap, or true despite rounding."""

    def is_zero(self, w: Tensor) -> Tensor:
        """Whether each weight is zero, broadcasting against w, `(..., 1, 1)` or `(..., 1)`."""
        return (w == 0).all(tuple(range(-self.ndim, 0)), keepdim=True)

    def certificate(self, w: Tensor) -> Tensor:
        """Upper bound on `norm(w)` that no rounding invalidates, computed without a device synchronisation."""
        return self.norm(w)

    def is_below(self, w: Tensor, limit: Tensor) -> Tensor:
        """True where `norm(w) <= limit` is certain; limit and result have the shape of `norm(w)`."""
        return self.norm(w) <= limit

    def quick_bound(self, w: Tensor) -> Tensor:
        """Upper bound on `norm(w)` from one pass over w, however loose; by default the certificate."""
        return self.certificate(w)

    def shrink(self, w: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """`(project(w, factor * norm(w)), norm(w))`; the factor, at most 1, broadcasts against w."""
        norm = self.norm(w)
        limit = expand(norm, self).to(w.dtype) * factor
        return self.project(w, torch.where(device.scalar_like(factor, w) < 1, limit, math.inf))[0], norm

    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        """`(lower, upper, cache)` with `lower <= norm(w) <= upper`; the norm twice where it is cheap."""
        return (norm := self.norm(w)), norm, cache


class NormEstimates(Part):
    """What clips without a guarantee and the monitor need: estimates by vectors kept from step to step."""

    def init_vectors(self, w: Tensor, vectors: int) -> State:
        """Initial cache of `estimate_norm` and `clip_leading` for weights like w; empty where the norm is cheap."""
        return {}

    def estimate_norm(self, w: Tensor, cache: State) -> Taken:
        """`(lower bound on the norm, improved cache)` from the cached vectors; the norm itself where it is cheap."""
        return self.norm(w), cache

    def clip_leading(self, w: Tensor, radius: float | Tensor, cache: State) -> Taken:
        """`(w clipped to the radius on the span of the cached vectors, cache)`; `project` where the norm is cheap."""
        return self.project(w, radius)[0], cache


class Tangents(Part):
    """What steps along spheres and manifolds need: the best direction under a constraint, and the way back."""

    def init_tangent(self, w: Tensor, constraint: Constraint) -> State:
        """Initial cache of `tangent` for weights like w; empty where nothing is kept from step to step."""
        return {}

    def tangent(self, w: Tensor, m: Tensor, constraint: Constraint, cache: State) -> Taken:
        """`(d, cache)`: the maximiser of `<m, d>` over `norm(d) <= 1` that meets the constraint at w.

        By default the plain direction for `SameNorm`, else the tangent part of the direction of m's tangent part, of
        norm 1 at most: the maximiser only under Euclidean norms (of the whole, or of the constraint's vectors).

        Args:
            w: weights.
            m: smoothed gradient, w's shape.
            constraint: what the step keeps to first order.
            cache: what the last step returned, at first `init_tangent`.

        Returns:
            `(d, cache)`.
        """
        if isinstance(constraint, SameNorm):
            return self.direction(m), cache
        m = near_one(m, tuple(range(-self.ndim, 0)))
        d = constraint.project(w, self.direction(constraint.project(w, m)))
        return d / expand(self.norm(d), self).clamp_min(1).to(d.dtype), cache

    def extremes(self, radius: float, shape: torch.Size) -> Constraint:
        """The constraint on a step from `radius * retract(w)`, for w of this shape; by default the norm."""
        return SameNorm()

    def retract(self, w: Tensor) -> Tensor:
        """The nearest point all of whose rows, or singular values, have norm 1; by default the direction of w."""
        return self.direction(w)

    def spread(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest of what `retract` brings to 1: norms of rows, singular values; -norm if unknown."""
        return -(norm := self.norm(w)), norm

    def root_square(self, shape: torch.Size) -> float:
        """`|w|_F` of a weight of size 1 all over, by default with equal entries and norm 1."""
        entries = torch.ones(shape[-self.ndim :])
        return math.sqrt(entries.numel()) / max(float(self.norm(entries)), 1e-30) if entries.numel() else 0.0


class ChangeBounds(Part):
    """What reports of a step's change need: how long directions are, in this norm and in others."""

    _redirected: ClassVar[bool] = False
    """Whether a subclass changed the direction whose sizes this class knows."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Compare the class's direction with those that it inherits."""
        super().__init_subclass__(**kwargs)
        known = [base for base in cls.__bases__ if issubclass(base, ChangeBounds)]
        cls._redirected = any(x._redirected or x.direction not in (Geometry.direction, cls.direction) for x in known)

    def dual(self, g: Tensor) -> Tensor:
        """The dual norm of g, float32 or float64, see `dual_norm`; by default `<g, direction(g)>`."""
        return (g * self.direction(g)).sum(tuple(range(-self.ndim, 0)))

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Upper bounds on `direction(g)` over all g of this shape and sizes `smoothed`, rounding included."""
        return Sizes()

    def norm_bound(self, sizes: Sizes, shape: tuple[int, ...]) -> float:
        """Upper bound on `norm(w)` over all w of these sizes and this shape; inf if unknown."""
        return math.inf

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """Upper bound on `norm.norm(direction(g))` over all g as in `direction_sizes`; inf if unknown."""
        return ChangeBounds.of(norm).norm_bound(self.direction_sizes(shape, smoothed), shape)

    def clip_change_bound(self, excess: Tensor, reach: float) -> Tensor:
        """Upper bound on `norm(project(w + x, radius) - w)` for `norm(w) <= radius + excess`, `norm(x) <= reach`."""
        # This default needs a projection that takes away the excess alone: norm(y - project(y)) = norm(y) - radius.
        return excess + 2 * reach

    def lipschitz(self, w: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the layer's Lipschitz constant from bounds on its norm; the same for a linear layer."""
        return lower, upper


class Around(Delegate, NormBounds, NormEstimates, Tangents, ChangeBounds):
    """A norm defined by another, `norm_of`, with the parts that follow from its own four methods."""


@dataclass(frozen=True)
class Completed(Around):
    """The norm `norm_of`, of matrices or vectors, with every part."""

    norm_of: Geometry


def expand(norm: Tensor, geometry: Geometry) -> Tensor:
    """A norm `(...)` shaped to broadcast against its weights: `(..., 1, 1)` or `(..., 1)`."""
    return norm[(..., *(None,) * geometry.ndim)]


def dual_norm(geometry: Geometry, g: Tensor) -> Tensor:
    """The dual norm `max <g, d>` over `norm(d) <= 1`, exactly; `<g, direction(g)>` may be less.

    Cost: one pass; under the spectral norm a singular value decomposition.

    Args:
        geometry: the norm.
        g: `(..., out, in)` or `(..., n)`, as the geometry takes it.

    Returns:
        Shape `g.shape[:-ndim]`, float32 for half precision; relative error 1e-5, besides rounding in g's dtype.

    >>> from surefoot.geometry import RMS
    >>> dual_norm(RMS(), torch.tensor([3.0, 4.0]))  # sqrt(2) * 5
    tensor(7.0711)
    """
    return ChangeBounds.of(geometry).dual(device.widened(g))
