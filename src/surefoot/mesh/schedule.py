"""Steps that need whole tensors: which process computes which, and in which order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from surefoot.mesh.slabs import Slab, owners

BUCKET_BYTES = 64 << 20
"""Bytes of whole matrices that one process computes between two exchanges, unless a single one has more."""


@dataclass(frozen=True, eq=False)
class Work:
    """A step that needs all of a box of a parameter: a matrix, an expert, a vector.

    Args:
        box: the entries, within the parameter.
        holders: the slab of each process, of the same parameter.
        cost: of the step, in multiply-adds up to a factor.
        sent: tensors of the box that go to the owner; 0 where everybody has it.
        returned: tensors of the box that come back.
        numbers: further numbers that the owner sends to everybody, such as singular-vector estimates.
        itemsize: bytes of an entry.
    """

    box: Slab
    holders: tuple[Slab, ...]
    cost: int
    sent: int = 1
    returned: int = 1
    numbers: int = 0
    itemsize: int = 4

    @cached_property
    def parts(self) -> list[Slab]:
        """What each process holds of the box."""
        return [self.box.overlap(slab) for slab in self.holders]


Bucket = list[list[Any]]
"""Of each process the `Work`s that it owns, which are exchanged by one collective each way."""


def schedule(works: Sequence[Work], budget: int = BUCKET_BYTES) -> list[Bucket]:
    """Owners and buckets: the longest works first, each to the process that has the least.

    Every prefix of this order is balanced, so every bucket is about as long on each process. A bucket ends where one
    process would hold more than the budget.

    Args:
        works: of one group of processes, at least one, with equal numbers of holders.
        budget: bytes of one tensor of each work that a process may hold at once.

    Returns:
        The buckets in order, the same on every process.

    >>> halves = (Slab((0, 0), (2, 4)), Slab((2, 0), (2, 4)))
    >>> works = [Work(Slab((0, 0), (4, 4)), halves, cost(4, 4)) for _ in range(2)]
    >>> schedule(works) == [[[works[0]], [works[1]]]], len(schedule(works * 2, budget=64))
    (True, 2)
    """
    ranks = len(works[0].holders)
    buckets, held = list[Bucket](), list[int]()
    for index, owner in owners([work.cost for work in works], ranks).items():
        size = works[index].box.numel * works[index].itemsize
        if not held or (held[owner] and held[owner] + size > budget):
            buckets.append([[] for _ in range(ranks)])
            held = [0] * ranks
        held[owner] += size
        buckets[-1][owner].append(works[index])
    return buckets


def cost(*sizes: int) -> int:
    """Multiply-adds of the matrix signs of `(n, out, in)`, or of `(out, in)`; of vectors their entries.

    Of five iterations: with m the shorter side, `n (10 m^2 M + 5 m^3)` products of the whole, or, where `M >= 1.5 m`,
    `n (4 m^2 M + 14 m^3)` by the Gram matrix. By `m^2 M` alone the busiest of 64 processes would have 6 % more than the
    mean on LLaMA-7B.

    >>> cost(2, 4, 4), cost(4, 8), cost(7)
    (1920, 1408, 7)
    """
    if len(sizes) < 2:
        return math.prod(sizes)
    *batch, m, longer = *sizes[:-2], *sorted(sizes[-2:])
    each = 4 * m**2 * longer + 14 * m**3 if longer >= 1.5 * m else 10 * m**2 * longer + 5 * m**3
    return math.prod(batch) * each
