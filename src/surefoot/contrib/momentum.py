"""Momentum whose fractions follow the steps, and momentum between the inverse roots of Shampoo's two factors."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Extent, State
from surefoot.linalg.bounds import divisor, max_abs_or_one
from surefoot.linalg.device import full_precision
from surefoot.momentum.base import Momentum, Smoothing


@dataclass(frozen=True)
class ScheduledMomentum(Smoothing):
    """`Momentum` whose fractions, look-ahead included, are piecewise linear in the step: `m = b(t) m + (1 - b(t)) g`.

    t is 0 at the parameter's first step and counts every later one with a gradient, including those that it sits out
    because the gradient is zero or not finite: so the schedule keeps pace with the learning rate's. t is part of the
    state, and goes on after a checkpoint. Before the first point and after the last one the fractions are constant.

    As in `Momentum`, the smoothed gradient is a mean of gradients at every t, so bounds on its direction are the same.
    State: `Momentum`'s and a count. A table is stepped whole where `Momentum` steps it in pieces.

    Args:
        points: `(step, pair)`, with ascending steps.

    Raises:
        ValueError: no points, or steps that are negative or do not ascend.

    Source: the warm-up of Muon's momentum, K. Jordan et al., "modded-nanogpt", 2024; its cool-down there, 2026.

    >>> warm = ScheduledMomentum(((0, Momentum(0.5)), (2, Momentum(0.9))))
    >>> state = {"momentum": torch.zeros(1, 1, 1), "step": torch.zeros(1)}
    >>> for _ in range(4):
    ...     state, m = warm(state, torch.ones(1, 1, 1), 1.0)
    ...     print(round(1 - m.item(), 3))  # .5, times .7, times .9, times .9
    0.5
    0.35
    0.315
    0.284
    """

    averages: ClassVar[tuple[str, ...]] = ("momentum",)
    extent: ClassVar[Extent] = Extent.ENTRY

    points: tuple[tuple[int, Momentum], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.points]
        if not steps or min(steps) < 0 or any(b <= a for a, b in pairwise(steps)):
            raise ValueError(f"ScheduledMomentum's points (step, pair) need ascending steps from 0, not {steps}")

    def init_state(self, w: Tensor) -> State:
        """Zeros like w, and a step count."""
        return {"momentum": torch.zeros_like(w), "step": torch.zeros((), dtype=torch.float32, device=w.device)}

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor | float:
        """`Momentum`'s."""
        return self.points[0][1].active(g, finite, couples)

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Both averages from the old momentum, with the fractions of the present step."""
        count, old = state["step"], state["momentum"]
        now = count.to(g.dtype).reshape(-1, *(1,) * (g.ndim - 1))
        keep = _between([(step, pair.beta) for step, pair in self.points], now)
        ahead = _between([(n, x.beta if x.lookahead is None else x.lookahead) for n, x in self.points], now)
        look = torch.lerp(old, g, 1 - ahead)
        return {"momentum": torch.lerp(old, g, (1 - keep) * active), "step": count + 1}, look


def _between(points: list[tuple[int, float]], now: Tensor) -> Tensor:
    """The value at a step of the line through points; that of the nearest point outside them."""
    value = torch.full_like(now, points[0][1])
    for (start, low), (end, high) in pairwise(points):
        value += (high - low) * ((now - start) / (end - start)).clamp(0, 1)
    return value


@dataclass(frozen=True)
class Whitened(Momentum):
    """Momentum between two inverse fourth roots: `L^(-1/4) m R^(-1/4)`, L and R the running means of `g g^T`, `g^T g`.

    Shampoo's preconditioning, for a direction to which scale does not matter. Eigenvalues count as at least `floor` of
    the largest, so directions without gradients are not blown up.

    Cost: two eigendecompositions per matrix and step. Squares of float32 gradients below 1e-19 are 0, and whiten
    nothing. State: 4 bytes per parameter for the momentum, and `4 (d_out^2 + d_in^2)` bytes per matrix, 8 per parameter
    of a square one. The factors belong to the rank that owns the matrix.

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

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor | float:
        """Of the whole matrix: its factors couple what a norm of rows does not."""
        return super().active(g, finite, couples | {-2, -1})

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
        values, vectors = torch.linalg.eigh(factor / max_abs_or_one(factor))
        roots = torch.maximum(values, divisor(values[..., -1:]) * self.floor) ** -0.25
        return torch.matmul(vectors * roots[..., None, :], vectors.mT)
