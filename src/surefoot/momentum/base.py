"""From gradient to smoothed gradient: the momentum pair, and Adam's two moments for the parts that keep Adam."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Extent, State
from surefoot.geometry.change_bounds import UNKNOWN, Sizes
from surefoot.linalg import device
from surefoot.linalg.bounds import max_abs


class Smoothing(ABC):
    """Base class of momentum: what a gradient is turned into before its direction is taken. State in, state out.

    >>> import surefoot as sf
    >>> class Plain(sf.Smoothing):
    ...     def init_state(self, w): return {}
    ...     def active(self, g, finite, couples): return finite.to(g.dtype)
    ...     def __call__(self, state, g, active): return state, g
    >>> sf.Role("linear", sf.Spectral(), momentum=Plain()).momentum.averages
    ()
    """

    averages: ClassVar[tuple[str, ...]] = ()
    """The entries of the state that may be stored in half precision."""

    extent: ClassVar[Extent] = Extent.WHOLE
    """What an entry's next state cannot be computed without: how a part of a table is smoothed as in the whole."""

    by_problem: ClassVar[bool] = True
    """True if `active` says of each independent problem whether it takes a step, False if of each parameter."""

    squares: ClassVar[bool] = False
    """True if squares of gradients are kept: one whose squares overflow counts as not finite."""

    owned: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that only the process which steps a matrix keeps, where several hold it."""

    @abstractmethod
    def init_state(self, w: Tensor) -> State:
        """The state before the first step, for a weight `w` in the dtype that the step computes in."""

    def init_memory(self, block: Tensor) -> State:
        """More of the state, for a block `(n, out, in)` or `(n, size)`: what is not of the parameter's shape.

        Each tensor's shape starts with the block's n.
        """
        return {}

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """Upper bounds on smoothed gradients `(out, in)` or `(size,)`, whatever the gradients are."""
        return UNKNOWN

    @abstractmethod
    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor | float:
        """The active mask: 1 for each independent problem that takes a step, 0 for one that keeps weight and state.

        Args:
            g: gradient, `(k, n, out, in)` or `(k, n, size)`; 0 where it was not finite.
            finite: whether a parameter's gradient was finite, `(k, 1, ...)`.
            couples: the dimensions of one problem, see `Geometry.couples`.

        Returns:
            A tensor that broadcasts to g; the number 1 where the host can tell that all are active, since masks cost as
            much as the step.
        """

    @abstractmethod
    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """`(next state, smoothed gradient)`; where the mask is 0 the state stays bit for bit.

        The state is donated: its memory may be reused for the next one.
        """


@dataclass(frozen=True)
class Momentum(Smoothing):
    """`m = b1 m + (1 - b1) g`, look-ahead `b2 m_old + (1 - b2) g`; beta is always the kept fraction.

    `lookahead = beta` is plain averaging, `beta**2` Nesterov, `(0.99, 0.9)` Lion, `(0, 0)` none (and no state).
    A row (an expert, a matrix) whose current gradient is exactly zero takes no step and keeps its momentum: a
    normalised step would forget how stale it is.

    Args:
        beta: kept fraction of the average, 0 <= beta < 1.
        lookahead: kept fraction in the direction's argument; default beta.

    Raises:
        ValueError: a fraction outside [0, 1).

    Source: MOGA, Algorithm 1.

    >>> momentum = Momentum(0.5, 0.25)
    >>> state, look = momentum({"momentum": torch.tensor([4.0])}, torch.tensor([0.0]), torch.tensor([1.0]))
    >>> state["momentum"].item(), look.item()
    (2.0, 1.0)
    """

    averages: ClassVar[tuple[str, ...]] = ("momentum",)
    extent: ClassVar[Extent] = Extent.ENTRY

    beta: float = 0.95
    lookahead: float | None = None

    def __post_init__(self) -> None:
        for value in (self.beta, self.beta if self.lookahead is None else self.lookahead):
            if not 0 <= value < 1:
                raise ValueError(f"a momentum fraction must lie in [0, 1), not {value}")
        if not self.beta and self.lookahead:
            raise ValueError(f"without momentum (beta = 0) there is nothing to look ahead from, not {self.lookahead}")

    def init_state(self, w: Tensor) -> State:
        """Zeros like w; nothing for beta = 0."""
        return {"momentum": torch.zeros_like(w)} if self.beta else {}

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor | float:
        """Whether any gradient entry of the problem differs from zero."""
        dims = tuple(couples)
        if device.may_branch(g) and g.numel() and bool(g.sum(dims).all() if dims else g.abs().amin()):
            return 1.0  # the usual case; a problem whose sum is not 0 is not of zeros only
        return (max_abs(g, dims) > 0).to(g.dtype) if dims else g.sign().abs_()

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Both averages from the old momentum."""
        if not self.beta:
            return {}, g
        old = state["momentum"]
        ahead = None if self.lookahead in (None, self.beta) else torch.lerp(old, g, 1 - self.lookahead)
        weight = 1 - self.beta
        new = torch.lerp(old, g, weight * active) if isinstance(active, Tensor) else old.lerp_(g, weight)
        return {"momentum": new}, new if ahead is None else ahead


