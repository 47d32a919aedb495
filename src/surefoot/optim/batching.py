"""Like parameters as one batch: chosen, stacked, stepped piece by piece, taken apart and written back.

`SteepestDescent.step` loads a batch, takes the step of its blocks and stores the results. Where parameters are sharded,
loading and storing exchange data with other processes; the step between them is the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.geometry.base import Eta
from surefoot.linalg import device
from surefoot.momentum import State, is_finite
from surefoot.monitor.norms import join_blocks, split_by_block
from surefoot.optim.precision import ADDED, Precision
from surefoot.plan import Placement
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser
from surefoot.step import Step
from surefoot.views import OneBlock, Shape, View

BATCH_BYTES = {"cpu": 4 << 20}
"""Bytes of like parameters that are stacked at once: a share of the cache, a small part of an accelerator's memory."""

PIECE_BYTES = {"cpu": 3 << 19}
"""Bytes of a table's rows that go through the whole step at once."""

ELSEWHERE = 256 << 20
"""Both, where the table does not name the device."""

LINE = 16
"""Pieces are multiples of so many rows or entries, so that each starts at a cache line, as its whole does."""


@dataclass(frozen=True)
class Batch:
    """Parameters of equal role, shape, dtype and device that take their step together.

    Args:
        params: k parameters, each with a gradient.
        placement: that of each, up to its reason.
        group: their parameter group.
    """

    params: list[Tensor]
    placement: Placement
    group: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the step computes in: float32, or float64 for float64 parameters."""
        return torch.promote_types(self.params[0].dtype, torch.float32)


@dataclass
class Blocks:
    """A batch as the step takes and returns it, with one entry of each list for each block of the role's view.

    Args:
        weights: `(k, n, out, in)` or `(k, n, size)`, in the batch's dtype.
        gradients: likewise.
        states: of momentum and stabiliser, each tensor's shape starting with k.
        finite: whether each parameter's gradient is finite, `(k,)`, bool.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[State]
    finite: Tensor


