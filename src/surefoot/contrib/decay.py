"""Weight decay only where the step agrees, or independent of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, ChangeBounds, Eta, Extent, Geometry, NormBounds
from surefoot.geometry.change_bounds import Sizes
from surefoot.geometry.spectral import Spectral
from surefoot.linalg import device
from surefoot.stabilise.base import Decay, Known, Limit, Moved, along, share
from surefoot.stabilise.decay import WeightDecay


@dataclass(frozen=True)
class CautiousDecay(Decay):
    """`w - eta d - eta rate w [d w >= 0]`: decay of the entries that the step makes smaller, or leaves alone.

    No bound follows: an entry that every step makes larger is never decayed.

    Args:
        rate: decay per unit of eta; `eta * rate` is capped at 1.

    Raises:
        ValueError: a rate that is not positive and finite.

    Source: L. Chen et al., "Cautious weight decay", 2025, arXiv:2510.12402.

    >>> from surefoot.geometry import MaxNorm
    >>> w, g = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    >>> CautiousDecay(0.5).move(w, MaxNorm().direction(g), 0.5, MaxNorm())[0]
    tensor([0.2500, 1.5000])
    """

    told: ClassVar[str] = "decay by {rate:.4g} eta of entries that the step shrinks, no bound"
    extent: ClassVar[Extent] = Extent.ENTRY
    bound = inf

    def move(self, w: Tensor, d: Tensor, eta: Eta, ball: Geometry, cache: Cache = None, longest: Limit = None) -> Moved:
        """The decay of some entries, then the step."""
        decayed = torch.where(d * w >= 0, w * (1 - share(eta, self.rate)), w)
        return along(decayed, d, eta), cache

    def largest_change(self, w: Tensor, eta: float, ball: Geometry, known: Known) -> Tensor:
        """The step, and the decay of any entries.

        Rows, columns and entries are no longer without some of their entries. A spectral norm may be: what is taken
        along a and b is at most the sum of the positive terms of `a^T w b`, `(|a|^T |w| |b| + a^T w b) / 2`.
        """
        part, shape = share(eta, self.rate), tuple(w.shape[-ball.ndim :])
        change = torch.full_like(known.upper, eta * known.longest(ball))
        if not w.numel():
            return change
        rows = float(torch.linalg.vector_norm(w, dim=-1).max())
        columns = float(torch.linalg.vector_norm(w, dim=-2).max()) if ball.ndim > 1 else inf
        whole = float(torch.linalg.vector_norm(w, dim=tuple(range(-ball.ndim, 0))).max())
        sizes = Sizes(float(w.abs().max()), rows, columns, whole).within(shape)
        most = ChangeBounds.of(ball).norm_bound(sizes, shape)
        decayed = torch.full_like(change, min(most, torch.finfo(change.dtype).max))
        if isinstance(ball, Spectral):
            decayed = decayed.minimum((NormBounds.of(ball).bounds(w.abs())[1] + known.upper) / 2)
        return change + part * decayed * (1 + 1e-5)


@dataclass(frozen=True)
class IndependentDecay(WeightDecay):
    """`(1 - rate) w - eta d`: the same part of the weight at every step, whatever the learning rate and its schedule.

    `norm(w) <= max(norm(w0), eta / rate)` for the largest eta of the run, by the triangle inequality.

    Args:
        rate: part of the weight that a step takes, at most 1.

    Raises:
        ValueError: a rate that is not positive, or above 1.

    Source: M. Wortsman et al., "Small-scale proxies for large-scale Transformer training instabilities", 2023,
    arXiv:2309.14322, where the schedule still multiplies it.

    >>> IndependentDecay(0.01).promise
    'norm <= max(initial, 100 eta) by decay'
    """

    bound = inf
    """Unknown until the run's largest eta is known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate > 1:
            raise ValueError(f"IndependentDecay's rate must be at most 1, the whole weight, not {self.rate}")

    def part(self, w: Tensor, eta: Eta) -> Tensor:
        """rate, where eta is not 0."""
        return self.rate * (device.scalar_like(eta, w) > 0).to(w.dtype)

    def scaled(self, unit: float, shape: tuple[int, ...]) -> IndependentDecay:
        """Itself: the part has no unit."""
        return self

    def by(self, scale: float) -> IndependentDecay:
        """Itself."""
        return self

    def describe(self, norm: str, longest: float = 1.0) -> str:
        """`norm <= max(initial, longest eta / rate)`."""
        if not isfinite(longest):
            return f"decay by {self.rate:.4g} a step, no bound: steps of unknown norm"
        return f"{norm} <= max(initial, {longest / self.rate:.4g} eta) by decay"
