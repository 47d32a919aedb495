"""One step of a batch of like parameters: the whole algorithm, as one pure function."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.geometry.adaptive import Adaptive
from surefoot.geometry.base import ChangeBounds, Eta, Extent, Geometry, Taken
from surefoot.linalg import device
from surefoot.momentum import State, where_finite
from surefoot.roles import Role
from surefoot.stabilise.base import Stabiliser, where_moved

Step = Callable[[Role, Stabiliser, Tensor, Tensor, State, Eta, Any], Taken]
"""The type of `step`, and of what `compiled` returns."""

PIECE_BYTES = {"cpu": 3 << 19}
"""Bytes of a table's rows that go through the whole step at once."""

ELSEWHERE = 256 << 20
"""Bytes on devices that such tables do not name."""

LINE = 16
"""Pieces are multiples of so many rows or entries, so that each starts at a cache line, as its whole does."""

GRAPHS = 512
"""How many graphs `compiled` keeps: one for each role and shape of a batch; torch would stop after 8."""


def step(role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor) -> Taken:
    """Gradient -> momentum -> direction -> step -> stabilised weight.

    Momentum may precondition the gradient (`momentum.soap`), and an adaptive direction may be rescaled by what it
    remembers (`geometry.adaptive`), before the stabiliser moves the weight.

    A parameter whose gradient is not finite, and an independent problem (a row, a matrix; `Geometry.couples`) whose
    gradient is zero, take no step and keep weight and momentum bit for bit: the active mask makes their eta 0. A
    stabiliser that takes a norm of the whole weight may still move such a row with the others.

    Args:
        role: the rule; its geometry takes blocks `(n, out, in)` or `(n, size)`.
        stabiliser: the role's, with its radius in natural units.
        w: k stacked weights `(k, n, out, in)` or `(k, n, size)`, float32 or float64. Donated, as is state: their memory
            may be reused for the results.
        g: their gradients, w's shape and dtype.
        state: of momentum and stabiliser, stacked likewise.
        eta: `lr * lr_scale`.
        finite: whether each parameter's gradient is finite, `(k, 1, ...)`, bool.

    Returns:
        `(next weights, next state)`.
    """
    smoothed, m, active = smooth(role, g, state, finite)
    kept = {name: x for name, x in state.items() if name not in smoothed}
    w, kept = descend(role, stabiliser, w, m, kept, eta, active)
    return w, {**smoothed, **kept}


def descend(role: Role, stabiliser: Stabiliser, w: Tensor, m: Tensor, kept: State, eta: Eta, active: Eta) -> Taken:
    """`step` from the smoothed gradient on: `direct`, then `move`."""
    d, kept = direct(role, stabiliser, w, m, kept, active)
    return move(role, stabiliser, w, d, kept, eta * active)


def smooth(role: Role, g: Tensor, state: State, finite: Tensor, active: Eta | None = None) -> tuple[State, Tensor, Eta]:
    """Gradient -> momentum: the first part of `step`.

    Args:
        role: the rule.
        g: gradients.
        state: of momentum, donated.
        finite: whether each parameter's gradient is finite.
        active: the active mask, if it is known; a part of a parameter does not tell it.

    Returns:
        `(the momentum's next state, smoothed gradient, active mask)`.
    """
    g = where_finite(g, finite)
    if active is None:
        active = role.momentum.active(g, finite, role.geometry.couples)
    smoothed, m = role.momentum(state, g, active)
    return smoothed, m, active


def direct(role: Role, stabiliser: Stabiliser, w: Tensor, m: Tensor, kept: State, active: Eta) -> Taken:
    """Momentum -> direction: the second part of `step`.

    Args:
        role: the rule.
        stabiliser: the role's, with its radius in natural units.
        w: weights.
        m: smoothed gradients.
        kept: what direction and stabiliser keep, donated.
        active: the active mask.

    Returns:
        `(direction, what both keep)`; the direction is a new tensor, or m itself.
    """
    geometry, ball = role.geometry, role.weight_geometry
    if isinstance(geometry, Adaptive):
        m, memory = geometry.take(w, m, active, {name: kept[name] for name in role.remembered})
        kept = {**kept, **memory}
        if stabiliser.constraint(geometry, ball, w.shape) is None:
            return m, kept
    d, cache = stabiliser.direct(w, m, geometry, ball, _own(role, kept), active)
    return d, {**kept, **(cache or {})}