def batches(group: dict[str, Any], placements: Mapping[Tensor, Placement]) -> Iterator[Batch]:
    """Parameters of a group that have a gradient, like ones together, cut to `BATCH_BYTES`.

    Args:
        group: a parameter group.
        placements: of all parameters.

    Yields:
        Batches, in the order of their first parameters.

    Raises:
        RuntimeError: a sparse gradient.
    """
    buckets: dict[Any, list[Tensor]] = defaultdict(list)
    for p in group["params"]:
        if p.grad is None or p.numel() == 0:
            continue
        if p.grad.is_sparse:
            raise RuntimeError("SteepestDescent does not support sparse gradients: use nn.Embedding(sparse=False)")
        placement = placements[p]
        buckets[placement.role, placement.shape, p.dtype, p.device].append(p)
    for (_, _, _, where), bucket in buckets.items():
        count = max(1, BATCH_BYTES.get(where.type, ELSEWHERE) // (4 * bucket[0].numel()))
        for start in range(0, len(bucket), count):
            chosen = bucket[start : start + count]
            yield Batch(chosen, placements[chosen[0]], group)


def load(batch: Batch, states: list[State], precision: Precision) -> Blocks:
    """The batch's blocks, stacked; a batch of one parameter is not copied.

    Args:
        batch: like parameters.
        states: the optimizer's, of each parameter.
        precision: in which numbers weights and momentum are kept.

    Returns:
        Weights, gradients and states as the step takes them.
    """
    view, dtype, rounding = batch.placement.role.view, batch.dtype, precision.rounding(batch.params[0])
    pairs = zip(batch.params, states, strict=True)
    weights = _stack_blocks([rounding.read(p, state, dtype) for p, state in pairs], view)
    gradients = _stack_blocks([p.grad.to(dtype) for p in batch.params if p.grad is not None], view)
    if batch.group["maximize"]:
        gradients = [-g for g in gradients]
    finite = torch.stack([is_finite(g) for g in gradients]).all(0)
    return Blocks(weights, gradients, _stack_states(states, batch), finite)


def store(batch: Batch, blocks: Blocks, states: list[State], precision: Precision) -> None:
    """Write stepped weights and states back, rounded as precision says; count the gradients that were not finite."""
    placement, rounding = batch.placement, precision.rounding(batch.params[0])
    weights = _split_blocks(blocks.weights, placement.role.view, placement.shape)
    all_finite = device.on_cpu(blocks.finite) and bool(blocks.finite.all())
    results = zip(batch.params, weights, states, _split_states(blocks.states, batch, states), strict=True)
    for p, w, state, new in results:
        value, added = rounding.write(w, p.dtype, state)
        _write_(p, value)
        for name, x in new.items():
            _write_(state[name], precision.keep(x, state[name], state))
        for name, x in added.items():
            _write_(state[name], x)
        if "rounds" in state:
            state["rounds"] += 1
    for state, finite in zip(() if all_finite else states, blocks.finite, strict=False):
        state["skipped"] += ~finite


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
        whole = rows in role.geometry.couples or not (stabiliser.independent and role.momentum.entrywise)
        if pieces < 2 or whole or any(x.shape != w.shape for x in state.values()):
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


def _stack_states(states: list[State], batch: Batch) -> list[State]:
    """States of momentum and stabiliser, stacked, by block; entries of the parameter's shape in the batch's dtype."""
    own = {name: x for name, x in states[0].items() if name not in ("skipped", *ADDED)}
    placement, dtype, view = batch.placement, batch.dtype, batch.placement.role.view
    shaped, stacks = _shaped(own, batch), {}
    for name in shaped:
        if isinstance(view, OneBlock) and own[name].dtype == dtype and device.on_cpu(own[name]):
            stacks[name] = [_side_by_side(states, name).reshape(len(states), *placement.blocks[0])]
        else:
            stacks[name] = _stack_blocks([state[name].to(dtype) for state in states], view)
    by_block = [{name: stacks[name][i] for name in shaped} for i in range(len(placement.blocks))]
    if rest := own.keys() - shaped:
        caches = [split_by_block({name: state[name] for name in rest}, placement.blocks) for state in states]
        for i, block in enumerate(by_block):
            block |= {name: _stack([cache[i][name] for cache in caches]) for name in rest}
    return by_block


def _shaped(state: State, batch: Batch) -> set[str]:
    """The momentum's entries of the parameter's shape; all else is cut by block."""
    return {name for name in batch.placement.role.smoothed & state.keys() if state[name].shape == batch.placement.shape}


def _split_states(by_block: list[State], batch: Batch, states: list[State]) -> list[State]:
    """The states of each parameter, in the shapes of the optimizer's: the inverse of `_stack_states`."""
    split: list[State] = [{} for _ in states]
    placement, shaped = batch.placement, _shaped(states[0], batch)
    for name in by_block[0]:
        stacks = [block[name] for block in by_block]
        if name in shaped:
            wholes = _split_blocks(stacks, placement.role.view, placement.shape)
        else:
            parts = zip(*(x.unbind() for x in stacks), strict=True)
            wholes = [join_blocks([{name: x} for x in blocks])[name] for blocks in parts]
        for state, x in zip(split, wholes, strict=True):
            state[name] = x
    return split


def _stack_blocks(tensors: Sequence[Tensor], view: View) -> list[Tensor]:
    """Like parameters' blocks, one stack `(k, n, out, in)` per block."""
    if isinstance(view, OneBlock):  # a reshape of each is one of the stack
        return [_stack(tensors).reshape(len(tensors), *view.block(tuple(tensors[0].shape)))]
    return [_stack(blocks) for blocks in zip(*map(view.split, tensors), strict=True)]


def _split_blocks(stacks: list[Tensor], view: View, shape: Shape) -> list[Tensor]:
    """The parameters of this shape again: the inverse of `_stack_blocks`."""
    if isinstance(view, OneBlock):
        return list(stacks[0].reshape(-1, *shape).unbind())
    return [view.join(blocks, shape) for blocks in zip(*(x.unbind() for x in stacks), strict=True)]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """`(k, ...)`; one tensor alone is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _side_by_side(states: list[State], name: str) -> Tensor:
    """One entry of k states as `(k, ...)`; entries with memory of their own are laid into one piece first.

    The next step then stacks them without a copy. Where a gradient is missing, the others' entries are copied.
    """
    tensors = [state[name] for state in states]
    first, size = tensors[0], tensors[0].numel() * tensors[0].element_size()
    if len(tensors) == 1:
        return first[None]
    storages = {x.untyped_storage().data_ptr() for x in tensors}
    places = [x.data_ptr() - first.data_ptr() for x in tensors]
    if len(storages) == 1 and places == [i * size for i in range(len(tensors))] and first.is_contiguous():
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    together = torch.stack(tensors)
    if all(x.untyped_storage().nbytes() == size for x in tensors):
        for state, x in zip(states, together.unbind(), strict=True):
            state[name] = x
    return together


def _write_(tensor: Tensor, value: Tensor) -> None:
    """Copy value, unless it is the tensor's own memory, which a step on a CPU may have written to already."""
    if not device.on_cpu(tensor) or value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)
