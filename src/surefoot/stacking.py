"""Like parameters stacked into one tensor, and taken apart again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg import host
from surefoot.metrics import divide, unite
from surefoot.momentum import State
from surefoot.plan import Placement
from surefoot.storage import ADDED


def chunks(
    params: Iterable[Tensor], placements: Mapping[Tensor, Placement], budget: Callable[[torch.device], int]
) -> Iterator[list[Tensor]]:
    """Parameters with a gradient, those with like role, blocks, dtype and device together, cut to the budget.

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
        buckets[placement.rule, placement.blocks, p.dtype, p.device].append(p)
    for (_, _, _, device), bucket in buckets.items():
        count = max(1, budget(device) // (4 * bucket[0].numel()))
        for start in range(0, len(bucket), count):
            yield bucket[start : start + count]


def gather(states: list[State], placement: Placement, dtype: torch.dtype) -> list[State]:
    """What momentum and stabiliser keep of a chunk, stacked, by block; entries of a parameter's shape in this dtype."""
    own = {name: x for name, x in states[0].items() if name not in ("skipped", *ADDED)}
    shared, view = {name for name, x in own.items() if x.shape == placement.shape}, placement.role.view
    split = {name: stacked([view.split(state[name].to(dtype)) for state in states]) for name in shared}
    cached = [divide({name: state[name] for name in own.keys() - shared}, placement.blocks) for state in states]
    kept = [{name: split[name][i] for name in shared} for i in range(len(placement.blocks))]
    for i, found in enumerate(kept):
        found |= {name: stack([cache[i][name] for cache in cached]) for name in own.keys() - shared}
    return kept


def scatter(kept: list[State], j: int, placement: Placement, state: State) -> State:
    """What is kept of parameter j of a chunk, in the shapes of its state: the inverse of `gather`."""
    found = {}
    for name in kept[0]:
        parts = [each[name][j] for each in kept]
        whole = state[name].shape == placement.shape
        found[name] = (
            placement.role.view.join(parts, placement.shape) if whole else unite([{name: x} for x in parts])[name]
        )
    return found


def write_(tensor: Tensor, value: Tensor) -> None:
    """Copies value, unless it is the tensor's own memory, written to already: by pieces, which a host alone takes."""
    if not host.holds(tensor) or value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


def stack(tensors: list[Tensor]) -> Tensor:
    """`(k, ...)`; one tensor alone is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def stacked(blocks: list[list[Tensor]]) -> list[Tensor]:
    """From each parameter's blocks to one stack `(k, n, out, in)` per block."""
    return [stack(list(each)) for each in zip(*blocks, strict=True)]


def marks(weights: list[Tensor]) -> Tensor:
    """Numbers of each parameter `(k, 2 blocks)` that a write to it changes: l2 norm and sum of each block."""
    flat = [w.flatten(1) for w in weights]
    return torch.cat([torch.stack([torch.linalg.vector_norm(x, dim=1), x.sum(1)], 1) for x in flat], 1)
