"""Projections that share one parameter: one norm per projection, or per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.views.base import OneBlock, Shape, View


@dataclass(frozen=True)
class Fused(OneBlock):
    """Equal projections fused along dimension 0, as q, k, v of `nn.MultiheadAttention`: one norm per projection.

    With as many parts as heads it is one norm per head.

    Args:
        parts: number of projections.

    >>> Fused(3).blocks((12, 4)), Fused(3).blocks((12,))
    (((3, 4, 4),), ((3, 4),))
    """

    parts: int

    def block(self, shape: Shape) -> Shape:
        """`(parts, out/parts, in)`, or `(parts, size/parts)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] % self.parts:
            raise ValueError(f"{self.parts} fused projections do not fit shape {tuple(shape)}")
        return (self.parts, shape[0] // self.parts, *shape[1:])


@dataclass(frozen=True)
class Projections(View):
    """Projections of unequal size fused along dimension 0, as q, k, v of grouped queries: one norm per projection.

    Args:
        sizes: number of rows of each projection.

    >>> Projections((8, 2, 2)).blocks((12, 16)), Projections((8, 2, 2)).blocks((12,))
    (((1, 8, 16), (1, 2, 16), (1, 2, 16)), ((1, 8), (1, 2), (1, 2)))
    """

    sizes: tuple[int, ...]

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(1, size, in)` per projection, or `(1, size)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] != sum(self.sizes):
            raise ValueError(f"projections of sizes {self.sizes} do not fit shape {tuple(shape)}")
        return tuple((1, size, *shape[1:]) for size in self.sizes)

    def split(self, x: Tensor) -> list[Tensor]:
        """Slices of the rows of x, which share its memory."""
        return [part[None] for part in torch.split(x, list(self.sizes))]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The projections' rows, concatenated."""
        return torch.cat([block[0] for block in blocks])


@dataclass(frozen=True)
class Interleaved(View):
    """Equal projections fused head by head, rows `(heads, parts, head_dim)` as in GPT-NeoX: one norm per projection.

    Args:
        heads: number of heads.
        parts: number of projections.

    >>> Interleaved(heads=2, parts=3).blocks((24, 8))
    ((3, 8, 8),)
    """

    heads: int
    parts: int

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(parts, out/parts, in)`, or `(parts, size/parts)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] % (self.heads * self.parts):
            raise ValueError(f"{self.parts} projections of {self.heads} heads do not fit shape {tuple(shape)}")
        return ((self.parts, shape[0] // self.parts, *shape[1:]),)

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy, ordered by projection, then by head."""
        (block,) = self.blocks(tuple(x.shape))
        return [x.reshape(self.heads, self.parts, -1, *x.shape[1:]).transpose(0, 1).reshape(block)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy, ordered by head, then by projection."""
        return blocks[0].reshape(self.parts, self.heads, -1, *shape[1:]).transpose(0, 1).reshape(shape)


@dataclass(frozen=True)
class Grouped(View):
    """Projections fused group by group, rows `(groups, sum(sizes))`: one norm per projection, over all its groups.

    For example Falcon's grouped queries (per key: its queries, the key, the value) or DeepSeek's keys and values.

    Args:
        groups: number of groups.
        sizes: number of rows of each projection within one group.

    >>> Grouped(groups=2, sizes=(8, 2, 2)).blocks((24, 16))
    ((1, 16, 16), (1, 4, 16), (1, 4, 16))
    """

    groups: int
    sizes: tuple[int, ...]

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(1, groups * size, in)` per projection, or `(1, groups * size)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] != self.groups * sum(self.sizes):
            raise ValueError(f"{self.groups} groups of sizes {self.sizes} do not fit shape {tuple(shape)}")
        return tuple((1, self.groups * size, *shape[1:]) for size in self.sizes)

    def split(self, x: Tensor) -> list[Tensor]:
        """Copies, one per projection, with the groups' rows one after the other."""
        groups = x.reshape(self.groups, sum(self.sizes), *x.shape[1:])
        return [part.reshape(1, -1, *x.shape[1:]) for part in torch.split(groups, list(self.sizes), 1)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy, ordered by group, then by projection."""
        return torch.cat([block.reshape(self.groups, -1, *shape[1:]) for block in blocks], 1).reshape(shape)


@dataclass(frozen=True)
class FusedStack(OneBlock):
    """Experts `(E, out, in)` whose rows fuse equal projections, gate over up: one norm per expert and projection.

    One part suits the experts' biases `(E, out)`: one vector per expert.

    Args:
        parts: number of projections per expert.

    >>> FusedStack(2).blocks((8, 6, 4)), FusedStack(2).blocks((8, 6)), FusedStack(1).blocks((8, 6))
    (((16, 3, 4),), ((16, 3),), ((8, 6),))
    """

    parts: int

    @property
    def stacked(self) -> bool:
        """True."""
        return True

    def block(self, shape: Shape) -> Shape:
        """`(E * parts, out/parts, in)`, or `(E * parts, out/parts)` for the biases."""
        if not 2 <= len(shape) <= 3 or shape[1] % self.parts:
            raise ValueError(f"experts of {self.parts} fused projections do not fit shape {tuple(shape)}")
        return (shape[0] * self.parts, shape[1] // self.parts, *shape[2:])


@dataclass(frozen=True)
class AlternatingStack(View):
    """Experts `(E, out, in)` whose projections alternate row by row, gate, up, gate, up, as in gpt-oss.

    The norm is one per expert and projection.

    Args:
        parts: number of projections per expert.

    >>> AlternatingStack(2).blocks((8, 6, 4))
    ((16, 3, 4),)
    """

    parts: int

    @property
    def stacked(self) -> bool:
        """True."""
        return True

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(E * parts, out/parts, in)`, or `(E * parts, out/parts)` for the biases."""
        return FusedStack(self.parts).blocks(shape)

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy, ordered by expert, then by projection."""
        (block,) = self.blocks(tuple(x.shape))
        return [x.reshape(x.shape[0], -1, self.parts, *x.shape[2:]).transpose(1, 2).reshape(block)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy with the projections' rows alternating again."""
        return blocks[0].reshape(shape[0], self.parts, -1, *shape[2:]).transpose(1, 2).reshape(shape)


@dataclass(frozen=True)
class PerHead(View):
    """The projections of another view, cut into heads: one norm per head.

    `surefoot.per_head` wraps it around the layout that discovery gave a parameter.

    Args:
        head_dim: number of rows of a head.
        inner: layout of the projections.
        values: False leaves the last one of several projections whole, the values of queries, keys and values.

    >>> from surefoot.views import Fused, Matrix, Projections, Transposed
    >>> PerHead(4, Matrix()).blocks((16, 8)), PerHead(4, Transposed(Projections((16, 4, 4)))).blocks((8, 24))
    (((4, 4, 8),), ((4, 4, 8), (1, 4, 8), (1, 4, 8)))
    >>> PerHead(4, Fused(3), values=False).blocks((24, 8))
    ((4, 4, 8), (1, 8, 8))
    """

    head_dim: int
    inner: View
    values: bool = True

    @property
    def whole(self) -> View:
        """The inner layout."""
        return self.inner

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(n * out/head_dim, head_dim, in)` or `(n * size/head_dim, head_dim)` per block of the inner view."""
        *cut, last = self.inner.blocks(shape)
        if not self._leaves(last, len(cut)):
            return tuple(self._heads(block) for block in (*cut, last))
        count, *rest = last
        before = [self._heads((count - 1, *rest))] if count > 1 else []
        return (*(self._heads(block) for block in cut), *before, (1, *rest))

    def split(self, x: Tensor) -> list[Tensor]:
        """The inner view's blocks, reshaped into heads."""
        *cut, last = self.inner.split(x)
        parts = [*cut, last]
        if self._leaves(tuple(last.shape), len(cut)):
            parts = [*cut, *([last[:-1]] if len(last) > 1 else []), last[-1:]]
        shapes = self.blocks(tuple(x.shape))
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The heads reshaped into the inner view's blocks, then joined by it."""
        projections = self.inner.blocks(shape)
        *cut, last = blocks
        if self._leaves(projections[-1], len(projections) - 1) and projections[-1][0] > 1:
            *cut, before = cut
            last = torch.cat([before.reshape(-1, *last.shape[1:]), last])
        parts = zip([*cut, last], projections, strict=True)
        return self.inner.join([x.reshape(block) for x, block in parts], shape)

    def _leaves(self, last: Shape, others: int) -> bool:
        """Whether the last projection is left whole: there are others."""
        return not self.values and (others > 0 or last[0] > 1)

    def _heads(self, block: Shape) -> Shape:
        count, rows, *rest = block
        if self.head_dim < 1 or rows % self.head_dim:
            raise ValueError(f"{rows} rows are no whole number of heads of {self.head_dim} rows")
        return (count * rows // self.head_dim, self.head_dim, *rest)
