"""What stabilisers have in common: from weight and smoothed gradient to the next weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import ClassVar, Self

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Extent, Geometry, State, Tangents
from surefoot.geometry.constraints import Constraint
from surefoot.geometry.returned import direction_of
from surefoot.linalg import device

LARGEST = 1e15
"""Radii up to this, and products of them with the units of roles, have squares that a float32 holds."""

Moved = tuple[Tensor, Cache]
"""A direction or the next weight, and what the scheme keeps."""


Limit = Callable[[Geometry], float] | None
"""From a norm to the largest norm of any direction of a step; None if unknown."""


@dataclass(frozen=True)
class Known:
    """What is known before a step.

    Args:
        upper: upper bound on the weight's norm.
        cache: what the scheme kept, see `Stabiliser.move`.
        longest: from a norm to the largest norm of steps of rate 1.
    """

    upper: Tensor
    cache: Mapping[str, Tensor]
    longest: Callable[[Geometry], float]


class Stabiliser(ABC):
    """A scheme for moving a weight; `promise` states in words what holds for its norm afterwards.

    `direct` finds the direction of a step, `move` takes it. Schemes that project or rescale differ in `move`; those
    that step along a sphere or a manifold also have a `constraint` for `direct`.

    >>> from surefoot.geometry import RMS
    >>> d, _ = Free().direct(torch.zeros(2), torch.tensor([3.0, -3.0]), RMS(), RMS())
    >>> Free().move(torch.zeros(2), d, 0.5, RMS())[0]
    tensor([-0.5000,  0.5000])
    """

    told: ClassVar[str] = "nothing is known of the {norm}"
    """Template of `promise`, with places for the norm's name, `bound` and the scheme's fields."""

    extent: ClassVar[Extent] = Extent.WHOLE
    """How much of a weight `move`, and the scheme's part of `direct`, sees."""

    def init_state(self, w: Tensor, geometry: Geometry, ball: Geometry) -> State:
        """What the scheme keeps from step to step for weights w; each tensor's shape starts with w's batch."""
        keeps = self.constraint(geometry, ball, w.shape)
        return {} if keeps is None else Tangents.of(geometry).init_tangent(w, keeps)

    def constraint(self, geometry: Geometry, ball: Geometry, shape: torch.Size) -> Constraint | None:
        """What a step under geometry keeps to first order, for weights of this shape; None: any step will do."""
        return None

    def direct(
        self, w: Tensor, m: Tensor, geometry: Geometry, ball: Geometry, cache: Cache = None, active: Eta = 1.0
    ) -> Moved:
        """The direction of a step: the geometry's, or the best one that meets the constraint.

        Args:
            w: weights `(..., out, in)` or `(..., n)`.
            m: smoothed gradient, w's shape.
            geometry: the norm of the step.
            ball: the norm of the weight.
            cache: what the last step returned, at first `init_state`.
            active: 0 for entries that will not move, broadcasting against w.

        Returns:
            `(direction, cache)`; the direction is a new tensor, or m itself.
        """
        if (keeps := self.constraint(geometry, ball, w.shape)) is None:
            return direction_of(geometry, m), cache
        cache = self.init_state(w, geometry, ball) if cache is None else cache
        return Tangents.of(geometry).tangent(w, m, keeps, cache)

    @abstractmethod
    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """The next weight, for a step along `-d`.

        Where eta is 0 the result does not matter: `step` puts the old weight there.

        Args:
            w: weights `(..., out, in)` or `(..., n)`. Donated: their memory may be reused for the result.
            d: what `direct` returned, w's shape.
            eta: step size in natural units, `lr * lr_scale`: a number, or a tensor that broadcasts against w.
            ball: the norm of the weight, which radius and promise refer to.
            cache: what the last step returned, at first `init_state`.
            longest: from a norm to an upper bound on `norm(d)`, whatever d is; None if unknown.

        Returns:
            `(next weight, cache)`.
        """

    def by(self, scale: float) -> Stabiliser:
        """The same, described by lr for a role of this scale."""
        return self

    def scaled(self, unit: float, shape: tuple[int, ...]) -> Stabiliser:
        """The same scheme for blocks of this shape, its radius multiplied by unit (a rate divided by it)."""
        return self

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`promise` for a norm of this name, in which steps of rate 1 are at most `longest`."""
        return self.told.format(norm=norm, bound=self.bound, **vars(self))

    @abstractmethod
    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """Upper bound on `ball.norm(w_next - w)` of the next step, whatever its gradient.

        Args:
            w: weights `(..., out, in)` or `(..., n)`.
            eta: size of the step.
            ball: the norm of the weight.
            known: bounds on its norm and on that of steps.

        Returns:
            The shape of `ball.norm(w)`.
        """

    @property
    def promise(self) -> str:
        """What holds after every step with eta > 0, in words."""
        return self.describe("norm")

    @property
    def bound(self) -> float:
        """Norm that weights are kept to, or brought down to, in natural units; inf if there is none."""
        return inf

    def certificate_period(self, eta: Eta) -> int:
        """Number of steps for which one certified norm bound stays valid on an accelerator."""
        return 1


NORM: dict[str, int] = {"power": 1}
INVERSE: dict[str, int] = {"power": -1}
NUMBER: dict[str, int] = {"power": 0}
"""Metadata of a positive field: which power of it is a norm, 0 if none is."""


@dataclass(frozen=True)
class Checked(Stabiliser):
    """Schemes with numbers that must be positive and finite, or None: fields whose metadata has a power."""

    def _numbers(self) -> dict[str, tuple[float, int]]:
        """Name of such a field -> its value, where it has one, and the power."""
        found = {x.name: (getattr(self, x.name), x.metadata["power"]) for x in fields(self) if x.metadata}
        return {name: number for name, number in found.items() if number[0] is not None}

    def __post_init__(self) -> None:
        for name, (value, power) in self._numbers().items():
            require_positive(f"{type(self).__name__}'s {name}", value, power)

    def scaled(self, unit: float, shape: tuple[int, ...]) -> Self:
        """Radii times unit, rates over it."""
        numbers = {name: x * unit if power > 0 else x / unit for name, (x, power) in self._numbers().items() if power}
        return replace(self, **numbers)


@dataclass(frozen=True)
class Ball(Checked):
    """Schemes with a radius: the weight's norm is kept at or below it.

    Args:
        radius: in the unit of the role.

    Raises:
        ValueError: a radius that is not positive and finite.
    """

    radius: float = field(metadata=NORM)

    @property
    def bound(self) -> float:
        """The radius, in natural units."""
        return self.radius


@dataclass(frozen=True)
class Decay(Checked):
    """Schemes with a rate: the weight's norm is brought to `1/rate` or below.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.

    Raises:
        ValueError: a rate that is not positive and finite.
    """

    rate: float = field(metadata=INVERSE)

    @property
    def bound(self) -> float:
        """`1 / rate`, for weights that start below it."""
        return 1 / self.rate


@dataclass(frozen=True)
class Free(Stabiliser):
    """No bound: `w - eta d`.

    >>> Free().promise
    'free'
    """

    told: ClassVar[str] = "free"
    extent: ClassVar[Extent] = Extent.ENTRY

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """The step alone, written to w."""
        return along(w, d, eta, into=w), cache

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step."""
        return torch.full_like(known.upper, eta * known.longest(ball))


