"""Bounds by projection: clipped to the nearest point of the ball, its leading singular values alone, or scaled down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, ChangeBounds, Eta, Extent, Geometry, NormBounds, NormEstimates, State, expand
from surefoot.linalg import device
from surefoot.stabilise.base import NUMBER, Ball, Known, Limit, Moved, Stabiliser, along
from surefoot.stabilise.decay import DecoupledWeightDecay
from surefoot.stabilise.running_bound import MARGIN, MARGIN_STEPS, enforce, margin


@dataclass(frozen=True)
class PostClip(Ball):
    """`clip(w - eta d, radius)`, clip being the nearest point of the ball: `norm(w) <= radius`, whatever d is.

    Where a clip is costly (`Geometry.costly`: an eigendecomposition under the spectral norm), an upper bound on the
    norm, `upper`, is kept from step to step. Only weights with `upper` above the radius are clipped, further in by
    `(period - 1) * eta`, half the radius at most: the norm is bounded at every step at 1/period of the cost.

    On an accelerator a step must not wait, so such a matrix is not clipped but multiplied by
    `min(1, radius / upper)`, as by `Rescale`. `RunningBound` says when `upper` is certified anew.

    Args:
        radius: in the unit of the role.
        period: least number of steps between two costly clips of a matrix, or two certificates on an accelerator. None
            chooses 16, or as many as move the matrix by a quarter of the radius; a clip then moves the weight by as
            many steps at once. 1 is the scheme as published, whose steps move it by at most 1.62 eta.

    Raises:
        ValueError: a radius that is not positive and finite, a period below 1.

    Source: "Beyond MuP 4", Post Clip.

    >>> PostClip(2.0).promise
    'norm <= 2 at every step, certified'
    """

    told: ClassVar[str] = "{norm} <= {radius:.4g} at every step, certified"
    extent: ClassVar[Extent] = Extent.NORM

    period: int | None = field(default=None, metadata=NUMBER)

    def init_state(self, w: Tensor, geometry: Geometry, ball: Geometry) -> State:
        """The running bound "upper" on a costly norm: at first inf on a CPU, a certificate on an accelerator."""
        if not ball.costly:
            return {}
        unknown = w.new_full(w.shape[: -ball.ndim], inf)
        return {"upper": unknown if device.on_cpu(w) else NormBounds.of(ball).certificate(w)}

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then project where the bound requires it."""
        moved = along(w, d, eta, into=w)
        if not cache or "upper" not in cache:
            return ball.project(moved, self.radius, cache)
        most = longest(ball) if longest is not None else inf
        return enforce(moved, cache, ball, self.radius, eta, most, self.period)

    def certificate_period(self, eta: Eta) -> int:
        """`period`, or 16, or as many steps as move the matrix by a quarter of the radius; 1 for a rate on a device."""
        if self.period is not None:
            return self.period
        if isinstance(eta, Tensor) and not device.on_cpu(eta):
            return 1
        return max(1, min(MARGIN_STEPS, int(MARGIN * self.radius / max(float(eta), 1e-30))))

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and where it may leave the ball the way back: with a margin of 16 steps, 15 steps at once."""
        reach = eta * known.longest(ball)
        running, inside = known.upper, known.upper.new_tensor(self.radius)
        if ball.costly:  # the bound at the next step: it grows by rounding, too
            running = {**self.init_state(w, ball, ball), **known.cache}["upper"] * (1 + 1e-5)
            if not device.on_cpu(w):
                return reach + (running.maximum(NormBounds.of(ball).certificate(w)) + reach - self.radius).clamp_min(0)
            inside = self.radius - margin(self.radius, reach, self.period)
        back = ChangeBounds.of(ball).clip_change_bound((known.upper - inside).clamp_min(0), reach)
        return torch.where((running + reach > self.radius) & (known.upper + reach > inside), back, reach)


@dataclass(frozen=True)
class DecayedPostClip(PostClip, DecoupledWeightDecay):
    """`clip((1 - lr rate) w - eta d, radius)`: `DecoupledWeightDecay`, then `PostClip`.

    Decay only lowers a norm, so all that `PostClip` proves still holds.

    Args:
        rate: the weight decay as published.
        lr_scale: the role's scale rule.
        radius: in the unit of the role.

    Raises:
        ValueError: a rate or a radius that is not positive and finite.

    >>> from surefoot.scaling import Constant
    >>> DecayedPostClip(0.08, Constant(), 2.0).promise
    'norm <= 2 at every step, certified'
    """

    period: ClassVar[None] = None  # type: ignore[misc]

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`norm <= radius`, as of `PostClip`."""
        return Stabiliser.describe(self, norm, longest)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Decay, step, project."""
        return super().move(self.shrunk(w, eta), d, eta, ball, cache, longest)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The decay, and `PostClip`'s of what it leaves."""
        decay = self.part(w, eta) * known.upper
        return decay + super().largest_change(w, eta, ball, replace(known, upper=known.upper - decay))


