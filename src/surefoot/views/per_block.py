"""One norm per head: the blocks of another view, cut into heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from surefoot.views.base import Shape, View


@dataclass(frozen=True)
class PerHead(View):
    """The projections of another view, cut into heads: one norm per head.

    `surefoot.per_head` wraps it around the layout that discovery gave a parameter.

    Args:
        head_dim: number of rows of a head.
        inner: layout of the projections.

    >>> from surefoot.views import Matrix, Projections, Transposed
    >>> PerHead(4, Matrix()).blocks((16, 8)), PerHead(4, Transposed(Projections((16, 4, 4)))).blocks((8, 24))
    (((4, 4, 8),), ((4, 4, 8), (1, 4, 8), (1, 4, 8)))
    """

    head_dim: int
    inner: View

    def blocks(self, shape: Shape) -> tuple[Shape, ...]:
        """`(n * out/head_dim, head_dim, in)` or `(n * size/head_dim, head_dim)` per block of the inner view."""
        return tuple(self._heads(block) for block in self.inner.blocks(shape))

    def split(self, x: Tensor) -> list[Tensor]:
        """The inner view's blocks, reshaped into heads."""
        return [block.reshape(self._heads(tuple(block.shape))) for block in self.inner.split(x)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The heads reshaped into the inner view's blocks, then joined by it."""
        projections = self.inner.blocks(shape)
        return self.inner.join([x.reshape(block) for x, block in zip(blocks, projections, strict=True)], shape)

    def _heads(self, block: Shape) -> Shape:
        count, rows, *rest = block
        if self.head_dim < 1 or rows % self.head_dim:
            raise ValueError(f"{rows} rows are no whole number of heads of {self.head_dim} rows")
        return (count * rows // self.head_dim, self.head_dim, *rest)
