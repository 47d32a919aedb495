"""Decay of everything, or of the largest singular values (rows) only; with a bound in both cases."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import ClassVar, Self

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, ChangeBounds, Eta, Extent, Geometry, NormBounds, NormEstimates, State, expand
from surefoot.linalg import device
from surefoot.scaling import Constant, Scale
from surefoot.stabilise.base import NUMBER, Decay, Known, Limit, Moved, along, share

TOLERANCE = {torch.float64: 1.001, torch.float32: 1.001, torch.bfloat16: 0.0, torch.float16: 0.0}
"""How far a sum of norms may exceed the bound that it proves, by dtype; in half precision it proves nothing."""


@dataclass(frozen=True)
class WeightDecay(Decay):
    """`(1 - eta rate) w - eta d`: `norm(w) <= max(norm(w0), 1/rate)` in every norm, by the triangle inequality.

    The bound needs `eta * rate <= 1` and directions of norm 1.

    Args:
        rate: decay per unit of eta; the decay `eta * rate` is capped at 1, the step is not.

    Raises:
        ValueError: a rate that is not positive and finite.

    >>> WeightDecay(0.5).promise
    'norm <= max(initial, 2) by decay while eta <= 2'
    """

    extent: ClassVar[Extent] = Extent.ENTRY

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Decay, then step."""
        w = self.shrunk(w, eta)
        return along(w, d, eta, into=w), cache

    def shrunk(self, w: Tensor, eta: Eta) -> Tensor:
        """What decay leaves of w, in its memory where that may be."""
        keep = 1 - self.part(w, eta)
        return w.mul_(keep) if device.may_branch(w) else w * keep

    def part(self, w: Tensor, eta: Eta) -> Eta:
        """The part of w that decay takes, `eta rate`."""
        return share(eta, self.natural(w))

    def natural(self, w: Tensor) -> float:
        """The rate of this weight's decay, by `eta`."""
        return self.rate

    def by(self, scale: float) -> WeightDecay:
        """The same decay by lr."""
        return DecoupledWeightDecay(self.rate * scale, Constant(scale))

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """`eta (longest + rate norm(w))`."""
        return eta * known.longest(ball) + self.part(w, eta) * known.upper

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`norm <= max(initial, longest / rate)`."""
        return _decayed(norm, longest, 1 / self.rate, "eta", 1 / self.rate)


@dataclass(frozen=True)
class DecoupledWeightDecay(WeightDecay):
    """`(1 - lr rate) w - eta d`: decay by lr, the convention of published optimizers, and not by `eta = lr * lr_scale`.

    It is `WeightDecay(rate / lr_scale)`, so the bound is `lr_scale / rate` and depends on the shape. Under a role with
    another scale, the decay is by `lr * scale / lr_scale`.

    Args:
        rate: the weight decay as published.
        lr_scale: the role's scale rule.

    Raises:
        ValueError: a rate that is not positive and finite.

    >>> from surefoot.scaling import Constant
    >>> DecoupledWeightDecay(0.1, Constant(2.0)).promise
    'norm <= max(initial, 20) by decay while lr <= 10'
    """

    rate: float = field(metadata=NUMBER)  # as published it is absolute, whatever the unit
    lr_scale: Scale

    @property
    def bound(self) -> float:
        """inf: the bound, `lr_scale / rate` steps, depends on the weight's shape."""
        return inf

    def scaled(self, unit: float, shape: tuple[int, ...]) -> Self:
        """Its scale for this shape, too."""
        return replace(super().scaled(unit, shape), lr_scale=Constant(self.lr_scale(shape)))

    def by(self, scale: float) -> WeightDecay:
        """The same decay, its rate by lr for a role of this scale; after `scaled` has given it a shape."""
        assert isinstance(self.lr_scale, Constant)
        return replace(self, rate=self.rate * scale / self.lr_scale.value, lr_scale=Constant(scale))

    def natural(self, w: Tensor) -> float:
        """`rate / lr_scale`."""
        return self.rate / self.lr_scale(tuple(w.shape))

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`norm <= max(initial, longest lr_scale / rate)`; before the shape is known, the decay of a step."""
        if not isinstance(self.lr_scale, Constant):
            return f"decay {self.rate:.4g} lr"
        return _decayed(norm, longest, self.lr_scale.value / self.rate, "lr", 1 / self.rate)


@dataclass(frozen=True)
class PreDecay(Decay):
    """`clip(w, (1 - eta rate) norm(w)) - eta d`: `norm(w) <= max(norm(w0), 1/rate)`; decays the largest parts only.

    A direction longer than 1 is caught by a clip to `max(norm(w), 1/rate)` afterwards. Under the RMS norm it
    equals `WeightDecay`.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.

    Raises:
        ValueError: a rate that is not positive and finite.

    Source: "Beyond MuP 4", eq. 3.

    >>> PreDecay(0.5).promise
    'norm <= max(initial, 2) at every step, certified'
    """

    told: ClassVar[str] = "{norm} <= max(initial, {bound:.4g}) at every step, certified"
    extent: ClassVar[Extent] = Extent.NORM

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Shrink the norm, step, and clip what a long direction left outside."""
        largest = largest_step(eta, ball)
        keep = 1 - share(largest, self.rate)
        shrunk, norm = NormBounds.of(ball).shrink(w, keep)
        moved, norm = along(shrunk, d, eta, into=shrunk), expand(norm, ball)
        rounding = 1 - torch.finfo(w.dtype).eps / 2  # or a norm could creep up by it at every step
        bound = (torch.minimum(keep * norm + largest, norm) * rounding).clamp_min(1 / self.rate)
        outside = keep * norm + largest * (longest(ball) if longest is not None else inf) > bound * TOLERANCE[w.dtype]
        if bool(outside.any()):
            slack = 1 + 4 * torch.finfo(norm.dtype).eps  # rounding must not move what rests at its bound
            moved, cache = ball.project(moved, torch.where(outside, bound * slack, inf), cache)
        return moved, cache

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """`eta (longest + rate norm(w))`, and the way back into the ball after a step longer than 1."""
        longest, part = known.longest(ball), share(eta, self.rate)
        change = eta * longest + ChangeBounds.of(ball).clip_change_bound(part * known.upper, 0.0)
        if longest <= TOLERANCE[w.dtype]:
            return change
        reached = (1 - part) * known.upper + eta * longest
        return change + (reached - 1 / self.rate).clamp_min(0)


