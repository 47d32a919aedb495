"""Stabilisers: from weight and smoothed gradient to the next weight, with a promise on its norm.

Each takes the step itself, `w - eta * geometry.direction(m)`, because some need more than the direction. `eta` is a
number or a tensor that broadcasts against w; a matrix (vector) whose eta is 0 everywhere comes back bit for bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry, expand
from surefoot.scaling import Scale


class Stabiliser(ABC):
    """A scheme for moving a weight. `promise` says in words what `tests/laws/test_stabilisers.py` shows."""

    def fresh(self, w: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """What the scheme keeps from step to step, beside weights w; each tensor starts with w's batch."""
        return {}

    @abstractmethod
    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """`(next weight, cache)`.

        Args:
            w: weights `(..., out, in)` or `(..., n)`.
            m: smoothed gradient, w's shape.
            eta: step size in natural units, `lr * lr_scale`.
            geometry: the norm.
            cache: what the geometry keeps between steps.
        """

    @abstractmethod
    def in_units(self, unit: float) -> Stabiliser:
        """The same scheme with its radius multiplied by unit (a rate divided by it)."""

    @property
    @abstractmethod
    def promise(self) -> str:
        """What holds after every step with eta > 0, in words."""


def _step(w: Tensor, m: Tensor, eta: Eta, geometry: Geometry) -> Tensor:
    """`w - eta d`; adding 0 turns -0 into 0, so that eta = 0 keeps every bit of w, the sign of -0 included."""
    return w - (eta * geometry.direction(m)).add_(0.0)


def _where_moved(eta: Eta, geometry: Geometry, new: Tensor, old: Tensor) -> Tensor:
    """The new weight where any part of the matrix moves, else the old one bit for bit."""
    moved = torch.as_tensor(eta, device=old.device) > 0
    if moved.ndim:
        dims = tuple(range(-geometry.ndim, 0))
        moved = moved.any(dims, keepdim=True) if new.numel() else moved[..., :0]
    return torch.where(moved, new, old) if new.numel() else old.clone()


def _decay(eta: Eta, rate: float) -> Tensor | float:
    """`1 - min(1, eta * rate)`."""
    return 1 - (eta * rate).clamp(max=1) if isinstance(eta, Tensor) else 1 - min(1.0, eta * rate)


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")


def _check_period(name: str, period: int | None) -> None:
    if period is not None and period < 1:
        raise ValueError(f"{name}'s period must be at least 1 step, not {period}")


TOLERANCE = {torch.float64: 1.001, torch.float32: 1.001, torch.bfloat16: 0.0, torch.float16: 0.0}
"""How far a sum of norms may exceed the bound that it proves, by dtype; in half precision it proves nothing."""


@dataclass(frozen=True)
class Free(Stabiliser):
    """`w - eta d`: no bound."""

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """The step alone."""
        return _step(w, m, eta, geometry), cache

    def in_units(self, unit: float) -> Free:
        """Itself."""
        return self

    @property
    def promise(self) -> str:
        """None."""
        return "free"


