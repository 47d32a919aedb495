"""Like parameters as one batch: chosen, stacked, stepped piece by piece, taken apart and written back.

`SteepestDescent.step` loads a batch, takes the step of its blocks and stores the results. Where parameters are sharded,
loading and storing exchange data with other processes; the step between them is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.momentum import State, is_finite
from surefoot.optim.precision import ADDED, Index, Precision
from surefoot.plan import Placement
from surefoot.views import OneBlock, Shape, View
from surefoot.views.state import join_blocks, split_by_block

BATCH_BYTES = {"cpu": 4 << 20}
"""Bytes of like parameters that are stacked at once: a share of the cache, a small part of an accelerator's memory."""

ELSEWHERE = 256 << 20
"""Of devices that the table does not name."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter as a step sees it: tensors of this process that hold all that its rule couples.

    Args:
        value: the weights, which are written to.
        grad: their gradient.
        placement: their role and shape.
        state: the optimizer's state of them, which is written to.
        finite: whether the gradient is there and finite, 0-d bool, if several processes have agreed on it, who count
            it, too.
        there: whether the gradient is there, if they have.
        index: where the entries lie in the whole parameter, for the noise of stochastic rounding.
    """

    value: Tensor
    grad: Tensor
    placement: Placement
    state: State
    finite: Tensor | None = None
    there: Tensor | None = None
    index: Index = 0