@dataclass(frozen=True)
class StreamingPreDecay(Decay):
    """`PreDecay` of the leading singular values only, as in `StreamingPostClip`: spectral weight decay. No guarantee.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.
        vectors: k, the number of singular vectors tracked per matrix.

    Raises:
        ValueError: a rate that is not positive and finite, no vectors.

    Source: "Beyond MuP 4", streaming power iteration.

    >>> StreamingPreDecay(0.5).promise
    'norm near 2, 1 directions decayed, no guarantee'
    """

    told: ClassVar[str] = "{norm} near {bound:.4g}, {vectors} directions decayed, no guarantee"

    vectors: int = field(default=1, metadata=NUMBER)

    def init_state(self, w: Tensor, geometry: Geometry, ball: Geometry) -> State:
        """Singular-vector estimates, where the weight's norm is costly."""
        return NormEstimates.of(ball).init_vectors(w, self.vectors)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Clip to `(1 - eta rate)` of the largest singular value on the span of the vectors, then step."""
        clipped, cache = self._decayed(w, eta, ball, cache)
        return along(clipped, d, eta, into=clipped), cache

    def _decayed(self, w: Tensor, eta: Eta, ball: Geometry, cache: Cache) -> Moved:
        estimates = NormEstimates.of(ball)
        norm, cache = estimates.estimate_norm(w, self.init_state(w, ball, ball) if cache is None else cache)
        limit = expand(norm, ball).to(w.dtype) * (1 - share(largest_step(eta, ball), self.rate))
        return estimates.clip_leading(w, limit, cache)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and the decay, which is known: the next vectors may find more than the estimate."""
        kept = dict(known.cache) or None
        return eta * known.longest(ball) + NormBounds.of(ball).bounds(self._decayed(w, eta, ball, kept)[0] - w)[1]


def largest_step(eta: Eta, geometry: Geometry) -> Eta:
    """The largest eta in each of the geometry's problems; steps of another norm may differ between its rows."""
    dims = tuple(geometry.couples)
    return eta.amax(dims, keepdim=True) if isinstance(eta, Tensor) and eta.ndim and dims else eta


def _decayed(norm: str, longest: float, unit: float, rate: str, largest: float) -> str:
    """The promise of a decay, `norm <= longest * unit`; a step's excess over 1 by rounding is not shown."""
    if not isfinite(longest):
        return f"decay by {1 / largest:.4g} {rate}, no bound: steps of unknown norm"
    bound = unit if longest <= TOLERANCE[torch.float32] else longest * unit
    return f"{norm} <= max(initial, {bound:.4g}) by decay while {rate} <= {largest:.4g}"
