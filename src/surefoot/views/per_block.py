"""One norm per head: the blocks of another view, cut into heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.views.base import Shape, View


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
