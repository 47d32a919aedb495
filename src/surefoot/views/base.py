"""`View` and the layouts of single matrices, stacks, tables, vectors and kernels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

Shape = tuple[int, ...]


class View(ABC):
    """How one parameter is laid out."""

    @abstractmethod
    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """The shapes of the blocks of a parameter of this shape.

        Raises:
            ValueError: the view does not fit the shape; the message names the shape.
        """

    @abstractmethod
    def split(self, x: Tensor) -> list[Tensor]:
        """The blocks of a parameter; they share memory with x where its strides allow it."""

    @abstractmethod
    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A parameter of this shape from its blocks: the inverse of `split`."""


class OneBlock(View):
    """A layout that is a reshape."""

    @abstractmethod
    def block(self, shape: Shape) -> Shape:
        """The shape of the block; ValueError where the view does not fit."""

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """The one."""
        return (self.block(shape),)

    def split(self, x: Tensor) -> list[Tensor]:
        """x in the block's shape."""
        return [x.reshape(self.block(tuple(x.shape)))]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The block in the parameter's shape."""
        return blocks[0].reshape(shape)


@dataclass(frozen=True)
class Matrix(OneBlock):
    """One matrix `(out, in)`, torch's layout of `nn.Linear` and `nn.Embedding`.

    >>> Matrix().blocks((4, 3))
    ((1, 4, 3),)
    """

    def block(self, shape: Shape) -> Shape:
        """`(1, out, in)`."""
        if len(shape) != 2:
            raise ValueError(f"a matrix has 2 dimensions, not shape {tuple(shape)}")
        return (1, *shape)


@dataclass(frozen=True)
class Stack(OneBlock):
    """Stacked matrices `(..., out, in)`: experts, each with its own norm.

    >>> Stack().blocks((8, 4, 3))
    ((8, 4, 3),)
    """

    def block(self, shape: Shape) -> Shape:
        """`(prod(...), out, in)`."""
        if len(shape) < 3:
            raise ValueError(f"a stack of matrices has 3 dimensions or more, not shape {tuple(shape)}")
        return (math.prod(shape[:-2]), *shape[-2:])


@dataclass(frozen=True)
class Rows(OneBlock):
    """A table `(..., d)` of any number of dimensions, one row each: positions `(1, N, d)`, class tokens.

    >>> Rows().blocks((1, 17, 64))
    ((1, 17, 64),)
    """

    def block(self, shape: Shape) -> Shape:
        """`(1, prod(...), d)`."""
        if len(shape) < 2:
            raise ValueError(f"a table has 2 dimensions or more, not shape {tuple(shape)}")
        return (1, math.prod(shape[:-1]), shape[-1])


@dataclass(frozen=True)
class Vector(OneBlock):
    """Any shape as one vector.

    >>> Vector().blocks((4, 3)), Vector().blocks(())
    (((1, 12),), ((1, 1),))
    """

    def block(self, shape: Shape) -> Shape:
        """`(1, size)`."""
        return (1, math.prod(shape))


@dataclass(frozen=True)
class Convolution(OneBlock):
    """A kernel `(out, in/groups, *k)` as the matrix of the unfolded patch, one per group.

    A depthwise convolution is the case groups = channels.

    >>> Convolution(groups=2).blocks((8, 3, 5, 5))
    ((2, 4, 75),)
    """

    groups: int = 1

    def block(self, shape: Shape) -> Shape:
        """`(groups, out/groups, in/groups * prod(k))`."""
        if len(shape) < 3 or shape[0] % self.groups:
            raise ValueError(f"a convolution kernel in {self.groups} groups does not fit shape {tuple(shape)}")
        return (self.groups, shape[0] // self.groups, math.prod(shape[1:]))


@dataclass(frozen=True)
class TransposedConvolution(View):
    """A transposed convolution's kernel `(in, out/groups, *k)`: the matrix that each output entry is made by.

    An output entry sees one in `prod(stride)` of the columns; the geometry knows, see `TransposedConvSpectral`.

    >>> TransposedConvolution(groups=2).blocks((8, 3, 5, 5))
    ((2, 3, 100),)
    """

    groups: int = 1

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(groups, out/groups, in/groups * prod(k))`."""
        if len(shape) < 3 or shape[0] % self.groups:
            raise ValueError(f"a transposed kernel in {self.groups} groups does not fit shape {tuple(shape)}")
        return ((self.groups, shape[1], math.prod(shape) // (self.groups * max(1, shape[1]))),)

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy, output channel by output channel."""
        (block,) = self.blocks(tuple(x.shape))
        return [x.reshape(self.groups, -1, *x.shape[1:]).transpose(1, 2).reshape(block)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """Input channel by input channel again."""
        rows = blocks[0].reshape(self.groups, shape[1], shape[0] // self.groups, *shape[2:])
        return rows.transpose(1, 2).reshape(shape)


@dataclass(frozen=True)
class Transposed(View):
    """A matrix stored `(in, out)`, as Hugging Face's `Conv1D`, or a stack; `inner` is the layout of its transpose.

    >>> from surefoot.views import Fused
    >>> Transposed(Fused(3)).blocks((16, 48))
    ((3, 16, 16),)
    """

    inner: View = field(default_factory=Matrix)

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """Those of the transposed shape."""
        if len(shape) < 2:
            raise ValueError(f"a transposed matrix has 2 dimensions or more, not shape {tuple(shape)}")
        return self.inner.blocks((*shape[:-2], shape[-1], shape[-2]))

    def split(self, x: Tensor) -> list[Tensor]:
        """The blocks of the transpose."""
        return self.inner.split(x.mT)

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """Transposed back."""
        return self.inner.join(blocks, (*shape[:-2], shape[-1], shape[-2])).mT