@dataclass(frozen=True)
class _Moments(Smoothing):
    """Adam's two means: of gradients, and of squares."""

    extent: ClassVar[Extent] = Extent.ENTRY
    squares: ClassVar[bool] = True
    by_problem: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.95

    @property
    def largest(self) -> float:
        """Bound on an entry: `(1 - b1) / sqrt((1 - b2) (1 - b1^2/b2))`, 1.165 for (.9, .95); inf unless `b1^2 < b2`.

        By Cauchy-Schwarz, as m and v are sums over the same squares; the bias correction included.
        """
        ratio = self.beta1**2 / self.beta2 if self.beta2 else math.inf
        return max(1.0, (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - ratio))) if ratio < 1 else math.inf

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor:
        """Every parameter with a finite gradient: Adam does not normalise, so an absent row's step dies out."""
        return finite.to(g.dtype)


@dataclass(frozen=True)
class Adam(_Moments):
    """Adam's moments: the smoothed gradient is `m_hat / (sqrt(v_hat) + eps)`, with 8 bytes per parameter of state.

    For recipes that keep AdamW on some roles; combine with the geometry `Identity`, which takes it as the direction.

    Args:
        beta1: kept fraction of the mean gradient.
        beta2: kept fraction of the mean squared gradient.
        eps: added to the root of the mean squared gradient.

    Source: D. Kingma, J. Ba, "Adam", 2015; `torch.optim.AdamW`, whose numbers it reproduces.

    >>> adam, g = Adam(), torch.tensor([3.0, -0.5])
    >>> _, smoothed = adam(adam.init_state(g), g, torch.tensor([1.0]))
    >>> smoothed.round()
    tensor([ 1., -1.])
    """

    averages: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    eps: float = 1e-8

    def init_state(self, w: Tensor) -> State:
        """Two zero moments and a step count, one per leading index of w."""
        return {
            "exp_avg": torch.zeros_like(w),
            "exp_avg_sq": torch.zeros_like(w),
            "step": torch.zeros((), dtype=torch.float32, device=w.device),
        }

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """Entries of at most `largest`."""
        return Sizes(entry=self.largest)

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Both moments, bias-corrected."""
        count = state["step"].reshape(-1, *(1,) * (g.ndim - 1)) + active
        first = torch.lerp(state["exp_avg"], g, (1 - self.beta1) * active)
        second = torch.lerp(state["exp_avg_sq"], g * g, (1 - self.beta2) * active)
        count_or_one = count.clamp_min(1)
        root = (second / (1 - self.beta2**count_or_one)).sqrt() + self.eps
        smoothed = first / (1 - self.beta1**count_or_one) / root
        return {"exp_avg": first, "exp_avg_sq": second, "step": count.reshape(state["step"].shape)}, smoothed


@dataclass(frozen=True)
class RowAdam(_Moments):
    """Adam with one second moment for each row: `m_hat_i / sqrt(v_hat_i)`, v_i the running mean of `mean_j g_ij^2`.

    For tables, whose rows are words: a row moves by its gradient's signal over its noise. Combine with the geometry
    `Identity`. State: 4 bytes a parameter and 4 a row. Its factors are cut over ranks with their rows.

    Args:
        beta1: kept fraction of the mean gradient.
        beta2: kept fraction of the rows' mean squares.

    Source: "Adam-mini", Y. Zhang et al., 2024, arXiv:2406.16793, whose blocks are rows here.

    >>> adam, g = RowAdam(), torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    >>> state = {name: x[None] for name, x in (adam.init_state(g) | adam.init_memory(g)).items()}
    >>> adam(state, g[None], 1.0)[1][0, 0].square().mean(-1)  # the RMS of a row's first step is 1
    tensor([1.0000, 0.0000])
    """

    averages: ClassVar[tuple[str, ...]] = ("exp_avg",)
    extent: ClassVar[Extent] = Extent.ROW

    def init_state(self, w: Tensor) -> State:
        """A zero mean and a step count."""
        return {"exp_avg": torch.zeros_like(w), "step": torch.zeros((), dtype=torch.float32, device=w.device)}

    def init_memory(self, block: Tensor) -> State:
        """A zero mean square for each row."""
        return {"row_sq": block.new_zeros(block.shape[:-1])}

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """Rows of RMS at most `largest`: Cauchy-Schwarz holds of a row's RMS as of an entry."""
        return Sizes(row=self.largest * math.sqrt(max(1, shape[-1])))

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Both moments, bias-corrected."""
        count = state["step"].reshape(-1, *(1,) * (g.ndim - 1)) + active
        first = torch.lerp(state["exp_avg"], g, (1 - self.beta1) * active)
        rate = (1 - self.beta2) * active
        second = torch.lerp(state["row_sq"][..., : g.shape[-2], None], g.square().mean(-1, keepdim=True), rate)
        root = (second / (1 - self.beta2 ** count.clamp_min(1))).sqrt() * (1 - self.beta1 ** count.clamp_min(1))
        smoothed = first / root.clamp_min(10 * torch.finfo(g.dtype).tiny ** 0.5)  # below, squares have lost digits
        kept = {"exp_avg": first, "row_sq": second[..., 0], "step": count.reshape(state["step"].shape)}
        return kept, smoothed
