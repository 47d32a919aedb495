"""Directions that depend on more than the smoothed gradient: on what they remember, or on the weight."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Around, ChangeBounds, Extent, Geometry, State, Taken, expand
from surefoot.geometry.change_bounds import ROUNDED, UNKNOWN, Sizes
from surefoot.geometry.constraints import Constraint, SameNorm
from surefoot.geometry.returned import direction_of
from surefoot.geometry.spectral import Spectral
from surefoot.geometry.vectors import VectorGeometry
from surefoot.linalg import device
from surefoot.linalg.bounds import divisor, max_abs, max_abs_or_one
from surefoot.linalg.power_iteration import streaming_msign


class Adaptive(Around):
    """A norm whose direction is changed: rescaled by its history, by the gradient's size, or against the weight.

    A subclass is a frozen dataclass with the field `norm_of`, the norm whose direction it changes, and defines `take`.
    That norm may be adaptive itself: `RadialBrake(NormalisedRows())` normalises rows, then brakes. The weight's norm,
    bounds and projections are those of the innermost norm. The direction is no longer the maximiser of `<g, d>`;
    `direction_norm_bound` says how long it can be.

    >>> NormalisedRows(Spectral()).plain
    Spectral(method='auto')
    """

    extent: ClassVar[Extent] = Extent.WHOLE
    """How much of a weight `take` must see: `ROW` if only its independent problem."""

    reads: ClassVar[frozenset[str]] = frozenset({"m", "w"})
    """What `take` looks at: the smoothed gradient m, the weight w."""

    owned: ClassVar[tuple[str, ...]] = ()
    """What only the process stepping a matrix remembers, where several hold it."""

    @abstractmethod
    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction of a step.

        Args:
            w: weights `(..., out, in)` or `(..., n)`.
            m: smoothed gradients, w's shape.
            active: 1 for problems that take a step, 0 for those that keep what is remembered of them.
            memory: at first `init_memory(w)`; donated.

        Returns:
            `(direction, memory)`, the direction 0 where m is.
        """

    def inner(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction that is changed; arguments and results as of `take`."""
        norm = self.norm_of
        return norm.take(w, m, active, memory) if isinstance(norm, Adaptive) else (direction_of(norm, m), memory)

    def init_memory(self, w: Tensor) -> State:
        """That of `norm_of`."""
        return self.norm_of.init_memory(w) if isinstance(self.norm_of, Adaptive) else {}

    @property
    def changes(self) -> tuple[Adaptive, ...]:
        """This one, and those within."""
        return (self, *(self.norm_of.changes if isinstance(self.norm_of, Adaptive) else ()))

    @property
    def plain(self) -> Geometry:
        """The norm without any change."""
        return self.changes[-1].norm_of

    def tangent(self, w: Tensor, m: Tensor, constraint: Constraint, cache: State) -> Taken:
        """The part that meets the constraint of a direction m that `take` returned, scaled to norm 1 at most."""
        if isinstance(constraint, SameNorm):
            return m, cache
        d = constraint.project(w, constraint.project(w, m))  # the second takes away what the first one rounds
        return d / expand(self.norm(d), self.plain).clamp_min(1).to(d.dtype), cache


@dataclass(frozen=True)
class Changed(Adaptive):
    """A norm whose direction is changed, the spectral norm by default."""

    norm_of: Geometry = Spectral()  # noqa: RUF009


@dataclass(frozen=True)
class RMSScaled(Changed):
    """The direction times the RMS of the smoothed gradient, over each problem (a row, an entry) on its own.

    `d = rms(m) direction(m)`. Under `RowAdam` and `Adam`, m is a mean gradient over the root of its history, with an
    RMS of at most `L = (1 - b1) / sqrt((1 - b2) (1 - b1^2/b2))`, less where gradients change from step to step. So
    noise shortens the steps, and none is longer than L in the norm.

    Args:
        norm_of: the norm.

    Source: Cauchy-Schwarz, see `Adam.largest`.

    >>> import surefoot as sf
    >>> RMSScaled(sf.HeadRMS()).take(torch.zeros(1, 2), torch.tensor([[0.6, -0.8]]), 1.0, {})[0]  # m / d
    tensor([[ 0.3000, -0.4000]])
    """

    extent: ClassVar[Extent] = Extent.ROW
    reads: ClassVar[frozenset[str]] = frozenset({"m"})

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction times `rms(m)`, of entries `|m|`; under Euclidean norms of vectors m times a number."""
        norm = self.norm_of
        if isinstance(norm, VectorGeometry) and not norm._redirected and norm.exponent == 2 and m.numel():
            return m * (1 / (norm.scale(m.shape) * math.sqrt(m.shape[norm.dim]))), memory
        (d, memory), dims = self.inner(w, m, active, memory), tuple(self.norm_of.couples)
        if not dims or not m.numel():
            return d * m.abs(), memory
        peak = max_abs(m, dims)
        square = (m / divisor(peak)).square().mean(dims, keepdim=True)
        return d * (peak * square.sqrt()), memory

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """The direction's times the largest RMS; inf where the smoothed gradient has no bound."""
        if not math.prod(shape):
            return 0.0
        known, dims = smoothed.within(shape), self.norm_of.couples
        over = {frozenset[int](): known.entry, frozenset({-1}): known.row / math.sqrt(shape[-1])}
        over[frozenset({-2})] = known.column / math.sqrt(shape[-2:][0])
        length = over.get(dims, known.whole / math.sqrt(math.prod(shape)))
        return ROUNDED * length * ChangeBounds.of(self.norm_of).direction_norm_bound(norm, shape)


@dataclass(frozen=True)
class NormalisedRows(Changed):
    """The direction with rows of about equal length: `d_i / sqrt(v_i)`, v_i the running mean of row i's mean square.

    The result is then scaled to the direction's Frobenius norm. State: 4 bytes per row, sharded with the rows.

    Args:
        norm_of: the norm.
        beta: kept fraction of v.

    Raises:
        ValueError: a fraction outside [0, 1).

    Source: Z. Li et al., "NorMuon", 2025, arXiv:2510.05491, algorithm 1.

    >>> rows, m = NormalisedRows(Spectral("svd")), torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    >>> d, memory = rows.take(m, m, 1.0, rows.init_memory(m))
    >>> d.square().sum(-1)  # the direction's rows have squares 1, 1 and 1
    tensor([[1.0000, 1.0000, 1.0000]])
    """

    beta: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"NormalisedRows's beta must lie in [0, 1), not {self.beta}")

    def init_memory(self, w: Tensor) -> State:
        """Zeros, one for each row."""
        return {**super().init_memory(w), "row_mean": w.new_zeros(w.shape[:-1])}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction over the root of its rows' history, at its own Frobenius norm."""
        d, memory = self.inner(w, m, active, memory)
        rate = (1 - self.beta) * active
        history = torch.lerp(memory["row_mean"][..., : m.shape[-2], None], d.square().mean(-1, keepdim=True), rate)
        even = d / divisor(history).sqrt()
        before, after = (torch.linalg.matrix_norm(x, keepdim=True) for x in (d, even))
        return even * (before / divisor(after)), {**memory, "row_mean": history[..., 0]}

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """From the Frobenius norm alone: a formerly short row may now have all of it."""
        whole = ChangeBounds.of(self.norm_of).direction_sizes(shape, smoothed).within(shape).whole * ROUNDED
        return ChangeBounds.of(norm).norm_bound(Sizes(whole=whole).within(shape), shape)