@dataclass(frozen=True)
class WeightDecay(Stabiliser):
    """`(1 - eta rate) w - eta d`: `norm(w) <= max(norm(w0), 1/rate)` in every norm, by the triangle inequality.

    The bound needs `eta * rate <= 1` and directions of norm 1.

    Args:
        rate: decay per unit of eta; the decay `eta * rate` is capped at 1, the step is not.
    """

    rate: float

    def __post_init__(self) -> None:
        _positive("WeightDecay's rate", self.rate)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Decay, then step."""
        return _step(w * _decay(eta, self.rate), m, eta, geometry), cache

    def in_units(self, unit: float) -> WeightDecay:
        """Rate over unit."""
        return WeightDecay(self.rate / unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm <= max(initial, {1 / self.rate:.4g}) by decay while eta <= {1 / self.rate:.4g}"


@dataclass(frozen=True)
class PublishedDecay(Stabiliser):
    """`(1 - lr rate) w - eta d`: decay by lr, the convention of published optimizers, and not by `eta = lr * lr_scale`.

    It is `WeightDecay(rate / lr_scale)`, so the bound is `lr_scale / rate` and depends on the shape.

    Args:
        rate: the weight decay as published.
        lr_scale: the role's scale rule.
    """

    rate: float
    lr_scale: Scale

    def __post_init__(self) -> None:
        _positive("PublishedDecay's rate", self.rate)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """As WeightDecay in our units."""
        return WeightDecay(self.rate / self.lr_scale(tuple(w.shape))).move(w, m, eta, geometry, cache)

    def in_units(self, unit: float) -> PublishedDecay:
        """Itself: a published rate is absolute."""
        return self

    @property
    def promise(self) -> str:
        """The bound."""
        return f"decay {self.rate:.4g} lr"


@dataclass(frozen=True)
class PostClip(Stabiliser):
    """`clip(w - eta d, radius)`, clip being the nearest point of the ball: `norm(w) <= radius`, whatever d is.

    Where a clip is an eigendecomposition (the spectral norm), a running bound on the norm says when one is needed, and
    it goes `(period - 1) * eta` further in: then the bound holds at every step at 1/period of the cost.

    Args:
        radius: in the unit of the role.
        period: least number of steps between two costly clips of a matrix; 1 is the scheme as published, None chooses
            (16, or as many as move the matrix by a quarter of the radius).

    Source: "Beyond MuP 4", Post Clip.
    """

    radius: float
    period: int | None = None

    def __post_init__(self) -> None:
        _positive("PostClip's radius", self.radius)
        _check_period("PostClip", self.period)

    def fresh(self, w: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """The geometry's running bound."""
        return geometry.fresh(w)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step, then project."""
        held, cache = geometry.hold(_step(w, m, eta, geometry), self.radius, eta, self.period, cache)
        return _where_moved(eta, geometry, held, w), cache

    def in_units(self, unit: float) -> PostClip:
        """Radius times unit."""
        return replace(self, radius=self.radius * unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm <= {self.radius:.4g} at every step"


@dataclass(frozen=True)
class PreDecay(Stabiliser):
    """`clip(w, (1 - eta rate) norm(w)) - eta d`: `norm(w) <= max(norm(w0), 1/rate)`; decays the largest parts only.

    A direction longer than 1 is caught by a clip to `max(norm(w), 1/rate)` afterwards. Under the RMS norm it
    equals `WeightDecay`.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.

    Source: "Beyond MuP 4", eq. 3.
    """

    rate: float

    def __post_init__(self) -> None:
        _positive("PreDecay's rate", self.rate)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Shrink the norm, step, and clip what a long direction left outside."""
        keep = _decay(eta, self.rate)
        shrunk, norm = geometry.shrink(w, keep)
        moved, norm = _step(shrunk, m, eta, geometry), expand(norm, geometry)
        rounding = 1 - torch.finfo(w.dtype).eps / 2  # or a norm could creep up by it at every step
        bound = (torch.minimum(keep * norm + eta, norm) * rounding).clamp_min(1 / self.rate)
        outside = keep * norm + eta * geometry.longest > bound * TOLERANCE[w.dtype]
        if bool(outside.any()):
            slack = 1 + 4 * torch.finfo(norm.dtype).eps  # rounding must not move what rests at its bound
            moved, cache = geometry.project(moved, torch.where(outside, bound * slack, math.inf), cache)
        return _where_moved(eta, geometry, moved, w), cache

    def in_units(self, unit: float) -> PreDecay:
        """Rate over unit."""
        return PreDecay(self.rate / unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm <= max(initial, {1 / self.rate:.4g}) at every step"


@dataclass(frozen=True)
class Rescale(Stabiliser):
    """`w min(1, radius / upper(w))` after the step: `norm(w) <= radius` without singular vectors.

    Args:
        radius: in the unit of the role.
    """

    radius: float

    def __post_init__(self) -> None:
        _positive("Rescale's radius", self.radius)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step, then scale down."""
        stepped = _step(w, m, eta, geometry)
        _, upper, cache = geometry.bounds(stepped, cache)
        scale = (self.radius / expand(upper, geometry).clamp_min(self.radius)).to(w.dtype)
        return _where_moved(eta, geometry, stepped * scale, w), cache

    def in_units(self, unit: float) -> Rescale:
        """Radius times unit."""
        return Rescale(self.radius * unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm <= {self.radius:.4g} at every step (rescaled)"


@dataclass(frozen=True)
class Normalise(Stabiliser):
    """`w - eta d`, rescaled to norm radius: training on a sphere. A zero weight (a bias at its start) stays zero.

    Args:
        radius: in the unit of the role; None keeps the norm that the weight has.
        norm: whose sphere; None is the role's own norm, `Frobenius()` gives Hyperball.
    """

    radius: float | None = None
    norm: Geometry | None = None

    def __post_init__(self) -> None:
        if self.radius is not None:
            _positive("Normalise's radius", self.radius)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step, then rescale."""
        sphere = self.norm or geometry
        stepped = _step(w, m, eta, geometry)
        before = expand(sphere.norm(w), sphere)
        target = before if self.radius is None else torch.full_like(before, self.radius)
        after = expand(sphere.norm(stepped), sphere)
        legal = (before > 0) & (after > 0)
        scaled = stepped * (target / torch.where(legal, after, 1)).to(w.dtype)
        return _where_moved(eta, geometry, torch.where(legal, scaled, w), w), cache

    def in_units(self, unit: float) -> Normalise:
        """Radius times unit."""
        return Normalise(None if self.radius is None else self.radius * unit, self.norm)

    @property
    def promise(self) -> str:
        """The bound."""
        name = "norm" if self.norm is None else f"{type(self.norm).__name__} norm"
        return f"{name} = {'initial' if self.radius is None else f'{self.radius:.4g}'}"
