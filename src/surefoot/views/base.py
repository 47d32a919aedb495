"""`View` and the layouts of single matrices, stacks, tables, vectors and kernels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

Shape = tuple[int, ...]
"""The sizes of a tensor, in order."""


def require_fit(fits: bool, what: str, shape: Shape) -> None:
    """Raise ValueError where a view does not fit a shape; the message says what it is of."""
    if not fits:
        raise ValueError(f"{what} cannot have shape {tuple(shape)}")


class View(ABC):
    """The layout of a parameter: the blocks that its norm is taken over.

    A new layout is a frozen dataclass that defines `split` and `join`; one whose `split` is a reshape derives from
    `OneBlock` instead and defines `block` only.

    >>> view, shape = Transposed(), (2, 3)
    >>> [tuple(block.shape) for block in view.split(torch.zeros(shape))], view.blocks(shape)
    ([(1, 3, 2)], ((1, 3, 2),))
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, inverse in (("split", cls.join), ("join", cls.split)):
            if {"split", "join"} & vars(cls).keys() == {name} and not hasattr(inverse, "__isabstractmethod__"):
                raise TypeError(f"{cls.__name__} overrides {name} alone: split and join are inverses, define both")

    stacked: bool = False
    """Whether the parameter's first dimension numbers experts: slices of it are slices of the one block."""

    @property
    def whole(self) -> View:
        """The layout before it was cut into heads; itself where it was not."""
        return self

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """Shapes of the blocks, those that `split` gives.

        Args:
            shape: shape of the parameter.

        Returns:
            A shape `(n, out, in)` or `(n, size)` per block, n counting independent matrices or vectors.

        Raises:
            ValueError: the view does not fit the shape; the message names the shape.
        """
        return tuple(tuple(block.shape) for block in self.split(torch.empty(shape, device="meta")))

    @abstractmethod
    def split(self, x: Tensor) -> list[Tensor]:
        """Split a parameter into its blocks.

        Args:
            x: the parameter, or a tensor of its shape (gradient, momentum).

        Returns:
            One tensor per block; they share memory with x where its strides allow it.

        Raises:
            ValueError: the view does not fit the shape of x.
        """

    @abstractmethod
    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """Inverse of `split`.

        Args:
            blocks: one tensor per block, in the order of `blocks(shape)`.
            shape: shape of the parameter.

        Returns:
            A tensor of that shape.
        """


class OneBlock(View):
    """A layout whose `split` and `join` are reshapes, so that a stack of parameters is split by one reshape.

    A subclass defines `block` only.

    Raises:
        TypeError: a subclass overrides `blocks`, `split` or `join`.

    >>> class Column(OneBlock):
    ...     def block(self, shape):
    ...         return (1, *shape, 1)
    >>> Column().blocks((4,))
    ((1, 4, 1),)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        if other := [name for name in ("blocks", "split", "join") if getattr(cls, name) is not getattr(OneBlock, name)]:
            raise TypeError(f"{cls.__name__}.{other[0]}: a OneBlock is a reshape; to override it, subclass View")
        super().__init_subclass__(**options)

    @abstractmethod
    def block(self, shape: Shape) -> Shape:
        """Shape of the one block.

        Args:
            shape: shape of the parameter.

        Returns:
            `(n, out, in)` or `(n, size)`, with as many entries as `shape`.

        Raises:
            ValueError: the view does not fit the shape; the message names the shape.
        """

    @final
    def split(self, x: Tensor) -> list[Tensor]:
        """x, reshaped to `block(x.shape)`."""
        return [x.reshape(self.block(tuple(x.shape)))]

    @final
    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The one block, reshaped to the parameter's shape."""
        return blocks[0].reshape(shape)


@dataclass(frozen=True)
class Matrix(OneBlock):
    """One matrix `(out, in)`, torch's layout of `nn.Linear` and `nn.Embedding`.

    >>> Matrix().blocks((4, 3))
    ((1, 4, 3),)
    """

    def block(self, shape: Shape) -> Shape:
        """`(1, out, in)`."""
        require_fit(len(shape) == 2, "a matrix, of 2 dimensions,", shape)
        return (1, *shape)


