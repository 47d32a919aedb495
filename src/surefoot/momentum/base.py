"""From gradient to smoothed gradient: which ones take a step, the base of all that smooths, and the momentum pair."""

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


def is_finite(g: Tensor, squares: bool = False) -> Tensor:
    """Whether no entry of each `(k, ...)` is NaN, or above a quarter of the largest float.

    Averages then stay below that quarter, and differences below the half, whatever earlier gradients were. For squares:
    whether the squares of all entries are finite, and the sum of a million of these.

    Args:
        g: k gradients, in the dtype that the step computes in, or a shorter one.
        squares: whether squares of gradients are kept.

    Returns:
        `(k,)`, bool.

    >>> is_finite(torch.tensor([[8e37, -8e37], [9e37, 0.0], [1.0, float("nan")]]))
    tensor([ True, False, False])
    >>> is_finite(torch.tensor([[1e16], [1e17]]), squares=True)
    tensor([ True, False])
    >>> is_finite(torch.tensor([[6e4], [math.inf]], dtype=torch.float16))
    tensor([ True, False])
    """
    flat = g.flatten(1)
    largest = torch.finfo(wide := torch.promote_types(g.dtype, torch.float32)).max  # in float16 it would be infinite
    limit = math.sqrt(largest) / 1024 if squares else largest / 4
    if device.may_branch(g):  # no entry exceeds the length, which takes one pass, but whose squares may overflow
        finite: Tensor = torch.linalg.vector_norm(flat, dim=1).to(wide) <= limit
        if bool(finite.all()):
            return finite
    return max_abs(flat, 1)[:, 0].to(wide) <= limit


def where_finite(g: Tensor, finite: Tensor) -> Tensor:
    """g, with 0 for parameters whose gradient is not finite; g itself where the host can tell that all are finite."""
    if device.may_branch(g) and bool(finite.all()):
        return g
    return torch.nan_to_num(g, 0.0, 0.0, 0.0).mul_(finite)  # a fifth of the time of torch.where on a CPU


def refuse_overflowing(name: str, w: Tensor) -> None:
    """Raise ValueError, with their name, for finite weights on a CPU whose squares overflow."""
    w = w.detach()
    if device.on_cpu(w) and not bool(is_finite(w.reshape(1, -1), squares=True)) and bool(w.isfinite().all()):
        raise ValueError(f"{name} has weights up to {float(w.abs().max()):g}, whose squares overflow: scale them down")


class Smoothing(ABC):
    """Base class of momentum: smooths a gradient before its direction is taken. State in, state out.

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
    """How much of a gradient an entry's next state depends on, for smoothing parts of a table."""

    by_problem: ClassVar[bool] = True
    """True if `active` says of each independent problem whether it takes a step, False if of each parameter."""

    squares: ClassVar[bool] = False
    """True if squares of gradients are kept: gradients whose squares overflow count as not finite."""

    owned: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that only the process stepping a matrix keeps, where several hold it."""

    @abstractmethod
    def init_state(self, w: Tensor) -> State:
        """The state before the first step, for `w` in the dtype of the step: tensors of w's shape, and scalars."""

    def init_memory(self, block: Tensor) -> State:
        """State that is not of the parameter's shape, for a block `(n, out, in)` or `(n, size)`.

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
            A tensor that broadcasts to g; the number 1 where the host can tell that all are active: masks cost as much
            as the step.
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
