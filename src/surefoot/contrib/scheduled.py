"""Momentum whose fractions follow the steps: a warm-up, a cool-down."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Extent, State
from surefoot.momentum.base import Momentum, Smoothing


@dataclass(frozen=True)
class ScheduledMomentum(Smoothing):
    """`Momentum` whose fractions are piecewise linear in the step: `m = b(t) m + (1 - b(t)) g`; the look-ahead's, too.

    t is 0 at the parameter's first step and counts every later one for which it has a gradient, those that it sits out
    because the gradient is zero or not finite, too: so the schedule keeps pace with the learning rate's. It is part of
    the state, and goes on after a checkpoint. Before the first point and behind the last one the fractions stay.

    The smoothed gradient is a mean of gradients at every t, as `Momentum`'s, so the bounds of a direction that is taken
    of it are the same. State: `Momentum`'s and a count. A table is stepped whole where `Momentum` steps it in pieces.

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
            raise ValueError(f"ScheduledMomentum takes points (step, pair) with ascending steps from 0 on, not {steps}")

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