@dataclass(frozen=True)
class Stack(OneBlock):
    """Stacked matrices `(..., out, in)`, for example experts: one norm per matrix.

    >>> Stack().blocks((8, 4, 3))
    ((8, 4, 3),)
    """

    stacked = True

    def block(self, shape: Shape) -> Shape:
        """`(prod(...), out, in)`."""
        require_fit(len(shape) > 2, "a stack of matrices, of 3 dimensions or more,", shape)
        return (math.prod(shape[:-2]), *shape[-2:])


@dataclass(frozen=True)
class Rows(OneBlock):
    """A table `(..., d)` of any number of dimensions, one row per entry: positions `(1, N, d)`, class tokens.

    >>> Rows().blocks((1, 17, 64))
    ((1, 17, 64),)
    """

    def block(self, shape: Shape) -> Shape:
        """`(1, prod(...), d)`."""
        require_fit(len(shape) > 1, "a table, of 2 dimensions or more,", shape)
        return (1, math.prod(shape[:-1]), shape[-1])


@dataclass(frozen=True)
class Vector(OneBlock):
    """A parameter of any shape as one vector.

    >>> Vector().blocks((4, 3)), Vector().blocks(())
    (((1, 12),), ((1, 1),))
    """

    def block(self, shape: Shape) -> Shape:
        """`(1, size)`."""
        return (1, math.prod(shape))


@dataclass(frozen=True)
class Convolution(OneBlock):
    """A kernel `(out, in/groups, *k)` as one matrix per group, which acts on the unfolded patch.

    A depthwise convolution is the case groups = channels.

    Args:
        groups: `groups` of the convolution.

    >>> Convolution(groups=2).blocks((8, 3, 5, 5))
    ((2, 4, 75),)
    """

    groups: int = 1

    def block(self, shape: Shape) -> Shape:
        """`(groups, out/groups, in/groups * prod(k))`."""
        require_fit(len(shape) > 2 and shape[0] % self.groups == 0, f"a kernel in {self.groups} groups", shape)
        return (self.groups, shape[0] // self.groups, math.prod(shape[1:]))


@dataclass(frozen=True)
class TransposedConvolution(View):
    """A transposed convolution's kernel `(in, out/groups, *k)` as one matrix per group, with a row per output channel.

    An output entry is computed from one in `prod(stride)` of the columns, which `TransposedConvSpectral` accounts for.

    Args:
        groups: `groups` of the convolution.

    >>> TransposedConvolution(groups=2).blocks((8, 3, 5, 5))
    ((2, 3, 100),)
    """

    groups: int = 1

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy `(groups, out/groups, in/groups * prod(k))`."""
        require_fit(x.ndim > 2 and len(x) % self.groups == 0, f"a kernel in {self.groups} groups", x.shape)
        return [x.reshape(self.groups, len(x) // self.groups, *x.shape[1:]).transpose(1, 2).flatten(2)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy, in the kernel's order."""
        kernels = blocks[0].reshape(self.groups, shape[1], shape[0] // self.groups, *shape[2:])
        return kernels.transpose(1, 2).reshape(shape)


@dataclass(frozen=True)
class Transposed(View):
    """A matrix stored `(in, out)`, as Hugging Face's `Conv1D` stores it, or a stack of such matrices.

    Args:
        inner: layout of the transpose, `(out, in)`.

    >>> from surefoot.views import Fused
    >>> Transposed(Fused(3)).blocks((16, 48))
    ((3, 16, 16),)
    """

    inner: View = field(default_factory=Matrix)

    @property
    def stacked(self) -> bool:  # type: ignore[override]
        """Whether the inner view is."""
        return self.inner.stacked

    def split(self, x: Tensor) -> list[Tensor]:
        """The inner view's blocks of the transpose."""
        require_fit(x.ndim > 1, "a transposed matrix, of 2 dimensions or more,", x.shape)
        return self.inner.split(x.mT)

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The blocks joined by the inner view, transposed back."""
        return self.inner.join(blocks, (*shape[:-2], shape[-1], shape[-2])).mT
