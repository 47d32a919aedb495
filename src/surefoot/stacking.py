"""Like parameters stacked into one tensor, and taken apart again."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.linalg import host


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
