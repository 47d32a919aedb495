"""Steps of one norm on weights of another: MOGA's, Lion's and Adam's steps on a weight whose own norm is bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry
from surefoot.geometry.meanpq import MeanOperator
from surefoot.geometry.spectral import Spectral


@dataclass(frozen=True)
class Paired(Geometry):
    """Direction of `increment`; norm, projection and bounds of `weight`. A pair for stabilisers, not itself a norm.

    Args:
        increment: whose steps are taken.
        weight: what a radius and a stability number are of.

    Source: the specification's "initial values belong to the role": a linear weight's stability is always RMS -> RMS.

    >>> pair = Paired(MeanOperator(1, math.inf), Spectral())
    >>> pair.longest, Paired(MeanOperator(3, math.inf), Spectral()).longest
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
    def longest(self) -> float:
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

    def fresh(self, w: Tensor) -> dict[str, Tensor]:
        """The weight's."""
        return self.weight.fresh(w)

    def trust(self, w: Tensor, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weight's."""
        return self.weight.trust(w, cache)

    def hold(
        self,
        w: Tensor,
        radius: float,
        eta: Eta,
        period: int | None = 1,
        cache: Cache = None,
        longest: float | None = None,
    ) -> tuple[Tensor, Cache]:
        """The weight's, for steps as long as the increment's may be."""
        return self.weight.hold(w, radius, eta, period, cache, self.longest)

    def warm(self, w: Tensor, vectors: int) -> dict[str, Tensor]:
        """The weight's."""
        return self.weight.warm(w, vectors)

    def seen(self, w: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight's."""
        return self.weight.seen(w, cache)

    def trim(self, w: Tensor, radius: float | Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight's."""
        return self.weight.trim(w, radius, cache)

    def shrink(self, w: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """The weight's."""
        return self.weight.shrink(w, factor)

    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        """The weight's."""
        return self.weight.bounds(w, cache)
