"""Which part of a parameter each process holds, and which process computes what: pure functions of shapes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slab:
    """A box of entries: from `start`, `size` many along each dimension.

    >>> Slab((2, 0), (2, 3)).overlap(Slab((3, 1), (4, 4)))
    Slab(start=(3, 1), size=(1, 2))
    """

    start: Shape
    size: Shape

    @classmethod
    def of(cls, shape: Sequence[int]) -> Slab:
        """All entries of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.size)

    def overlap(self, other: Slab) -> Slab:
        """The intersection with another slab."""
        starts = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        return Slab(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def within(self, other: Slab) -> tuple[slice, ...]:
        """This slab's slices of a tensor that holds the other slab."""
        begins = (a - b for a, b in zip(self.start, other.start, strict=True))
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.size, strict=True))


def slabs(shape: Shape, mesh: Shape, placements: Sequence[Any]) -> list[Slab]:
    """The slab of every process of a mesh, in row-major order of their coordinates.

    A dimension of n entries over P processes is cut as `torch.chunk` cuts it: `ceil(n/P)` each, the last ones fewer or
    none. Where several mesh dimensions cut one dimension, they do so in the mesh's order; but a `_StridedShard` cuts
    after those to its right, whose sizes multiply to its `split_factor`, as FSDP2 does after tensor parallelism.

    Args:
        shape: of the whole parameter.
        mesh: the mesh's shape.
        placements: one for each mesh dimension: torch's `Replicate`, `Shard`, or `_StridedShard`.

    Returns:
        A slab for each process.

    Raises:
        ValueError: another placement, or several `_StridedShard` of one dimension.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> slabs((3, 2), (1, 2), (Replicate(), Shard(0)))
    [Slab(start=(0, 0), size=(2, 2)), Slab(start=(2, 0), size=(1, 2))]
    """
    order, found = _order(mesh, placements), list[Slab]()
    for at in itertools.product(*map(range, mesh)):
        start, size = [0] * len(shape), list(shape)
        for axis in order:
            dim, each = placements[axis].dim, -(-size[placements[axis].dim] // mesh[axis])
            begin = min(at[axis] * each, size[dim])
            start[dim], size[dim] = start[dim] + begin, min(each, size[dim] - begin)
        found.append(Slab(tuple(start), tuple(size)))
    return found


def cutting(placements: Sequence[Any]) -> tuple[int, ...]:
    """The mesh dimensions that cut the parameter; ValueError for a placement that is neither a copy nor a cut.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> cutting((Replicate(), Shard(0)))
    (1,)
    """
    for placement in placements:
        if type(placement).__name__ not in ("Replicate", "Shard", "_StridedShard"):
            raise ValueError(f"{placement!r} is neither Replicate nor Shard")
    return tuple(axis for axis, placement in enumerate(placements) if type(placement).__name__ != "Replicate")


def owners(costs: Sequence[int], ranks: int) -> dict[int, int]:
    """Assign pieces of work to ranks: the costliest first, each to the rank with the least so far.

    Args:
        costs: of each piece, in any unit.
        ranks: number of owners.

    Returns:
        Piece -> its rank, the costliest first. The busiest rank has at most 4/3 of the least possible load.

    Source: R. Graham, "Bounds on multiprocessing timing anomalies", 1969, theorem 2.

    >>> owners([3, 1, 2], 2)
    {0: 0, 2: 1, 1: 1}
    """
    loads = [(0, rank) for rank in range(ranks)]
    chosen = {}
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        chosen[index] = rank
        heapq.heapreplace(loads, (load + costs[index], rank))
    return chosen


def _order(mesh: Shape, placements: Sequence[Any]) -> list[int]:
    """The mesh dimensions that cut, in the order of their cuts: strided ones last."""
    strides = {axis: getattr(placements[axis], "split_factor", 1) for axis in cutting(placements)}
    for axis, stride in strides.items():
        right = [other for other in strides if other > axis and placements[other].dim == placements[axis].dim]
        plain = all(strides[other] == 1 for other in right)
        if stride > 1 and not (plain and math.prod(mesh[other] for other in right) == stride):
            raise ValueError(f"{placements[axis]!r} of {placements} on a mesh of {mesh} is no contiguous part")
    return sorted(strides, key=lambda axis: strides[axis] > 1)
