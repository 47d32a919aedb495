"""Decay: of everything, or of the largest singular values (rows) only; with a bound in both cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry, expand
from surefoot.linalg import device
from surefoot.scaling import Scale
from surefoot.stabilise.base import Stabiliser, along, remaining, require_positive, step, where_moved, whole

TOLERANCE = {torch.float64: 1.001, torch.float32: 1.001, torch.bfloat16: 0.0, torch.float16: 0.0}
"""How far a sum of norms may exceed the bound that it proves, by dtype; in half precision it proves nothing."""


@dataclass(frozen=True)
class WeightDecay(Stabiliser):
    """`(1 - eta rate) w - eta d`: `norm(w) <= max(norm(w0), 1/rate)` in every norm, by the triangle inequality.

    The bound needs `eta * rate <= 1` and directions of norm 1.

    Args:
        rate: decay per unit of eta; the decay `eta * rate` is capped at 1, the step is not.
    """

    by_problem: ClassVar[bool] = True

    rate: float

    def __post_init__(self) -> None:
        require_positive("WeightDecay's rate", self.rate)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Decay, then step."""
        d, keep = geometry.direction(m), remaining(eta, self.rate)
        w = w.mul_(keep) if device.may_branch(w) else w * keep
        return along(w, d, eta, into=w), cache

    def scaled(self, unit: float) -> WeightDecay:
        """Rate over unit."""
        return WeightDecay(self.rate / unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm <= max(initial, {1 / self.rate:.4g}) by decay while eta <= {1 / self.rate:.4g}"

    @property
    def bound(self) -> float:
        """Of the weights that start below it."""
        return 1 / self.rate


@dataclass(frozen=True)
class DecoupledWeightDecay(Stabiliser):
    """`(1 - lr rate) w - eta d`: decay by lr, the convention of published optimizers, and not by `eta = lr * lr_scale`.

    It is `WeightDecay(rate / lr_scale)`, so the bound is `lr_scale / rate` and depends on the shape.

    Args:
        rate: the weight decay as published.
        lr_scale: the role's scale rule.
    """

    rate: float
    lr_scale: Scale

    def __post_init__(self) -> None:
        require_positive("DecoupledWeightDecay's rate", self.rate)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """As WeightDecay in our units."""
        return WeightDecay(self.rate / self.lr_scale(tuple(w.shape))).move(w, m, eta, geometry, cache)

    def scaled(self, unit: float) -> DecoupledWeightDecay:
        """Itself: a published rate is absolute."""
        return self

    @property
    def promise(self) -> str:
        """The bound."""
        return f"decay {self.rate:.4g} lr"


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
        require_positive("PreDecay's rate", self.rate)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Shrink the norm, step, and clip what a long direction left outside."""
        largest = whole(eta, geometry)
        keep = remaining(largest, self.rate)
        shrunk, norm = geometry.shrink(w, keep)
        moved, norm = step(shrunk, m, eta, geometry), expand(norm, geometry)
        rounding = 1 - torch.finfo(w.dtype).eps / 2  # or a norm could creep up by it at every step
        bound = (torch.minimum(keep * norm + largest, norm) * rounding).clamp_min(1 / self.rate)
        outside = keep * norm + largest * geometry.direction_norm_bound > bound * TOLERANCE[w.dtype]
        if bool(outside.any()):
            slack = 1 + 4 * torch.finfo(norm.dtype).eps  # rounding must not move what rests at its bound
            moved, cache = geometry.project(moved, torch.where(outside, bound * slack, math.inf), cache)
        return where_moved(eta, geometry, moved, w), cache

    def scaled(self, unit: float) -> PreDecay:
        """Rate over unit."""
        return PreDecay(self.rate / unit)

    @property
    def promise(self) -> str:
        """The bound."""
        return f"norm <= max(initial, {1 / self.rate:.4g}) at every step, certified"

    @property
    def bound(self) -> float:
        """Of the weights that start below it."""
        return 1 / self.rate
