"""Projections that share one parameter: one norm per projection, or per head."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from surefoot.views.base import OneBlock, Shape, Transposed, View, require_fit


@dataclass(frozen=True)
class Fused(OneBlock):
    """Equal projections fused along dimension 0, as q, k, v of `nn.MultiheadAttention`: one norm per projection.

    With one part per head it is one norm per head.

    Args:
        parts: number of projections.

    >>> Fused(3).blocks((12, 4)), Fused(3).blocks((12,))
    (((3, 4, 4),), ((3, 4),))
    """

    parts: int

    def block(self, shape: Shape) -> Shape:
        """`(parts, out/parts, in)`, or `(parts, size/parts)` for the fused bias."""
        fits = 1 <= len(shape) <= 2 and shape[0] % self.parts == 0
        require_fit(fits, f"{self.parts} fused projections", shape)
        return (self.parts, shape[0] // self.parts, *shape[1:])


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

    def split(self, x: Tensor) -> list[Tensor]:
        """`(1, groups * size, in)` per projection, or `(1, groups * size)`; of one group they share the memory of x."""
        fits = 1 <= x.ndim <= 2 and len(x) == self.groups * sum(self.sizes)
        require_fit(fits, f"projections of sizes {self.sizes} in {self.groups} groups", x.shape)
        groups = x.reshape(self.groups, sum(self.sizes), *x.shape[1:])
        return [part.flatten(0, 1)[None] for part in torch.split(groups, list(self.sizes), 1)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy, ordered by group, then by projection."""
        parts = zip(blocks, self.sizes, strict=True)
        return torch.cat([x.reshape(self.groups, size, *shape[1:]) for x, size in parts], 1).reshape(shape)


@dataclass(frozen=True)
class Projections(Grouped):
    """Projections of unequal size fused along dimension 0, as q, k, v of grouped queries: one norm per projection.

    They are grouped projections of one group.

    Args:
        sizes: number of rows of each projection.

    >>> Projections((8, 2, 2)).blocks((12, 16)), Projections((8, 2, 2)).blocks((12,))
    (((1, 8, 16), (1, 2, 16), (1, 2, 16)), ((1, 8), (1, 2), (1, 2)))
    """

    groups: int = field(default=1, init=False, repr=False, compare=False)


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

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy `(parts, out/parts, in)`, or `(parts, size/parts)` for the fused bias."""
        count = self.heads * self.parts
        fits = 1 <= x.ndim <= 2 and len(x) % count == 0
        require_fit(fits, f"{self.parts} projections of {self.heads} heads", x.shape)
        return [x.reshape(self.heads, self.parts, len(x) // count, *x.shape[1:]).transpose(0, 1).flatten(1, 2)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy, ordered by head, then by projection."""
        rows = shape[0] // (self.heads * self.parts)
        return blocks[0].reshape(self.parts, self.heads, rows, *shape[1:]).transpose(0, 1).reshape(shape)


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
    stacked = True

    def block(self, shape: Shape) -> Shape:
        """`(E * parts, out/parts, in)`, or `(E * parts, out/parts)` for the biases."""
        fits = 2 <= len(shape) <= 3 and shape[1] % self.parts == 0
        require_fit(fits, f"experts of {self.parts} fused projections", shape)
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
    stacked = True

    def split(self, x: Tensor) -> list[Tensor]:
        """A copy `(E * parts, out/parts, in)`, or `(E * parts, out/parts)` for the biases."""
        rows = FusedStack(self.parts).block(tuple(x.shape))[1]
        return [x.reshape(len(x), rows, self.parts, *x.shape[2:]).transpose(1, 2).flatten(0, 1)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """A copy, in the rows' order."""
        parts = blocks[0].reshape(shape[0], self.parts, shape[1] // self.parts, *shape[2:])
        return parts.transpose(1, 2).reshape(shape)


@dataclass(frozen=True)
class PerHead(View):
    """The projections of another view, cut into heads: one norm per head.

    `surefoot.per_head` wraps it around the layout that discovery gave a parameter.

    Args:
        head_dim: number of rows of a head.
        inner: layout of the projections.
        values: False leaves the last of several projections whole: the values, beside queries and keys.

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

    def split(self, x: Tensor) -> list[Tensor]:
        """`(n * out/head_dim, head_dim, in)` or `(n * size/head_dim, head_dim)` per block of the inner view."""
        *cut, last = self.inner.split(x)
        whole = not self.values and (len(cut) > 0 or len(last) > 1)
        if whole and len(last) > 1:
            cut, last = [*cut, last[:-1]], last[-1:]
        return [*map(self._heads, cut), last if whole else self._heads(last)]

    def join(self, blocks: Sequence[Tensor], shape: Shape) -> Tensor:
        """The heads reshaped into the inner view's blocks, then joined by it."""
        whole, parts = self.inner.blocks(shape), [*blocks]
        if len(parts) > len(whole):  # the last of equal projections was left whole
            parts[-2:] = [torch.cat([parts[-2].reshape(-1, *parts[-1].shape[1:]), parts[-1]])]
        return self.inner.join([x.reshape(block) for x, block in zip(parts, whole, strict=True)], shape)

    def _heads(self, block: Tensor) -> Tensor:
        count, rows, *rest = block.shape
        if self.head_dim < 1 or rows % self.head_dim:
            raise ValueError(f"{rows} rows are no whole number of heads of {self.head_dim} rows")
        return block.reshape(count * rows // self.head_dim, self.head_dim, *rest)


def apart(view: View, shape: Shape) -> View:
    """The same layout for a parameter of this shape, with a block for each projection fused in it.

    >>> apart(PerHead(2, Fused(3)), (12, 4)), apart(Interleaved(2, 3), (12, 4))
    (PerHead(head_dim=2, inner=Projections(sizes=(4, 4, 4)), values=True), Grouped(groups=2, sizes=(2, 2, 2)))
    """
    if isinstance(view, Transposed | PerHead):
        turned = (*shape[:-2], shape[-1], shape[-2]) if isinstance(view, Transposed) else shape
        return replace(view, inner=apart(view.inner, turned))
    if type(view) is Fused:
        return Projections((shape[0] // view.parts,) * view.parts)
    if type(view) is Interleaved:
        return Grouped(view.heads, (shape[0] // (view.heads * view.parts),) * view.parts)
    return view
