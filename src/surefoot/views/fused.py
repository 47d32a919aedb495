"""Projections that share one parameter: a norm for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.views.base import OneBlock, Shape, View


@dataclass(frozen=True)
class Fused(OneBlock):
    """`parts` equal projections fused along dimension 0, as `nn.MultiheadAttention`'s q, k and v: a norm each.

    With as many parts as heads it is a norm per head.

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
    """Projections of unequal size fused along dimension 0, grouped queries' q, k and v for example: a norm each.

    >>> Projections((8, 2, 2)).blocks((12, 16)), Projections((8, 2, 2)).blocks((12,))
    (((1, 8, 16), (1, 2, 16), (1, 2, 16)), ((1, 8), (1, 2), (1, 2)))
    """

    sizes: tuple[int, ...]

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(1, size, in)` each, or `(1, size)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] != sum(self.sizes):
            raise ValueError(f"projections of sizes {self.sizes} do not fit shape {tuple(shape)}")
        return tuple((1, size, *shape[1:]) for size in self.sizes)

    def split(self, x: Tensor) -> list[Tensor]:
        """Rows of x."""
        return [part[None] for part in torch.split(x, list(self.sizes))]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The rows together."""
        return torch.cat([block[0] for block in blocks])


@dataclass(frozen=True)
class Interleaved(OneBlock):
    """`parts` projections fused head by head, rows `(heads, parts, head_dim)` as in GPT-NeoX: a norm per projection.

    >>> Interleaved(heads=2, parts=3).blocks((24, 8))
    ((3, 8, 8),)
    """

    heads: int
    parts: int

    def block(self, shape: Shape) -> Shape:
        """`(parts, out/parts, in)`, or `(parts, size/parts)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] % (self.heads * self.parts):
            raise ValueError(f"{self.parts} projections of {self.heads} heads do not fit shape {tuple(shape)}")
        return (self.parts, shape[0] // self.parts, *shape[1:])

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy, projection by projection."""
        block = self.block(tuple(x.shape))
        return [x.reshape(self.heads, self.parts, -1, *x.shape[1:]).transpose(0, 1).reshape(block)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """Head by head again."""
        return blocks[0].reshape(self.parts, self.heads, -1, *shape[1:]).transpose(0, 1).reshape(shape)


@dataclass(frozen=True)
class Grouped(View):
    """Projections fused group by group, rows `(groups, sum(sizes))`: a norm per projection, over all its groups.

    As Falcon's grouped queries (each key's queries, then the key, then the value) or DeepSeek's keys and values.

    >>> Grouped(groups=2, sizes=(8, 2, 2)).blocks((24, 16))
    ((1, 16, 16), (1, 4, 16), (1, 4, 16))
    """

    groups: int
    sizes: tuple[int, ...]

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(1, groups * size, in)` each, or `(1, groups * size)` for the fused bias."""
        if not 1 <= len(shape) <= 2 or shape[0] != self.groups * sum(self.sizes):
            raise ValueError(f"{self.groups} groups of sizes {self.sizes} do not fit shape {tuple(shape)}")
        return tuple((1, self.groups * size, *shape[1:]) for size in self.sizes)

    def split(self, x: Tensor) -> list[Tensor]:
        """Copies, projection by projection."""
        groups = x.reshape(self.groups, sum(self.sizes), *x.shape[1:])
        return [part.reshape(1, -1, *x.shape[1:]) for part in torch.split(groups, list(self.sizes), 1)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """Group by group again."""
        return torch.cat([block.reshape(self.groups, -1, *shape[1:]) for block in blocks], 1).reshape(shape)


@dataclass(frozen=True)
class FusedStack(OneBlock):
    """Experts `(E, out, in)`, each of `parts` equal projections fused along its rows, gate over up: a norm each.

    One part suits the experts' biases `(E, out)`: a vector each.

    >>> FusedStack(2).blocks((8, 6, 4)), FusedStack(2).blocks((8, 6)), FusedStack(1).blocks((8, 6))
    (((16, 3, 4),), ((16, 3),), ((8, 6),))
    """

    parts: int

    def block(self, shape: Shape) -> Shape:
        """`(E * parts, out/parts, in)`, or `(E * parts, out/parts)` for the biases."""
        if not 2 <= len(shape) <= 3 or shape[1] % self.parts:
            raise ValueError(f"experts of {self.parts} fused projections do not fit shape {tuple(shape)}")
        return (shape[0] * self.parts, shape[1] // self.parts, *shape[2:])


@dataclass(frozen=True)
class AlternatingStack(FusedStack):
    """Experts whose `parts` projections alternate row by row (gate, up, gate, up), as gpt-oss's: a norm each.

    >>> AlternatingStack(2).blocks((8, 6, 4))
    ((16, 3, 4),)
    """

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy, projection by projection."""
        block = self.block(tuple(x.shape))
        return [x.reshape(x.shape[0], -1, self.parts, *x.shape[2:]).transpose(1, 2).reshape(block)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """Row by row again."""
        return blocks[0].reshape(shape[0], self.parts, -1, *shape[2:]).transpose(1, 2).reshape(shape)


@dataclass(frozen=True)
class PerHead(View):
    """The projections of another view, cut into heads of `head_dim` rows: a norm for each head.

    `surefoot.per_head` puts it on whatever layout was found.

    >>> from surefoot.views import Matrix, Transposed
    >>> PerHead(4, Matrix()).blocks((16, 8)), PerHead(4, Transposed(Projections((16, 4, 4)))).blocks((8, 24))
    (((4, 4, 8),), ((4, 4, 8), (1, 4, 8), (1, 4, 8)))
    """

    head_dim: int
    inner: View

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(n * out/head_dim, head_dim, in)` for each of the inner view's, or `(n * size/head_dim, head_dim)`."""
        return tuple(self._cut(block) for block in self.inner.blocks(shape))

    def split(self, x: Tensor) -> list[Tensor]:
        """The inner view's, cut."""
        return [block.reshape(self._cut(tuple(block.shape))) for block in self.inner.split(x)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The heads together, then as the inner view joins them."""
        whole = self.inner.blocks(shape)
        return self.inner.join([x.reshape(block) for x, block in zip(blocks, whole, strict=True)], shape)

    def _cut(self, block: Shape) -> Shape:
        count, rows, *rest = block
        if self.head_dim < 1 or rows % self.head_dim:
            raise ValueError(f"{rows} rows are no whole number of heads of {self.head_dim} rows")
        return (count * rows // self.head_dim, self.head_dim, *rest)