@dataclass(frozen=True)
class Batch:
    """Parameters of equal role, shape, dtype and device that take their step together.

    Args:
        leaves: k parameters.
        group: their parameter group.
    """

    leaves: list[Leaf]
    group: dict[str, Any]

    @property
    def placement(self) -> Placement:
        """That of each, up to its reason."""
        return self.leaves[0].placement

    @property
    def params(self) -> list[Tensor]:
        """The weights."""
        return [leaf.value for leaf in self.leaves]

    @property
    def states(self) -> list[State]:
        """The states."""
        return [leaf.state for leaf in self.leaves]

    @property
    def agreed(self) -> bool:
        """Whether other processes hold parts, or copies, of these parameters."""
        return self.leaves[0].finite is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the step computes in: float32, or float64 for float64 parameters."""
        return torch.promote_types(self.leaves[0].value.dtype, torch.float32)


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


@torch.no_grad()
def init_state(placement: Placement, w: Tensor) -> State:
    """What the optimizer keeps of weights w before their first step: momentum, stabiliser, count of skipped steps."""
    role, w = placement.role, w.detach().to(torch.promote_types(w.dtype, torch.float32))
    state = role.momentum.init_state(torch.zeros_like(w))
    pairs = zip(placement.stabilisers, role.view.split(w), strict=True)
    state |= join_blocks([role.init_memory(block, scheme) for scheme, block in pairs], role.owned)
    return {**state, "skipped": torch.zeros((), dtype=torch.int32, device=w.device)}


def batches(
    leaves: Iterable[Leaf], group: dict[str, Any], kind: Callable[[Tensor], Any] | None = None
) -> Iterator[Batch]:
    """Like parameters of a group together, cut to `BATCH_BYTES`.

    Args:
        leaves: the parameters that take a step.
        group: their group.
        kind: of a parameter; those of one kind together.

    Yields:
        Batches, in the order of their first parameters.
    """
    buckets: dict[Any, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        placement, value = leaf.placement, leaf.value
        own = None if kind is None else kind(value)
        buckets[placement.role, placement.shape, value.dtype, value.device, leaf.finite is None, own].append(leaf)
    for bucket in buckets.values():
        count = stacked_at_once(bucket[0].value.device, bucket[0].value.numel())
        for start in range(0, len(bucket), count):
            yield Batch(bucket[start : start + count], group)


def stacked_at_once(device: torch.device, numel: int) -> int:
    """How many parameters of so many entries are stacked at once."""
    return max(1, BATCH_BYTES.get(device.type, ELSEWHERE) // (4 * max(1, numel)))


def load(batch: Batch, precision: Precision) -> Blocks:
    """The batch's blocks, stacked; a batch of one parameter is not copied.

    Args:
        batch: like parameters.
        precision: in which numbers weights and momentum are kept.

    Returns:
        Weights, gradients and states as the step takes them.
    """
    view, dtype, rounding = batch.placement.role.view, batch.dtype, precision.rounding(batch.params[0])
    weights = stack_blocks([rounding.read(leaf.value, leaf.state, dtype) for leaf in batch.leaves], view)
    gradients = stack_blocks([leaf.grad.to(dtype) for leaf in batch.leaves], view)
    if batch.group["maximize"]:
        gradients = [-g for g in gradients]
    if batch.agreed:
        finite = torch.stack([leaf.finite for leaf in batch.leaves if leaf.finite is not None])
    else:
        finite = torch.stack([is_finite(g, batch.placement.role.momentum.squares) for g in gradients]).all(0)
    return Blocks(weights, gradients, _stack_states(batch), finite)


def store(batch: Batch, blocks: Blocks, precision: Precision) -> None:
    """Write stepped weights and states back, rounded as precision says; count the gradients that were not finite."""
    placement, states = batch.placement, batch.states
    all_finite = batch.agreed or (device.on_cpu(blocks.finite) and bool(blocks.finite.all()))
    weights = split_blocks(blocks.weights, placement.role.view, placement.shape)
    for leaf, w, new in zip(batch.leaves, weights, _split_states(blocks.states, batch), strict=True):
        write_back(leaf, w, new, precision)
    for state, finite in zip(() if all_finite else states, blocks.finite, strict=False):
        state["skipped"] += ~finite


def write_back(leaf: Leaf, w: Tensor, new: State, precision: Precision) -> None:
    """Write a parameter's next weights and changed state, rounded as precision says.

    Args:
        leaf: the parameter.
        w: its next weights, in the dtype of the step.
        new: entries of the state.
        precision: in which numbers both are kept.
    """
    value, added = precision.rounding(leaf.value).write(w, leaf.value.dtype, leaf.state, leaf.index)
    write_(leaf.value, value)
    for name, x in new.items():
        if leaf.there is not None:  # the masks of a step keep all but what schemes refine at rest
            x = torch.where(leaf.there, x, leaf.state[name].to(x.dtype))
        write_(leaf.state[name], precision.keep(x, leaf.state[name], leaf.state, leaf.index))
    for name, x in added.items():
        write_(leaf.state[name], x)
    if "rounds" in leaf.state:
        leaf.state["rounds"] += 1 if leaf.there is None else leaf.there


def _stack_states(batch: Batch) -> list[State]:
    """States of momentum and stabiliser, stacked, by block; entries of the parameter's shape in the batch's dtype."""
    states = batch.states
    own = {name: x for name, x in states[0].items() if name not in ("skipped", *ADDED)}
    placement, dtype, view = batch.placement, batch.dtype, batch.placement.role.view
    shaped, stacks = _shaped(own, batch), {}
    for name in shaped:
        if not batch.agreed and isinstance(view, OneBlock) and own[name].dtype == dtype and device.on_cpu(own[name]):
            stacks[name] = [_side_by_side(states, name).reshape(len(states), *placement.blocks[0])]
        else:
            stacks[name] = stack_blocks([state[name].to(dtype) for state in states], view)
    by_block = [{name: stacks[name][i] for name in shaped} for i in range(len(placement.blocks))]
    if rest := own.keys() - shaped:
        caches = [split_by_block({name: state[name] for name in rest}, placement.blocks) for state in states]
        for i, block in enumerate(by_block):
            block |= {name: _stack([cache[i][name] for cache in caches]) for name in caches[0][i]}
    return by_block


def _shaped(state: State, batch: Batch) -> set[str]:
    """The momentum's entries of the parameter's shape; all else is cut by block."""
    return {name for name in batch.placement.role.smoothed & state.keys() if state[name].shape == batch.placement.shape}


def _split_states(by_block: list[State], batch: Batch) -> list[State]:
    """The states of each parameter, in the shapes of the optimizer's: the inverse of `_stack_states`."""
    split: list[State] = [{} for _ in batch.leaves]
    placement, shaped = batch.placement, _shaped(batch.states[0], batch)
    for name in by_block[0]:
        stacks = [block[name] for block in by_block]
        if name in shaped:
            wholes = [{name: x} for x in split_blocks(stacks, placement.role.view, placement.shape)]
        else:
            parts = zip(*(x.unbind() for x in stacks), strict=True)
            wholes = [join_blocks([{name: x} for x in blocks], placement.role.owned) for blocks in parts]
        for state, whole in zip(split, wholes, strict=True):
            state |= whole
    return split


def stack_blocks(tensors: Sequence[Tensor], view: View) -> list[Tensor]:
    """Like parameters' blocks, one stack `(k, n, out, in)` per block."""
    if isinstance(view, OneBlock):  # a reshape of each is one of the stack
        return [_stack(tensors).reshape(len(tensors), *view.block(tuple(tensors[0].shape)))]
    return [_stack(blocks) for blocks in zip(*map(view.split, tensors), strict=True)]


def split_blocks(stacks: list[Tensor], view: View, shape: Shape) -> list[Tensor]:
    """The parameters of this shape again: the inverse of `stack_blocks`."""
    if isinstance(view, OneBlock):
        return list(stacks[0].reshape(len(stacks[0]), *shape).unbind())
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


def write_(tensor: Tensor, value: Tensor) -> None:
    """Copy value, unless it is the tensor's own memory, which a step on a CPU may have written to already."""
    if not device.on_cpu(tensor) or value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)
