"""Adam's two means, for the parts of a recipe that keep Adam: by entries, or by the rows of a table."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Extent, State
from surefoot.geometry.change_bounds import Sizes
from surefoot.linalg.bounds import divisor
from surefoot.momentum.base import Smoothing


@dataclass(frozen=True)
class _Moments(Smoothing):
    """Adam's two means: of gradients, and of squares."""

    extent: ClassVar[Extent] = Extent.ENTRY
    squares: ClassVar[bool] = True
    by_problem: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"Adam's fractions must lie in [0, 1), not {self.beta1} and {self.beta2}")
        if not 0 <= (eps := getattr(self, "eps", 0.0)) < math.inf:
            raise ValueError(f"Adam's eps must be finite and not negative, not {eps}")

    @property
    def largest(self) -> float:
        """Bound on an entry: `(1 - b1) / sqrt((1 - b2) (1 - b1^2/b2))`, 1.165 for (.9, .95); inf unless `b1^2 < b2`.

        By Cauchy-Schwarz, as m and v are sums over the same squares; the bias correction included.
        """
        ratio = self.beta1**2 / self.beta2 if self.beta2 else math.inf
        return max(1.0, (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - ratio))) if ratio < 1 else math.inf

    def least(self, count: float) -> float:
        """What `v / m^2` is at least after so many steps: then `largest` bounds the next ones; 0 if that is inf."""
        ratio = self.beta1**2 / self.beta2 if self.beta2 else math.inf
        if ratio >= 1 or not count:
            return 0.0
        return float((1 - self.beta2) * (1 - ratio) / ((1 - self.beta1) ** 2 * (1 - ratio**count)))

    def init_state(self, w: Tensor) -> State:
        """Zero averages and a step count, one per leading index of w."""
        count = torch.zeros((), dtype=torch.float32, device=w.device)
        return {**{name: torch.zeros_like(w) for name in self.averages}, "step": count}

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor:
        """Every parameter with a finite gradient: Adam does not normalise, so an absent row's steps die out."""
        return finite.to(g.dtype)


@dataclass(frozen=True)
class Adam(_Moments):
    """Adam's moments: the smoothed gradient is `m_hat / (sqrt(v_hat) + eps)`, with 8 bytes per parameter of state.

    For recipes that keep AdamW on some roles; combine with the geometry `Identity`, which takes it as the direction.

    Args:
        beta1: kept fraction of the mean gradient.
        beta2: kept fraction of the mean squared gradient.
        eps: added to the root of the mean squared gradient.

    Raises:
        ValueError: a fraction outside of [0, 1), an eps that is negative or not finite.

    Source: D. Kingma, J. Ba, "Adam", 2015; `torch.optim.AdamW`, whose numbers it reproduces, but for the rounding of
    `1 - beta2**t` in the weights' precision: in float32 the first step is off by up to 1e-8 / (1 - beta2) of itself.

    >>> adam, g = Adam(), torch.tensor([3.0, -0.5])
    >>> _, smoothed = adam(adam.init_state(g), g, torch.tensor([1.0]))
    >>> smoothed.round()
    tensor([ 1., -1.])
    """

    averages: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    eps: float = 1e-8

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
        smoothed = first / (1 - self.beta1**count_or_one) / divisor(root)
        return {"exp_avg": first, "exp_avg_sq": second, "step": count.reshape(state["step"].shape)}, smoothed


@dataclass(frozen=True)
class RowAdam(_Moments):
    """Adam with one second moment for each row: `m_hat_i / sqrt(v_hat_i)`, v_i the running mean of `mean_j g_ij^2`.

    For tables, whose rows are words: a row moves by its gradient's signal over its noise. Combine with the geometry
    `Identity`. State: 4 bytes per parameter and 4 per row, sharded with the rows.

    Args:
        beta1: kept fraction of the mean gradient.
        beta2: kept fraction of the rows' mean squares.

    Raises:
        ValueError: a fraction outside of [0, 1).

    Source: "Adam-mini", Y. Zhang et al., 2024, arXiv:2406.16793, whose blocks are rows here.

    >>> adam, g = RowAdam(), torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    >>> state = {name: x[None] for name, x in (adam.init_state(g) | adam.init_memory(g)).items()}
    >>> adam(state, g[None], 1.0)[1][0, 0].square().mean(-1)  # the RMS of a row's first step is 1
    tensor([1.0000, 0.0000])
    """

    averages: ClassVar[tuple[str, ...]] = ("exp_avg",)
    extent: ClassVar[Extent] = Extent.ROW

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
        return {"exp_avg": first, "row_sq": second[..., 0], "step": count.reshape(state["step"].shape)}, smoothed
