"""Steps of one norm on weights of another: MOGA's, Lion's and Adam's steps on a weight whose own norm is bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry
from surefoot.geometry.mean_operator import MeanOperator
from surefoot.geometry.spectral import Spectral


@dataclass(frozen=True)
class Paired(Geometry):
    """Direction of `increment`; norm, projection and bounds of `weight`. A pair for stabilisers, not itself a norm.

    Args:
        increment: whose steps are taken.
        weight: what a radius and a stability number are of.

    Source: the specification's "initial values belong to the role": a linear weight's stability is always RMS -> RMS.

    >>> pair = Paired(MeanOperator(1, math.inf), Spectral())
    >>> pair.direction_norm_bound, Paired(MeanOperator(3, math.inf), Spectral()).direction_norm_bound
    (1.001, inf)
    """

    increment: Geometry
    weight: Geometry

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The weight's."""
        return self.weight.ndim

    @property
    def couples(self) -> frozenset[int]:
        """What either needs whole."""
        return self.increment.couples | self.weight.couples

    @property
    def direction_norm_bound(self) -> float:
        """Of `(p, q)` steps with p <= 2 <= q under the spectral norm 1.001, since that norm is the smaller one."""
        step = self.increment
        smaller = isinstance(step, MeanOperator) and step.p <= 2 <= step.q and type(self.weight) is Spectral
        return 1.001 if smaller else math.inf

    def norm(self, w: Tensor) -> Tensor:
        """The weight's."""
        return self.weight.norm(w)

    def direction(self, g: Tensor) -> Tensor:
        """The increment's."""
        return self.increment.direction(g)

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """The weight's."""
        return self.weight.project(w, radius, cache)

    def init_state(self, w: Tensor) -> dict[str, Tensor]:
        """The weight's."""
        return self.weight.init_state(w)

    def revalidate(self, w: Tensor, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weight's."""
        return self.weight.revalidate(w, cache)

    def enforce(
        self,
        w: Tensor,
        radius: float,
        eta: Eta,
        period: int | None = 1,
        cache: Cache = None,
        longest: float | None = None,
    ) -> tuple[Tensor, Cache]:
        """The weight's, for steps as long as the increment's may be."""
        return self.weight.enforce(w, radius, eta, period, cache, self.direction_norm_bound)

    def init_vectors(self, w: Tensor, vectors: int) -> dict[str, Tensor]:
        """The weight's."""
        return self.weight.init_vectors(w, vectors)

    def estimate_norm(self, w: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight's."""
        return self.weight.estimate_norm(w, cache)

    def clip_leading(
        self, w: Tensor, radius: float | Tensor, cache: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight's."""
        return self.weight.clip_leading(w, radius, cache)

    def shrink(self, w: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """The weight's."""
        return self.weight.shrink(w, factor)

    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        """The weight's."""
        return self.weight.bounds(w, cache)
