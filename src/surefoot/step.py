"""One step of one chunk of like parameters: the whole algorithm; and the same in pieces that fit in a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surefoot.geometry.base import Eta
from surefoot.linalg import device
from surefoot.linalg.matmul_precision import full_precision
from surefoot.momentum import State, where_finite
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser

Step = Callable[[Role, Stabiliser, Tensor, Tensor, State, Eta, Tensor], tuple[Tensor, State]]
"""What `step` is, and what `compiled` makes of it."""

LINE = 16
"""Pieces are multiples of so many rows or entries: then each starts at a cache line, as its whole does."""

GRAPHS = 512
"""How many graphs are kept: one for each role and shape of chunk; torch would stop after 8."""


def step(
    role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor
) -> tuple[Tensor, State]:
    """Gradient -> momentum -> direction -> step -> stabilised weight.

    w and state are given away: the results may lie there.

    A parameter whose gradient is not finite, and an independent problem (a row, a matrix; `Geometry.couples`) whose
    gradient is zero, take no step and keep their momentum bit for bit: live = 0, so their eta is 0. A stabiliser that
    acts on the whole block may still move such a row with the others.

    Args:
        role: the rule; its geometry takes blocks `(n, out, in)` or `(n, size)`.
        stabiliser: the role's, with its radius in plain numbers.
        w: k stacked weights `(k, n, out, in)` or `(k, n, size)`, float32 or float64.
        g: their gradients, w's shape and dtype.
        state: what momentum and stabiliser keep, stacked likewise.
        eta: `lr * lr_scale`.
        finite: whether each parameter's gradient is finite, `(k, 1, ...)`, bool.

    Returns:
        `(next weights, next state)`.
    """
    g = where_finite(g, finite)
    live = role.momentum.live(g, finite, role.geometry.couples)
    smoothed, m = role.momentum(state, g, live)
    cache = {name: x for name, x in state.items() if name not in smoothed}
    w, kept = stabiliser.move(w, m, eta * live, role.weight_geometry, cache)
    return w, {**smoothed, **(kept or {})}


def in_pieces(take: Step, budget: int) -> Step:
    """A step that goes some leading rows at a time where they are independent of each other: every operation finds its
    input in the cache, and w and g are read from memory once.

    Args:
        take: the step of a piece.
        budget: bytes of a piece of w.
    """

    def run(
        role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor
    ) -> tuple[Tensor, State]:
        rows, pieces = -role.weight_geometry.ndim, math.ceil(w.numel() * w.element_size() / budget)
        whole = rows in role.geometry.couples or not stabiliser.by_problem
        if pieces < 2 or whole or any(x.shape != w.shape for x in state.values()):
            return take(role, stabiliser, w, g, state, eta, finite)
        size = LINE * math.ceil(w.shape[rows] / (pieces * LINE))
        for here, gradient, *old in zip(*(torch.split(x, size, rows) for x in (w, g, *state.values())), strict=True):
            piece = dict(zip(state, old, strict=True))
            moved, kept = take(role, stabiliser, here, gradient, piece, eta, finite)
            for place, x in ((here, moved), *((piece[name], x) for name, x in kept.items())):
                if place is not x:
                    place.copy_(x)
        return w, state

    return run


def compiled(**options: Any) -> Step:
    """`step` by `torch.compile`: a graph for each role and shape, in which row, sign and momentum passes are fused.

    For `SteepestDescent(..., step=compiled())` on an accelerator; on a CPU the plain step is faster. Another learning
    rate is no new graph. On a CPU a guaranteed bound branches on the weights and cannot be one graph; on an accelerator
    only exact schemes do.

    Args:
        options: of `torch.compile`; default `fullgraph=True, dynamic=False`.

    Raises:
        torch._dynamo.exc.Unsupported, UserError: at the first step, where there is a branch on values.
    """
    graph = torch.compile(step, **{"fullgraph": True, "dynamic": False, **options})

    def run(
        role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor
    ) -> tuple[Tensor, State]:
        with full_precision(w.device), torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return graph(role, stabiliser, w, g, state, device.scalar_like(eta, w, w.dtype), finite)

    return run