@dataclass(frozen=True)
class Oblique(Changed):
    """Columns and rows in turn, without their part along the weight: `0.2 sqrt(n_k) t / |t|_k`, no maximiser of a norm.

    At even steps k is the columns, at odd ones the rows; `t = m - <m, w>_k w / |w|_k^2` is tangent to the sphere that a
    column (row) of w lies on, and `|t|_k` its length, so that the entries have RMS 0.2. State: a step count.

    Args:
        norm_of: the norm of the weight.

    Source: Y. Gu, Z. Xie, "Mano", 2026, arXiv:2601.23000, algorithm 1.

    >>> w, m = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> Oblique().take(w, m, 1.0, Oblique().init_memory(w))[0]  # 0.2 sqrt(2) by columns; diagonals are along w
    tensor([[[0.0000, 0.2828],
             [0.2828, 0.0000]]])
    """

    def init_memory(self, w: Tensor) -> State:
        """The number of steps taken."""
        return {"turn": w.new_zeros(w.shape[:-2])}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """Both, and the one whose turn it is."""
        turn = memory["turn"][..., None, None]
        columns, rows = (_tangent(w, m, dim) for dim in (-2, -1))
        return torch.where(turn % 2 == 0, columns, rows), {**memory, "turn": (turn + active)[..., 0, 0]}

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """From rows or columns of entries of RMS 0.2."""
        length = [0.2 * math.sqrt(n) * ROUNDED for n in shape[-2:]]
        sizes = (Sizes(column=length[0]), Sizes(row=length[1]))
        return max(ChangeBounds.of(norm).norm_bound(size.within(shape), shape) for size in sizes)


