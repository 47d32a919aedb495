"""What stabilisers have in common: from weight and smoothed gradient to the next weight.

Each takes the step itself, `w - eta * geometry.direction(m)`, because some need more than the direction. `eta` is a
number or a tensor that broadcasts against w; a matrix (vector) whose eta is 0 everywhere comes back bit for bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry
from surefoot.linalg import device


class Stabiliser(ABC):
    """A scheme for moving a weight. `promise` says in words what `tests/laws/test_stabilisers.py` shows.

    `by_problem` says that each row (entry, matrix) that has a direction of its own is moved on its own, whatever the
    others do: so it is where no norm of the weight is taken.
    """

    by_problem: ClassVar[bool] = False

    def init_state(self, w: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """What the scheme keeps from step to step, beside weights w; each tensor starts with w's batch."""
        return {}

    @abstractmethod
    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """`(next weight, cache)`.

        Args:
            w: weights `(..., out, in)` or `(..., n)`, given away: the next weight may be written there.
            m: smoothed gradient, w's shape.
            eta: step size in natural units, `lr * lr_scale`.
            geometry: the norm.
            cache: what the geometry keeps between steps.
        """

    @abstractmethod
    def scaled(self, unit: float) -> Stabiliser:
        """The same scheme with its radius multiplied by unit (a rate divided by it)."""

    @property
    @abstractmethod
    def promise(self) -> str:
        """What holds after every step with eta > 0, in words."""

    def certificate_period(self, eta: Eta) -> int:
        """For how many steps of eta a proof of a matrix's norm serves an accelerator: one."""
        return 1

    @property
    def bound(self) -> float:
        """The role's norm that weights are kept to, or brought down to, as a number; inf if there is none."""
        return math.inf


def step(w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, into: Tensor | None = None) -> Tensor:
    """`w - eta direction(m)`, in the memory of `into` or of the direction where that saves a pass over it."""
    d = geometry.direction(m)
    if into is None and device.may_branch(w) and d.data_ptr() != m.data_ptr():  # `Identity` gives m itself
        into = d
    return along(w, d, eta, into)


def along(w: Tensor, d: Tensor, eta: Eta, into: Tensor | None = None) -> Tensor:
    """`w - eta d`; adding 0 turns -0 into 0, so that eta = 0 keeps every bit of w, the sign of -0 included."""
    if not (w.dtype == d.dtype and all_move(eta, w)):
        return w - (eta * d).add_(0.0)
    if isinstance(eta, Tensor):
        return torch.addcmul(w, d, eta, value=-1, out=into)
    return torch.add(w, d, alpha=-eta, out=into)


def all_move(eta: Eta, w: Tensor) -> bool:
    """Whether the host sees that no part of w has a step of 0."""
    if isinstance(eta, Tensor):
        return device.may_branch(w) and eta.dtype == w.dtype and bool((eta > 0).all())
    return eta > 0 and device.may_branch(w)


def where_moved(eta: Eta, geometry: Geometry, new: Tensor, old: Tensor) -> Tensor:
    """The new weight where any part of the matrix moves, else the old one bit for bit."""
    if all_move(eta, old):
        return new
    moved = device.scalar_like(eta, old) > 0
    if moved.ndim:
        dims = tuple(range(-geometry.ndim, 0))
        moved = moved.any(dims, keepdim=True) if new.numel() else moved[..., :0]
    return torch.where(moved, new, old) if new.numel() else old.clone()


def whole(eta: Eta, geometry: Geometry) -> Eta:
    """The largest step in each of the geometry's problems; steps of another norm may differ between its rows."""
    dims = tuple(geometry.couples)
    return eta.amax(dims, keepdim=True) if isinstance(eta, Tensor) and eta.ndim and dims else eta


def remaining(eta: Eta, rate: float) -> Tensor | float:
    """`1 - min(1, eta * rate)`."""
    return 1 - (eta * rate).clamp(max=1) if isinstance(eta, Tensor) else 1 - min(1.0, eta * rate)


def require_positive(name: str, value: float) -> None:
    """Raise ValueError naming a radius or rate that is none."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")


def require_count(name: str, value: int) -> None:
    """Raise ValueError naming a number that must be at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class Free(Stabiliser):
    """`w - eta d`: no bound."""

    by_problem: ClassVar[bool] = True

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """The step alone, written to w."""
        return step(w, m, eta, geometry, into=w), cache

    def scaled(self, unit: float) -> Free:
        """Itself."""
        return self

    @property
    def promise(self) -> str:
        """None."""
        return "free"