@dataclass(frozen=True)
class Rescale(Ball):
    """`w min(1, radius / upper(w))` after the step: `norm(w) <= radius` without singular vectors.

    On an accelerator matrix products prove `upper`, 1.3 % above the norm at 768 rows, and the step never waits.

    Args:
        radius: in the unit of the role.

    Raises:
        ValueError: a radius that is not positive and finite.

    >>> Rescale(2.0).promise
    'norm <= 2 at every step, certified; rescaled'
    """

    told: ClassVar[str] = "{norm} <= {radius:.4g} at every step, certified; rescaled"
    extent: ClassVar[Extent] = Extent.NORM

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then scale down."""
        stepped = along(w, d, eta, into=w)
        _, upper, cache = NormBounds.of(ball).bounds(stepped, cache)
        scale = (self.radius / expand(upper, ball).clamp_min(self.radius)).to(w.dtype)
        return stepped * scale, cache

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and the way back."""
        reach, tight = eta * known.longest(ball), 1.0 if device.on_cpu(w) else 1.02
        return reach + (NormBounds.of(ball).bounds(w)[1] + reach - self.radius / tight).clamp_min(0)


@dataclass(frozen=True)
class StreamingPostClip(Ball):
    """`PostClip` of the leading singular values only, by vectors that are improved once per step. No guarantee.

    With k at least the rank of a persistent pull it holds the radius to 1 %. One vector against a pull of rank 8
    settles 28 % above (radius 5, eta .05), and a full-rank step raises every singular value at once. `PostClip` has
    the bound. With one vector this is Wion. For cheap norms it equals `PostClip`.

    Args:
        radius: in the unit of the role.
        vectors: k, the number of singular vectors tracked per matrix.

    Raises:
        ValueError: a radius that is not positive and finite, no vectors.

    Source: "Beyond MuP 4", streaming power iteration.

    >>> StreamingPostClip(2.0, vectors=3).promise
    'norm near 2, 3 directions clipped, no guarantee'
    """

    told: ClassVar[str] = "{norm} near {radius:.4g}, {vectors} directions clipped, no guarantee"

    vectors: int = field(default=1, metadata=NUMBER)

    def init_state(self, w: Tensor, geometry: Geometry, ball: Geometry) -> State:
        """Singular-vector estimates, where the weight's norm is costly."""
        return NormEstimates.of(ball).init_vectors(w, self.vectors)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then clip on the span of the vectors."""
        cache = self.init_state(w, ball, ball) if cache is None else cache
        return NormEstimates.of(ball).clip_leading(along(w, d, eta, into=w), self.radius, cache)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and all that is outside the ball: the vectors may have missed it so far."""
        reach = eta * known.longest(ball)
        excess = (NormBounds.of(ball).bounds(w)[1] - self.radius).clamp_min(0)
        return ChangeBounds.of(ball).clip_change_bound(excess, reach)
