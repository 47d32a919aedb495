"""The step of parameters that are whole here: their bounds revalidated, tables some rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.geometry.adaptive import Adaptive
from surefoot.geometry.base import Eta, Extent, Geometry
from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.optim.batching import ELSEWHERE, Batch, Blocks, load, store
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import Precision
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import Step

PIECE_BYTES = {"cpu": 3 << 19}
"""Bytes of a table's rows that go through the whole step at once."""

STEPS = "steps_on_device"
"""Entry of a group on an accelerator, saved with it: a resumed run certifies bounds at the same steps."""

LINE = 16
"""Pieces are multiples of so many rows or entries, so that each starts at a cache line, as its whole does."""


def in_pieces(take: Step) -> Step:
    """A step that takes `PIECE_BYTES` of leading rows at a time where rows are independent of each other.

    Every operation then finds its input in the cache, and weights and gradients are read from memory once.

    Args:
        take: the step of a piece.

    Returns:
        A function with the arguments and results of `surefoot.step.step`.
    """

    def run(
        role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor
    ) -> tuple[Tensor, State]:
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


def advance(batch: Batch, precision: Precision, bounds: RunningBound, step: Step, elsewhere: bool) -> None:
    """Take the step of a batch of parameters that are whole here; where another process takes it, that of momentum.

    Args:
        batch: like parameters of one group.
        precision: in which numbers their weights and state are stored.
        bounds: the optimizer's running bounds.
        step: what takes the step of a block.
        elsewhere: whether another process moves the weights.
    """
    blocks = load(batch, precision)
    if not elsewhere:
        _revalidate(bounds, batch, blocks)
    _step_blocks(batch, blocks, step)
    store(batch, blocks, precision)
    if not elsewhere:
        _record(bounds, batch, blocks)


def _step_blocks(batch: Batch, blocks: Blocks, step: Step) -> None:
    """The step of each block of a batch, in place of what was loaded."""
    placement, lr, take = batch.placement, learning_rate(batch.group), in_pieces(step)
    for i, (stabiliser, shape) in enumerate(zip(placement.stabilisers, placement.blocks, strict=True)):
        eta, finite = lr * placement.role.lr_scale(shape), blocks.finite.reshape(-1, *(1,) * len(shape))
        w, g, state = blocks.weights[i], blocks.gradients[i], blocks.states[i]
        blocks.weights[i], blocks.states[i] = take(placement.role, stabiliser, w, g, state, eta, finite)


def _revalidate(bounds: RunningBound, batch: Batch, blocks: Blocks) -> None:
    """Reset norm bounds that no longer hold of the loaded weights."""
    if "upper" not in blocks.states[0]:
        return
    due = False
    if not device.on_cpu(blocks.weights[0]):
        placement, lr = batch.placement, learning_rate(batch.group)
        pairs = zip(placement.stabilisers, placement.blocks, strict=True)
        period = min(scheme.certificate_period(lr * placement.role.lr_scale(shape)) for scheme, shape in pairs)
        due = batch.group.get(STEPS, 0) % period == 0
    norm = batch.placement.role.weight_geometry
    blocks.states = bounds.revalidate(batch.params, blocks.weights, blocks.states, norm, due)


def _record(bounds: RunningBound, batch: Batch, blocks: Blocks) -> None:
    """Remember weights whose norm bounds hold; what was rounded to half precision is another weight."""
    exact = batch.params[0].dtype == batch.dtype or "master" in batch.states[0]
    if "upper" in blocks.states[0] and exact:
        bounds.record(batch.params, blocks.weights)