def move(role: Role, stabiliser: Stabiliser, w: Tensor, d: Tensor, kept: State, eta: Eta) -> Taken:
    """Direction -> step -> stabilised weight: the last part of `step`.

    Args:
        role: the rule.
        stabiliser: the role's, with its radius in natural units.
        w: weights, donated.
        d: the direction.
        kept: what direction and stabiliser keep, donated.
        eta: `lr * lr_scale`, 0 for entries that rest.

    Returns:
        `(next weights, what both keep)`.
    """
    ball = role.weight_geometry
    longest = partial(ChangeBounds.of(role.geometry).direction_norm_bound, shape=tuple(w.shape))
    moved, cache = stabiliser.move(w, d, eta, ball, _own(role, kept), longest)
    dims = () if stabiliser.extent == Extent.ENTRY else tuple(range(-ball.ndim, 0))
    return where_moved(eta, dims, moved, w), {**kept, **(cache or {})}


def _own(role: Role, kept: State) -> State:
    """What the stabiliser keeps, without what the direction remembers."""
    return {name: x for name, x in kept.items() if name not in role.remembered} if role.remembered else kept


def in_pieces(take: Step) -> Step:
    """A step that takes `PIECE_BYTES` of leading rows at a time where rows are independent of each other.

    Every operation then finds its input in the cache, and weights and gradients are read from memory once.

    Args:
        take: the step of a piece.

    Returns:
        A function with the arguments and results of `surefoot.step.step`.
    """

    def run(role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor) -> Taken:
        rows = -role.weight_geometry.ndim
        pieces = math.ceil(w.numel() * w.element_size() / PIECE_BYTES.get(w.device.type, ELSEWHERE))
        apart = turned_by_row(role.geometry) and role.momentum.extent == stabiliser.extent == Extent.ENTRY
        if pieces < 2 or not apart or any(x.shape != w.shape for x in state.values()):
            return take(role, stabiliser, w, g, state, eta, finite)
        size = LINE * math.ceil(w.shape[rows] / (pieces * LINE))
        names = list(state)
        for part, gradient, *old in zip(*(torch.split(x, size, rows) for x in (w, g, *state.values())), strict=True):
            moved, new = take(role, stabiliser, part, gradient, dict(zip(names, old, strict=True)), eta, finite)
            for place, x in ((part, moved), *((old[names.index(name)], x) for name, x in new.items())):
                if place is not x:
                    place.copy_(x)
        return w, state

    return run


def turned_by_row(geometry: Geometry) -> bool:
    """Whether each leading row of a matrix, or entry of a vector, has its own direction, whatever the others are."""
    changes = geometry.changes if isinstance(geometry, Adaptive) else ()
    return -geometry.ndim not in geometry.couples and all(change.extent <= Extent.ROW for change in changes)


def compiled(**options: Any) -> Step:
    """`step` under `torch.compile`: one graph per role and shape, which fuses row, sign and momentum passes.

    For `SteepestDescent(..., step=compiled())` on an accelerator; on a CPU the plain step is faster. A new learning
    rate needs no new graph. A scheme that branches on the weights cannot be one graph: on a CPU any guaranteed bound,
    on an accelerator only exact schemes.

    Args:
        **options: of `torch.compile`; default `fullgraph=True, dynamic=False`.

    Returns:
        A function with the arguments and results of `step`.

    Raises:
        torch._dynamo.exc.Unsupported: at the first step, if it branches on values.

    >>> import surefoot as sf
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = sf.SteepestDescent(model, lr=0.1, step=sf.compiled())  # compiles at its first step
    """
    return _Compiled(options)


class _Compiled:
    """The step, compiled; pickled, what it is compiled with."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._graph = torch.compile(step, **{"fullgraph": True, "dynamic": False, **options})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._options,)

    def __call__(
        self, role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor
    ) -> Taken:
        assert not role.smoothed & role.remembered  # both are cached here: their lock cannot be part of a graph
        with device.full_precision(w.device), torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return self._graph(role, stabiliser, w, g, state, device.scalar_like(eta, w, w.dtype), finite)
