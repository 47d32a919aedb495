"""Post Clip and Pre Decay by a few singular-vector estimates a matrix: cheap, and without a guarantee."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surefoot.geometry.base import Cache, ChangeBounds, Eta, Geometry, NormBounds, NormEstimates, State, Taken, expand
from surefoot.stabilise.base import Ball, Decay, Known, Limit, Moved, along, largest_step, remaining, require_count


@dataclass(frozen=True)
class StreamingPostClip(Ball):
    """Post Clip of the leading singular values only, by vectors that are improved once a step. No guarantee.

    With k at least the rank of a persistent pull it holds the radius to 1 %; one vector against a pull of rank 8
    settles 28 % above (radius 5, eta .05), and a full-rank step raises every singular value at once. `PostClip` has
    the bound. With one vector this is Wion. For norms that are cheap it equals Post Clip.

    Args:
        radius: in the unit of the role.
        vectors: k, the number of vectors of a matrix.

    Raises:
        ValueError: a radius that is not positive and finite, no vectors.

    Source: "Beyond MuP 4", streaming power iteration.

    >>> StreamingPostClip(2.0, vectors=3).promise
    'norm near 2, 3 directions clipped, no guarantee'
    """

    vectors: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("StreamingPostClip's vectors", self.vectors)

    def init_state(self, w: Tensor, geometry: Geometry, ball: Geometry) -> State:
        """Singular-vector estimates, where the weight's norm is costly."""
        return NormEstimates.of(ball).init_vectors(w, self.vectors)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Step, then clip on the span of the vectors."""
        cache = NormEstimates.of(ball).init_vectors(w, self.vectors) if cache is None else cache
        return NormEstimates.of(ball).clip_leading(along(w, d, eta, into=w), self.radius, cache)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and all that is outside the ball: the vectors may have missed it so far."""
        reach = eta * known.longest(ball)
        excess = (NormBounds.of(ball).bounds(w)[1] - self.radius).clamp_min(0)
        return ChangeBounds.of(ball).clip_change_bound(excess, reach)

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """The radius, without a guarantee."""
        return f"{norm} near {self.radius:.4g}, {self.vectors} directions clipped, no guarantee"


@dataclass(frozen=True)
class StreamingPreDecay(Decay):
    """Pre Decay of the leading singular values only: spectral weight decay, by vectors as above. No guarantee.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.
        vectors: k, the number of vectors of a matrix.

    Raises:
        ValueError: a rate that is not positive and finite, no vectors.

    Source: "Beyond MuP 4", streaming power iteration.

    >>> StreamingPreDecay(0.5).promise
    'norm near 2, 1 directions decayed, no guarantee'
    """

    vectors: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("StreamingPreDecay's vectors", self.vectors)

    def init_state(self, w: Tensor, geometry: Geometry, ball: Geometry) -> State:
        """Singular-vector estimates, where the weight's norm is costly."""
        return NormEstimates.of(ball).init_vectors(w, self.vectors)

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """Clip to `(1 - eta rate)` of the largest singular value on the span of the vectors, then step."""
        clipped, cache = self._decayed(w, eta, ball, cache)
        return along(clipped, d, eta, into=clipped), cache

    def _decayed(self, w: Tensor, eta: Eta, ball: Geometry, cache: Cache) -> Taken:
        cache = NormEstimates.of(ball).init_vectors(w, self.vectors) if cache is None else cache
        norm, cache = NormEstimates.of(ball).estimate_norm(w, cache)
        limit = expand(norm, ball).to(w.dtype) * remaining(largest_step(eta, ball), self.rate)
        return NormEstimates.of(ball).clip_leading(w, limit, cache)

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and the decay, which is known: the next vectors may find more than the estimate."""
        kept = dict(known.cache) or None
        return eta * known.longest(ball) + NormBounds.of(ball).bounds(self._decayed(w, eta, ball, kept)[0] - w)[1]

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`1 / rate`, without a guarantee."""
        return f"{norm} near {1 / self.rate:.4g}, {self.vectors} directions decayed, no guarantee"
