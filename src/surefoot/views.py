"""Views: a parameter as the blocks that its norm is taken over, and back.

A block has shape `(n, out, in)` for matrices and `(n, size)` for vectors, n being independent problems. The
update, the initialisation, the projection and the metrics of a parameter all act on the same view.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


class View(ABC):
    """How one parameter is laid out."""

    @abstractmethod
    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the block of a parameter of this shape.

        Raises:
            ValueError: the view does not fit the shape; the message names the shape.
        """

    def split(self, x: Tensor) -> Tensor:
        """The parameter as a block; shares memory with x where x is contiguous."""
        return x.reshape(self.blocks(tuple(x.shape)))


@dataclass(frozen=True)
class Matrix(View):
    """One matrix `(out, in)`, torch's layout of `nn.Linear` and `nn.Embedding`.

    >>> Matrix().blocks((4, 3))
    (1, 4, 3)
    """

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(1, out, in)`."""
        if len(shape) != 2:
            raise ValueError(f"a matrix has 2 dimensions, not shape {tuple(shape)}")
        return (1, *shape)


@dataclass(frozen=True)
class Stack(View):
    """Stacked matrices `(..., out, in)`: experts, each with its own norm.

    >>> Stack().blocks((8, 4, 3))
    (8, 4, 3)
    """

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(prod(...), out, in)`."""
        if len(shape) < 3:
            raise ValueError(f"a stack of matrices has 3 dimensions or more, not shape {tuple(shape)}")
        return (math.prod(shape[:-2]), *shape[-2:])


@dataclass(frozen=True)
class Rows(View):
    """A table `(..., d)` of any number of dimensions, one row each: positions `(1, N, d)`, class tokens.

    >>> Rows().blocks((1, 17, 64))
    (1, 17, 64)
    """

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(1, prod(...), d)`."""
        if len(shape) < 2:
            raise ValueError(f"a table has 2 dimensions or more, not shape {tuple(shape)}")
        return (1, math.prod(shape[:-1]), shape[-1])


@dataclass(frozen=True)
class Fused(View):
    """`parts` equal projections fused along dimension 0, as `nn.MultiheadAttention`'s q, k and v: a norm each.

    >>> Fused(3).blocks((12, 4)), Fused(3).blocks((12,))
    ((3, 4, 4), (3, 4))
    """

    parts: int

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(parts, out/parts, in)`, or `(parts, size/parts)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] % self.parts:
            raise ValueError(f"{self.parts} fused projections do not fit shape {tuple(shape)}")
        return (self.parts, shape[0] // self.parts, *shape[1:])


@dataclass(frozen=True)
class Vector(View):
    """Any shape as one vector.

    >>> Vector().blocks((4, 3)), Vector().blocks(())
    ((1, 12), (1, 1))
    """

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(1, size)`."""
        return (1, math.prod(shape))


@dataclass(frozen=True)
class Convolution(View):
    """A kernel `(out, in/groups, *k)` as the matrix of the unfolded patch, one per group.

    A depthwise convolution is the case groups = channels.

    >>> Convolution(groups=2).blocks((8, 3, 5, 5))
    (2, 4, 75)
    """

    groups: int = 1

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(groups, out/groups, in/groups * prod(k))`."""
        if len(shape) < 3 or shape[0] % self.groups:
            raise ValueError(f"a convolution kernel in {self.groups} groups does not fit shape {tuple(shape)}")
        return (self.groups, shape[0] // self.groups, math.prod(shape[1:]))
