"""How an optimizer's state of a parameter is laid out by block."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from surefoot.views.base import Shape


def split_by_block(state: Mapping[str, Tensor], blocks: Sequence[Shape]) -> list[dict[str, Tensor]]:
    """A parameter's cached tensors by block, cut along the first dimension; a scalar goes to every block.

    `name:2` is that of the third block alone.
    """
    counts = [block[0] for block in blocks]
    found: list[dict[str, Tensor]] = [{} for _ in blocks]
    for name, x in state.items():
        if ":" in name:
            found[int(name.partition(":")[2])][entry(name)] = x
            continue
        for own, part in zip(found, torch.split(x, counts) if x.ndim else [x] * len(counts), strict=True):
            own[name] = part
    return found


def join_blocks(states: Sequence[Mapping[str, Tensor]], apart: Collection[str] = ()) -> dict[str, Tensor]:
    """The inverse of `split_by_block`; rows and matrices of unequal sizes are padded with zeros to the largest.

    Args:
        states: of the blocks, in their order.
        apart: names that are not padded; where sizes differ, each block has its own entry, `name:0`, `name:1`, ...

    Returns:
        The parameter's tensors by name.
    """
    joined: dict[str, Tensor] = {}
    for name, x in states[0].items():
        parts = [state[name] for state in states]
        if name in apart and len({part.shape[1:] for part in parts}) > 1:
            joined |= {f"{name}:{i}": part for i, part in enumerate(parts)}
        else:
            joined[name] = _joined(parts) if len(parts) > 1 and x.ndim else x
    return joined


def entry(name: str) -> str:
    """The name that `join_blocks` was given.

    >>> entry("left:1"), entry("step")
    ('left', 'step')
    """
    return name.partition(":")[0]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenated along the first dimension."""
    largest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in parts), strict=True)]
    margins = ([m for a, b in zip(largest, x.shape[1:], strict=True) for m in (a - b, 0)][::-1] for x in parts)
    return torch.cat([torch.nn.functional.pad(x, m) if any(m) else x for x, m in zip(parts, margins, strict=True)])
