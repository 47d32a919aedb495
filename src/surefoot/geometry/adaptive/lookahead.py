"""A look-ahead along the running mean of the steps that were taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.adaptive.base import ROUNDED, Adaptive, Taken
from surefoot.geometry.base import ChangeBounds, Geometry
from surefoot.geometry.sizes import UNKNOWN, Sizes
from surefoot.geometry.spectral import Spectral


@dataclass(frozen=True)
class MeanLookahead(Adaptive):
    """`d + a D` with `D <- b D + (1 - b) (d + a D)`: gradients are taken ahead, along the mean of the steps so far.

    With a trajectory x, the weights that the model holds are `w = x - eta a D`, D being the running mean of `(x_t -
    x_(t+1)) / eta`: the gradient at w gives the direction d, and `x <- w - eta d`. Then w itself moves by
    `-eta (d + a D)` with the new D, a direction that knows no second set of weights; x and w meet as eta falls to 0.
    Decay is no part of D. Steps that agree for longer than `1 / (1 - b)` of them become `1 / (1 - a)` times as long.

    No step is longer: if every direction has norm L at most, `|D| <= L / (1 - a)` by induction, as the next D is
    `b + (1 - b) a` parts of it and `1 - b` of d, so that `|d + a D| <= L / (1 - a)`, in every norm.

    State: 4 bytes a parameter, of the rank that owns the matrix. Tables, too, are stepped whole by an owner.

    Args:
        norm_of: the norm.
        ahead: a, 0 to below 1.
        memory: b, kept fraction of the mean.

    Raises:
        ValueError: a fraction outside [0, 1).

    Source: C.-Y. Yau et al., "EMA-Nesterov", 2026, arXiv:2605.25395, whose rates the schedule multiplies twice.

    >>> import surefoot as sf
    >>> ahead, w = MeanLookahead(sf.RMS(), ahead=0.5, memory=0.5), torch.ones(1, 2)
    >>> d, memory = ahead.take(w, w, 1.0, ahead.init_memory(w))
    >>> d, ahead.take(w, w, 1.0, memory)[0]  # D is 1/2, then 1/4 + (1 + 1/4)/2
    (tensor([[1.2500, 1.2500]]), tensor([[1.4375, 1.4375]]))
    """

    reads: ClassVar[frozenset[str]] = frozenset({"m"})
    owned: ClassVar[tuple[str, ...]] = ("drift",)

    norm_of: Geometry = Spectral()  # noqa: RUF009
    ahead: float = 0.3
    memory: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.ahead < 1 or not 0 <= self.memory < 1:
            raise ValueError(f"MeanLookahead's fractions must lie in [0, 1), not {self.ahead} and {self.memory}")

    def init_memory(self, w: Tensor) -> dict[str, Tensor]:
        """Zeros like w, the mean of the steps."""
        return {**super().init_memory(w), "drift": torch.zeros_like(w)}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction, and the part of the mean."""
        d, memory = self.inner(w, m, active, memory)
        old = memory["drift"][tuple(slice(n) for n in m.shape)]  # of unequal blocks, stored at the largest one's size
        drift = torch.lerp(old, torch.add(d, old, alpha=self.ahead), (1 - self.memory) * active)
        return torch.add(d, drift, alpha=self.ahead), {**memory, "drift": drift}

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """That of the direction over `1 - ahead`."""
        return ROUNDED * ChangeBounds.of(self.norm_of).direction_norm_bound(norm, shape, smoothed) / (1 - self.ahead)