def along(w: Tensor, d: Tensor, eta: Eta, into: Tensor | None = None) -> Tensor:
    """`w - eta d`, in the memory of `into` where all of w moves."""
    if not (w.dtype == d.dtype and all_move(eta, w)):
        return w - eta * d
    if isinstance(eta, Tensor):
        return torch.addcmul(w, d, eta, value=-1, out=into)
    return torch.add(w, d, alpha=-eta, out=into)


def all_move(eta: Eta, w: Tensor) -> bool:
    """True if the host can tell, without a synchronisation, that eta is positive everywhere."""
    if isinstance(eta, Tensor):
        return device.may_branch(w) and eta.dtype == w.dtype and bool((eta > 0).all())
    return eta > 0 and device.may_branch(w)


def where_moved(eta: Eta, dims: tuple[int, ...], new: Tensor, old: Tensor) -> Tensor:
    """The new weight where eta > 0 anywhere along dims, else the old one bit for bit, the sign of -0 included."""
    if new is old or all_move(eta, old):
        return new
    moved = device.scalar_like(eta, old) > 0
    if moved.ndim and dims:
        moved = moved.any(dims, keepdim=True)
    return torch.where(moved, new, old)


def share(eta: Eta, rate: float) -> Eta:
    """The part of a weight that decay takes, `min(1, eta * rate)`; 0 where eta is not positive, and nothing moves."""
    return (eta * rate).clamp(0, 1) if isinstance(eta, Tensor) else min(1.0, max(0.0, eta * rate))


def require_positive(name: str, value: float, power: int = 0) -> None:
    """Raise ValueError naming a radius or rate that is not positive and finite, or a power of it above LARGEST."""
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    if value**power > LARGEST:
        what = f"{name}, {value:g}, means norms above {LARGEST:g}, whose squares overflow"
        raise ValueError(f"{what}: scale it or take Free()")