def _tangent(w: Tensor, m: Tensor, dim: int) -> Tensor:
    """`0.2 sqrt(n) t / |t|` for vectors along a dimension of length n; 0 where t is rounding, of a gradient along w."""
    m, w = (x / max_abs_or_one(x) for x in (m, w))
    t = m - (m * w).sum(dim, keepdim=True) / divisor(w.square().sum(dim, keepdim=True)) * w
    length, whole = (torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (t, m))
    rounding = (8 + math.sqrt(w.shape[dim])) * torch.finfo(w.dtype).eps * whole
    return t * torch.where(length > rounding, 0.2 * math.sqrt(w.shape[dim]) / divisor(length), 0)


@dataclass(frozen=True)
class StreamingSpectral(Adaptive):
    """The spectral norm, its direction by one power iteration from the last step's singular vectors.

    `U <- orthonormal(m V)`, `V <- orthonormal(mᵀ U)`, `d = unit U Vᵀ`, see `linalg.power_iteration.streaming_msign`.
    Alignment `<d, m> / (|d| |m|_*)` over the training of a small GPT: docs/performance.md. A zero gradient leaves the
    vectors as they are.

    State: V on the smaller side, `4 min(out, in)**2` bytes per matrix, up to 4 bytes per parameter, kept by the rank
    that owns the matrix. Blocks of unequal sizes in one parameter are stored at the largest one's size.

    Args:
        norm_of: the norm: `Spectral()`, or `TransposedConvSpectral` of some stride.
        iterations: power iterations a step.

    Raises:
        ValueError: a norm that is not spectral, fewer than one iteration.

    Source: "Streaming Power Iteration for Muon", cited in "Beyond MuP 4"; see `streaming_msign` for what differs.

    >>> streaming, m = StreamingSpectral(), torch.tensor([[[2.0, 0.0], [0.0, -1.0]]])
    >>> d, memory = streaming.take(m, m, 1.0, streaming.init_memory(m))
    >>> d.round(decimals=3) + 0
    tensor([[[ 1.,  0.],
             [ 0., -1.]]])
    """

    norm_of: Spectral = Spectral()  # noqa: RUF009
    iterations: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.norm_of, Spectral):
            raise ValueError(f"StreamingSpectral takes the direction of a spectral norm, not of {self.norm_of}")
        if self.iterations < 1:
            raise ValueError(f"StreamingSpectral needs at least 1 iteration, not {self.iterations}")

    def init_memory(self, w: Tensor) -> State:
        """The identity on the smaller side of each matrix."""
        k = min(w.shape[-2:])
        return {"basis": torch.eye(k, dtype=w.dtype, device=w.device).repeat(*w.shape[:-2], 1, 1)}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> Taken:
        """The direction from the last basis, and the next one; where a block is stored at a larger size, its corner."""
        k = min(m.shape[-2:])
        old = memory["basis"][..., :k, :k]
        d, new = streaming_msign(m, old, self.iterations)
        new = torch.where(device.scalar_like(active, m) > 0, new, old)
        return d.mul_(self.norm_of.unit(m.shape)), {**memory, "basis": new}

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Those of the norm's own direction, whose largest singular value is at least as large."""
        return self.norm_of.direction_sizes(shape, smoothed)
