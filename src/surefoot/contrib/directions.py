"""Changed directions that were measured and do not pay, or that nothing here needs."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.adaptive import Adaptive, Changed
from surefoot.geometry.base import ChangeBounds, Geometry, State, Taken, expand
from surefoot.geometry.change_bounds import ROUNDED, UNKNOWN, Sizes
from surefoot.linalg.bounds import divisor


@dataclass(frozen=True)
class DualScaled(Changed):
    """The direction times the dual norm of the smoothed gradient: steepest descent with the length that it implies.

    `d = |m|_* direction(m)` is the minimiser of `<m, -d> + |d|^2 / 2`. Steps shrink with the gradient and have no bound
    on their norm beforehand: for gradients above 1e15 they overflow.

    Args:
        norm_of: the norm.

    Source: J. Bernstein, L. Newhouse, "Old optimizer, new norm", 2024, arXiv:2409.20325, proposition 1.

    >>> import surefoot as sf
    >>> DualScaled(sf.RMS()).take(torch.zeros(2), torch.tensor([3.0, 4.0]), 1.0, {})[0]  # n m for the RMS norm
    tensor([6., 8.])
    """

    reads: ClassVar[frozenset[str]] = frozenset({"m"})

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """`<m, d> d`, the attained part of the dual norm."""
        d, memory = self.inner(w, m, active, memory)
        attained = (m * d).sum(tuple(range(-self.norm_of.ndim, 0)))
        return d * expand(attained, self.norm_of), memory


@dataclass(frozen=True)
class RadialBrake(Changed):
    """The direction with less of what only lengthens the weight: `d + (1 - keep) max(0, -<d, w>) w / |w|^2`.

    A step `w - eta d` with `-<d, w> > 0` moves outward, along the weight itself; keep multiplies that part.

    Args:
        norm_of: the norm.
        keep: part of the outward movement that remains, 0 to 1.

    Raises:
        ValueError: a part outside 0 to 1.

    >>> w = torch.tensor([[1.0, 0.0]])
    >>> RadialBrake(keep=0.0).take(w, torch.tensor([[-1.0, 0.0]]), 1.0, {})[0] + 0
    tensor([[0., 0.]])
    """

    keep: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ValueError(f"RadialBrake's keep must be from 0 to 1, not {self.keep}")

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction, then the brake, over the whole weight of each problem's matrix."""
        d, memory = self.inner(w, m, active, memory)
        dims = tuple(range(-self.norm_of.ndim, 0))
        outward = -(d * w).sum(dims, keepdim=True).clamp_max(0)
        share = outward / divisor(w.square().sum(dims, keepdim=True))
        return torch.addcmul(d, share * (1 - self.keep), w), memory

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """That of the direction, and of what is taken back: at most as long as it in the Frobenius norm."""
        step = ChangeBounds.of(self.norm_of)
        sizes, own = step.direction_sizes(shape, smoothed), step.direction_norm_bound(norm, shape, smoothed)
        back = ChangeBounds.of(norm).norm_bound(Sizes(whole=sizes.within(shape).whole).within(shape), shape)
        return own + (1 - self.keep) * back


@dataclass(frozen=True)
class UpdateFloor(Changed):
    """The direction, longer where the weight is large: its norm is at least `ratio` times the weight's.

    A step then changes the weight by at least `eta ratio` of its norm, however large it has grown; the norm of a step
    has no bound in advance. A step raises the weight's norm to at most `|w| + eta max(ratio |w|, |d|)`, d being the
    direction of `norm_of` (norm 1 unless that is adaptive): a factor of `1 + eta ratio` only once `ratio |w|` is
    larger.

    Args:
        norm_of: the norm.
        ratio: smallest norm of a direction over that of the weight.

    Raises:
        ValueError: a ratio that is not positive and finite.

    >>> w, m = torch.full((1, 2), 8.0), torch.ones(1, 2)
    >>> import surefoot as sf
    >>> UpdateFloor(sf.RowRMS(), 0.5).take(w, m, 1.0, {})[0]
    tensor([[4., 4.]])
    """

    ratio: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"UpdateFloor's ratio must be positive and finite, not {self.ratio}")

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """`max(1, ratio |w| / |d|) d`, a direction having norm 1 unless it has been changed."""
        d, memory = self.inner(w, m, active, memory)
        floor = self.ratio * self.norm_of.norm(w)
        if isinstance(self.norm_of, Adaptive):
            floor = floor / divisor(self.norm_of.norm(d))
        return d * expand(floor.clamp_min(1), self.norm_of).to(m.dtype), memory


@dataclass(frozen=True)
class MeanLookahead(Changed):
    """`d + a D` with `D <- b D + (1 - b) (d + a D)`: gradients are taken ahead, along the mean of the steps so far.

    With a trajectory x, the weights that the model holds are `w = x - eta a D`, D being the running mean of `(x_t -
    x_(t+1)) / eta`: the gradient at w gives the direction d, and `x <- w - eta d`. Then w itself moves by
    `-eta (d + a D)` with the new D, a direction that needs no second set of weights; x and w meet as eta falls to 0.
    Decay is no part of D. Directions that agree for over `1 / (1 - b)` steps become `1 / (1 - a)` times as long.

    No step is longer: if every direction has norm at most L, `|D| <= L / (1 - a)` by induction, as the next D is
    `b + (1 - b) a` parts of it and `1 - b` of d, so `|d + a D| <= L / (1 - a)`, in every norm.

    State: 4 bytes per parameter, on the rank that owns the matrix. Tables, too, are stepped whole by an owner.

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

    ahead: float = 0.3
    memory: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.ahead < 1 or not 0 <= self.memory < 1:
            raise ValueError(f"MeanLookahead's fractions must lie in [0, 1), not {self.ahead} and {self.memory}")

    def init_memory(self, w: Tensor) -> State:
        """Zeros like w, the mean of the steps."""
        return {**super().init_memory(w), "drift": torch.zeros_like(w)}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction, and the part of the mean."""
        d, memory = self.inner(w, m, active, memory)
        old = memory["drift"][tuple(slice(n) for n in m.shape)]  # of unequal blocks, stored at the largest one's size
        drift = torch.lerp(old, torch.add(d, old, alpha=self.ahead), (1 - self.memory) * active)
        return torch.add(d, drift, alpha=self.ahead), {**memory, "drift": drift}

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """That of the direction over `1 - ahead`."""
        return ROUNDED * ChangeBounds.of(self.norm_of).direction_norm_bound(norm, shape, smoothed) / (1 - self.ahead)
