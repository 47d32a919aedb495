"""Training on a sphere: the norm stays what it is, or becomes a radius."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry import RMS, Frobenius, lp_balls
from surefoot.geometry.base import Cache, ChangeBounds, Eta, Extent, Geometry, NormBounds, expand
from surefoot.geometry.change_bounds import Sizes, back_to_frobenius, back_to_other
from surefoot.geometry.constraints import Constraint, SameNorm
from surefoot.geometry.spectral import Spectral
from surefoot.linalg.bounds import divisor
from surefoot.linalg.device import widened
from surefoot.linalg.small_eigh import finite_only
from surefoot.stabilise.base import NORM, Checked, Known, Limit, Moved, Stabiliser, along


@dataclass(frozen=True)
class Normalise(Checked):
    """`w - eta d`, rescaled to norm radius: training on a sphere. A zero weight (a bias at its start) stays zero.

    Args:
        radius: in the unit of the role; None keeps the norm that the weight has.
        norm: the sphere's norm; None is the weight's own, `Frobenius()` gives Hyperball.

    Raises:
        ValueError: a radius that is not positive and finite.

    >>> Normalise(2.0).promise, Normalise().promise
    ('norm = 2, or 0 where it is 0', 'norm = initial')
    """

    radius: float | None = field(default=None, metadata=NORM)
    norm: Geometry | None = None

    @property
    def extent(self) -> Extent:  # type: ignore[override]
        """The norm, unless it is another than the weight's own."""
        return Extent.NORM if self.norm is None else Extent.WHOLE

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then rescale; w where it is zero or would become so."""
        stepped, sphere = along(w, d, eta), self.norm or ball
        after = expand(sphere.norm(stepped), sphere)
        if self.radius is None:
            target = expand(sphere.norm(w), sphere)
        else:
            target = self.radius * (~NormBounds.of(sphere).is_zero(w)).to(after.dtype)
        return scaled_to(stepped, w, after, target), cache

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and the way back to the sphere; in another norm than the sphere's, times the factor of that way.

        A zero weight stays.
        """
        reach = eta * known.longest(ball)
        if self.norm is None or self.norm == ball:
            lower, upper, _ = NormBounds.of(ball).bounds(w)
            off = 0.0 if self.radius is None else torch.maximum(upper - self.radius, self.radius - lower)
            return torch.where(upper == 0, 0, off + 2 * reach)
        now, own = self.norm.norm(w), eta * known.longest(self.norm)
        target = now if self.radius is None else torch.full_like(now, self.radius)
        both = known.upper + target * ChangeBounds.of(self.norm).direction_norm_bound(ball, tuple(w.shape))
        if isinstance(self.norm, Frobenius) and isinstance(ball, Spectral):
            values = finite_only(torch.linalg.svdvals, w) / ball.unit(w.shape)
            share = target / divisor(now)
            change = share * back_to_frobenius(values, reach).to(now.dtype) + (share - 1).abs() * known.upper
            return change.minimum(both)
        along_w = torch.full_like(now, own)
        if isinstance(self.norm, Frobenius | RMS):  # `<w, d>` is at most the dual norm, which may be less than lengths
            square = _length(w, ball).flatten(-ball.ndim)[..., 0].square()
            along_w = along_w.minimum(now * reach * ChangeBounds.of(ball).dual(w) / divisor(square))
        return back_to_other(now, own, along_w, target, reach, known.upper).minimum(both)

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`norm = radius`; of its own norm if it has one."""
        name = norm if self.norm is None else f"{type(self.norm).__name__} norm"
        return f"{name} = initial" if self.radius is None else f"{name} = {self.radius:.4g}, or 0 where it is 0"

    @property
    def bound(self) -> float:
        """The radius, if it is of the weight's own norm; else inf."""
        return math.inf if self.radius is None or self.norm is not None else self.radius


@dataclass(frozen=True)
class Hyperball(Stabiliser):
    """`w <- R n(w - eta R n(d))` with `n(x) = x / |x|_F` and `R = |w|_F`: a step turns the weight by about eta radians.

    R is the initial length, since every step keeps it. The direction d may be any optimizer's; its length does not
    matter, and eta is relative to the weight. A zero weight stays zero. A role of matrices with `Identity()`, whose
    norm takes each row as a vector, also needs `weight_norm=Frobenius()`.

    Source: K. Wen et al., "Fantastic pretraining optimizers and where to find them II: Hyperball", arXiv 2606.16899.

    >>> from surefoot.geometry import RMS
    >>> w, m = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])
    >>> Hyperball().move(w, m, 1.0, RMS())[0]  # from (3, 4) half way to (-4, 3)
    tensor([-0.7071,  4.9497])
    """

    told: ClassVar[str] = "Frobenius norm = initial, by steps of eta of it"

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step by eta of the weight's length, then rescale."""
        share = _length(w, ball) / divisor(_length(d, ball))
        stepped = w - eta * (d * share).to(w.dtype)
        return scaled_to(stepped, w, _length(stepped, ball), _length(w, ball)), cache

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The chord of the largest angle, `asin(eta)`, which may be of rank one; at most both weights."""
        now = _length(w, ball).flatten(-ball.ndim)[..., 0].to(known.upper.dtype)
        one = Sizes(whole=1.0).within(tuple(w.shape[-ball.ndim :]))
        longest = ChangeBounds.of(ball).norm_bound(one, tuple(w.shape)) * now
        chord = 2 * math.sin(math.asin(eta) / 2) if eta < 1 else 2.0
        return torch.minimum(chord * longest, known.upper + longest)


@dataclass(frozen=True)
class SpectralSphere(Normalise):
    """Steepest descent on the sphere `norm(w) = radius`: the best direction that keeps the norm, then a rescaling.

    The direction maximises `<m, d>` over `norm(d) <= 1` and `|uᵀ d v| <= 0.01`, u and v being w's leading singular
    pair, estimated with two vectors kept from step to step; see `linalg.tangent`. If the step's norm is not the
    weight's, or not the spectral one, it equals `Normalise(radius)`.

    Cost: about 2 directions a step (on an accelerator 10, without waiting for the host) and an exact norm.

    Args:
        radius: in the unit of the role.

    Raises:
        ValueError: a radius that is not positive and finite.

    Source: "Spectral Sphere", 2026; "Beyond MuP 4" compares it.

    >>> SpectralSphere(2.0).promise
    'norm = 2, or 0 where it is 0'
    """

    radius: float = field(metadata=NORM)
    norm: ClassVar[None] = None  # type: ignore[misc]

    def constraint(self, geometry: Geometry, ball: Geometry, shape: torch.Size) -> Constraint | None:
        """The norm, where the step is along the weight's own sphere."""
        return SameNorm() if geometry is ball else None


def scaled_to(stepped: Tensor, w: Tensor, after: Tensor, target: Tensor) -> Tensor:
    """`stepped * target / after`; w where either is 0."""
    legal = (target > 0) & (after > 0)
    return torch.where(legal, stepped * (target / torch.where(legal, after, 1)).to(w.dtype), w)


def _length(x: Tensor, ball: Geometry) -> Tensor:
    """The Euclidean length of each of the ball's problems, which stay as dimensions of size 1."""
    whole = lp_balls.length(widened(x).flatten(-ball.ndim), 2, -1)
    return whole[..., None] if ball.ndim == 2 else whole
