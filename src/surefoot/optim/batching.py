"""Like parameters stacked into one tensor, and taken apart again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.monitor.norms import divide, unite
from surefoot.optim.precision import ADDED
from surefoot.plan import Placement
from surefoot.views import OneBlock, Shape, View


def chunks(
    params: Iterable[Tensor], placements: Mapping[Tensor, Placement], budget: Callable[[torch.device], int]
) -> Iterator[list[Tensor]]:
    """Parameters with a gradient, those with like role, shape, dtype and device together, cut to the budget.

    Raises:
        RuntimeError: a sparse gradient.
    """
    buckets: dict[Any, list[Tensor]] = defaultdict(list)
    for p in params:
        if p.grad is None or p.numel() == 0:
            continue
        if p.grad.is_sparse:
            raise RuntimeError("SteepestDescent does not support sparse gradients: use nn.Embedding(sparse=False)")
        placement = placements[p]
        buckets[placement.rule, placement.shape, p.dtype, p.device].append(p)
    for (*_, place), bucket in buckets.items():
        count = max(1, budget(place) // (4 * bucket[0].numel()))
        for start in range(0, len(bucket), count):
            yield bucket[start : start + count]


def gather(states: list[State], placement: Placement, dtype: torch.dtype) -> list[State]:
    """What momentum and stabiliser keep of a chunk, stacked, by block; entries of a parameter's shape in this dtype."""
    own = {name: x for name, x in states[0].items() if name not in ("skipped", *ADDED)}
    shared = {name for name, x in own.items() if x.shape == placement.shape}
    view = placement.role.view
    split = {name: stacked([state[name].to(dtype) for state in states], view, stack_adjacent) for name in shared}
    kept = [{name: split[name][i] for name in shared} for i in range(len(placement.blocks))]
    if rest := own.keys() - shared:
        cached = [divide({name: state[name] for name in rest}, placement.blocks) for state in states]
        for i, found in enumerate(kept):
            found |= {name: stack([cache[i][name] for cache in cached]) for name in rest}
    return kept


def scatter(kept: list[State], placement: Placement, states: list[State]) -> list[State]:
    """What is kept of each parameter of a chunk, in the shapes of its state: the inverse of `gather`."""
    found: list[State] = [{} for _ in states]
    for name in kept[0]:
        stacks = [each[name] for each in kept]
        if states[0][name].shape == placement.shape:
            whole = unstacked(stacks, placement.role.view, placement.shape)
        else:
            parts = zip(*(x.unbind() for x in stacks), strict=True)
            whole = [unite([{name: x} for x in each])[name] for each in parts]
        for new, x in zip(found, whole, strict=True):
            new[name] = x
    return found


def write_(tensor: Tensor, value: Tensor) -> None:
    """Copies value, unless it is the tensor's own memory, written to already: by pieces, which a host alone takes."""
    if not device.on_cpu(tensor) or value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


def stack(tensors: list[Tensor]) -> Tensor:
    """`(k, ...)`; one tensor alone is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def stack_adjacent(tensors: list[Tensor]) -> Tensor:
    """`stack`, without a copy of what lies side by side in the host's memory. Not for weights: autograd watches."""
    first, last = tensors[0], tensors[-1]
    if len(tensors) == 1 or not device.may_branch(first):
        return stack(tensors)
    size, start = first.numel() * first.element_size(), first.data_ptr()
    near = all(x.is_contiguous() and x.data_ptr() == start + i * size for i, x in enumerate(tensors))
    if not near or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return torch.stack(tensors)
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def side_by_side(states: list[State], names: Iterable[str]) -> None:
    """Lay these entries of like parameters so that `stack_adjacent` need not copy them."""
    for name in names:
        for state, x in zip(states, torch.stack([state[name] for state in states]).unbind(), strict=True):
            state[name] = x


def stacked(tensors: list[Tensor], view: View, join: Callable[[list[Tensor]], Tensor] = stack) -> list[Tensor]:
    """Like parameters' blocks, one stack `(k, n, out, in)` per block."""
    if type(view).split is OneBlock.split:  # a reshape of each is one of the stack
        return [join(tensors).reshape(len(tensors), *view.blocks(tuple(tensors[0].shape))[0])]
    return [join(list(each)) for each in zip(*map(view.split, tensors), strict=True)]


def unstacked(stacks: list[Tensor], view: View, shape: Shape) -> list[Tensor]:
    """The parameters again, in this shape: the inverse of `stacked`."""
    if type(view).split is OneBlock.split:
        return list(stacks[0].reshape(-1, *shape).unbind())
    return [view.join(blocks, shape) for blocks in zip(*(x.unbind() for x in stacks), strict=True)]


def marks(weights: list[Tensor]) -> Tensor:
    """Numbers of each parameter `(k, 2 blocks)` that a write to it changes: l2 norm and sum of each block."""
    flat = [w.flatten(1) for w in weights]
    return torch.cat([torch.stack([torch.linalg.vector_norm(x, dim=1), x.sum(1)], 1) for x in flat], 1)
