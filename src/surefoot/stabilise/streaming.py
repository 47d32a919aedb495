"""Post Clip and Pre Decay by a few warm vectors a matrix: cheap, and without a guarantee."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry, expand
from surefoot.stabilise.base import Stabiliser, remaining, require_count, require_positive, step, where_moved, whole


@dataclass(frozen=True)
class StreamingPostClip(Stabiliser):
    """Post Clip of the leading singular values only, by vectors that are kept and improved once a step. No guarantee.

    With k at least the rank of a persistent pull it holds the radius to 1 %; one vector against a pull of rank 8
    settles 28 % above (radius 5, eta .05), and a full-rank step raises every singular value at once. `PostClip` has
    the bound. With one vector this is Wion. For norms that are cheap it equals Post Clip.

    Args:
        radius: in the unit of the role.
        vectors: k, kept per matrix.

    Source: "Beyond MuP 4", streaming power iteration.
    """

    radius: float
    vectors: int = 1

    def __post_init__(self) -> None:
        require_positive("StreamingPostClip's radius", self.radius)
        require_count("StreamingPostClip's vectors", self.vectors)

    def init_state(self, w: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """The geometry's vectors."""
        return geometry.init_vectors(w, self.vectors)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Step, then cut what the vectors see."""
        cache = geometry.init_vectors(w, self.vectors) if cache is None else cache
        trimmed, cache = geometry.clip_leading(step(w, m, eta, geometry), self.radius, cache)
        return where_moved(eta, geometry, trimmed, w), cache

    def scaled(self, unit: float) -> StreamingPostClip:
        """Radius times unit."""
        return replace(self, radius=self.radius * unit)

    @property
    def promise(self) -> str:
        """What it aims at."""
        return f"norm near {self.radius:.4g}, {self.vectors} directions clipped, no guarantee"

    @property
    def bound(self) -> float:
        """What it aims at."""
        return self.radius


@dataclass(frozen=True)
class StreamingPreDecay(Stabiliser):
    """Pre Decay of the leading singular values only: spectral weight decay, by vectors kept as above. No guarantee.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.
        vectors: k, kept per matrix.

    Source: "Beyond MuP 4", streaming power iteration.
    """

    rate: float
    vectors: int = 1

    def __post_init__(self) -> None:
        require_positive("StreamingPreDecay's rate", self.rate)
        require_count("StreamingPreDecay's vectors", self.vectors)

    def init_state(self, w: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """The geometry's vectors."""
        return geometry.init_vectors(w, self.vectors)

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Cut what the vectors see to `(1 - eta rate)` of the largest, then step."""
        cache = geometry.init_vectors(w, self.vectors) if cache is None else cache
        norm, cache = geometry.estimate_norm(w, cache)
        trimmed, cache = geometry.clip_leading(
            w, expand(norm, geometry).to(w.dtype) * remaining(whole(eta, geometry), self.rate), cache
        )
        return where_moved(eta, geometry, step(trimmed, m, eta, geometry), w), cache

    def scaled(self, unit: float) -> StreamingPreDecay:
        """Rate over unit."""
        return replace(self, rate=self.rate / unit)

    @property
    def promise(self) -> str:
        """What it aims at."""
        return f"norm near {1 / self.rate:.4g}, {self.vectors} directions decayed, no guarantee"

    @property
    def bound(self) -> float:
        """What it aims at."""
        return 1 / self.rate
