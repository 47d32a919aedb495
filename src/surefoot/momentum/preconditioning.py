"""Smoothed gradients divided by their own history: a number for each row, or two factors of each matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Extent
from surefoot.geometry.change_bounds import UNKNOWN, Sizes
from surefoot.linalg.device import full_precision
from surefoot.momentum.base import Adam, Momentum, Smoothing, State


@dataclass(frozen=True)
class RowAdam(Smoothing):
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
    squares: ClassVar[bool] = True
    by_problem: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.95

    def init_state(self, w: Tensor) -> State:
        """A zero mean and a step count."""
        return {"exp_avg": torch.zeros_like(w), "step": torch.zeros((), dtype=torch.float32, device=w.device)}

    def init_memory(self, block: Tensor) -> State:
        """A zero mean square for each row."""
        return {"row_sq": block.new_zeros(block.shape[:-1])}

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """Rows of RMS at most `Adam.largest`: Cauchy-Schwarz holds of a row's RMS as of an entry."""
        return Sizes(row=Adam(self.beta1, self.beta2).largest * math.sqrt(max(1, shape[-1])))

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor:
        """Every parameter with a finite gradient, as `Adam`'s."""
        return finite.to(g.dtype)

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


@dataclass(frozen=True)
class Whitened(Momentum):
    """Momentum between two inverse fourth roots: `L^(-1/4) m R^(-1/4)`, L and R the running means of `g g^T`, `g^T g`.

    Shampoo's preconditioning before a direction is taken, whose scale does not matter. Eigenvalues below `floor` of the
    largest count as that: directions that no gradient had are not blown up.

    Cost: two eigendecompositions a matrix and step. Squares of float32 gradients below 1e-19 are 0, and whiten nothing.
    State: 4 bytes a parameter for the momentum, and `4 (d_out^2 + d_in^2)` bytes a matrix, 8 a parameter of a square
    one. The factors belong to the rank that owns the matrix.

    Args:
        beta: as in `Momentum`.
        lookahead: as in `Momentum`.
        memory: kept fraction of L and R.
        floor: smallest eigenvalue over the largest.

    Raises:
        ValueError: a fraction outside [0, 1), a floor that is not between 0 and 1.

    Source: V. Gupta et al., "Shampoo", 2018, arXiv:1802.09568; before a matrix sign as in "SOAP-Muon".

    >>> white, g = Whitened(0.0, memory=0.0), torch.diag(torch.tensor([8.0, 2.0]))[None]
    >>> state = {name: x[None] for name, x in white.init_memory(g).items()}
    >>> white(state, g[None], 1.0)[1][0, 0].diagonal()  # equal, as g = (g g^T)^(1/4) (g^T g)^(1/4)
    tensor([8., 8.])
    """

    extent: ClassVar[Extent] = Extent.WHOLE
    squares: ClassVar[bool] = True
    owned: ClassVar[tuple[str, ...]] = ("left", "right")

    memory: float = 0.95
    floor: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.memory < 1 or not 0 < self.floor < 1:
            raise ValueError(f"memory must lie in [0, 1) and floor in (0, 1), not {self.memory} and {self.floor}")

    def init_memory(self, block: Tensor) -> State:
        """Zero factors."""
        *batch, d_out, d_in = block.shape
        return {"left": block.new_zeros(*batch, d_out, d_out), "right": block.new_zeros(*batch, d_in, d_in)}

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """Unknown; a direction follows."""
        return UNKNOWN

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Momentum, then both roots of the new factors."""
        kept, m = super().__call__(state, g, active)
        rate = (1 - self.memory) * active
        with full_precision(g.device):
            old = (state["left"][..., : g.shape[-2], : g.shape[-2]], state["right"][..., : g.shape[-1], : g.shape[-1]])
            left, right = torch.lerp(old[0], g @ g.mT, rate), torch.lerp(old[1], g.mT @ g, rate)
            white = self._root(left) @ m @ self._root(right)
        return {**kept, "left": left, "right": right}, white

    def _root(self, factor: Tensor) -> Tensor:
        """The inverse fourth root of a positive matrix, up to its scale."""
        scaled = factor / max_abs_or_one(factor)
        values, vectors = torch.linalg.eigh(scaled)
        top = values[..., -1:]
        roots = torch.maximum(values, torch.where(top == 0, 1, top) * self.floor) ** -0.25
        root: Tensor = (vectors * roots[..., None, :]) @ vectors.mT
        return root
