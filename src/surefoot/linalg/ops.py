"""The five operations that every polar iteration consists of, by torch.

The iterations in `polar` are written once over an `Ops`; a faster backend has another product, or
overrides some.
All matrices are batches `(b, m, n)` with `m <= n`; Gram matrices are `(b, m, m)` and symmetric, and any two of them
that are multiplied are polynomials in the same matrix, so that the product is symmetric too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

STRIPS = 4
"""Strips that a symmetric product is computed in on a CPU: 5/8 of the operations; more would be too thin."""

STRIPS_MIN_ENTRIES, STRIPS_MIN_ROWS = 1 << 16, 64
"""Size of the first factor from which strips are faster: at 128 x 512 and 256 x 256, not at 128 x 128."""

UNBLOCKED = 128
"""Most rows that MKL factors without blocks; up to there the upper triangle takes 3/4 of the lower one's time."""

FLOAT64_ROWS = 16
"""Rows below which a Gram matrix is summed in float64: in float32, few long rows of one sign lose a small singular
value."""

LEAF, BATCH = 32, 4
"""Most rows of a block that LAPACK inverts, and fewest matrices of a batch for which inverting by blocks is faster."""

Multiply = Callable[[Tensor, Tensor], Tensor]
"""`(a, b) -> a b` of two batches of matrices in any memory layout: `torch.bmm`, or another library's."""


@dataclass(frozen=True)
class Ops:
    """A backend: five operations on batches of matrices, by one product.

    Args:
        multiply: the product.
        lapack: most rows of a matrix that LAPACK inverts; beyond, the inverse is made of products, too.
        strips: fewest rows for which strips are faster; more for a product that costs more by the call.
    """

    multiply: Multiply
    lapack: float = math.inf
    strips: int = STRIPS_MIN_ROWS

    def gram(self, x: Tensor) -> Tensor:
        """`x xᵀ`, `(b, m, n) -> (b, m, m)`."""
        if x.device.type == "cpu" and x.shape[-2] < FLOAT64_ROWS:
            wide = x.double()
            return torch.bmm(wide, wide.mT).to(x.dtype)
        return self.product(x, x.mT)

    def quadratic(self, a: Tensor, beta: float, gamma: float) -> Tensor:
        """`beta a + gamma a²` for symmetric `a`."""
        if not self._in_strips(a):
            return torch.baddbmm(a, a, a, beta=beta, alpha=gamma)
        return self.product(a, a).mul_(gamma).add_(a, alpha=beta)

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        """`a x`, a small square matrix times a wide one, in x's memory layout.

        A tall matrix is passed transposed, and its sign is added to a tall weight.
        """
        return self.multiply(x.mT, a.mT).mT if x.mT.is_contiguous() else self.multiply(a, x)

    def inverse(self, a: Tensor) -> Tensor:
        """`a⁻¹` for symmetric positive definite `a`."""
        rows = a.shape[-1]
        if a.device.type == "cpu" and len(a) >= BATCH and LEAF < rows <= UNBLOCKED:
            return _inverse_by_halves(a, torch.bmm, LEAF)
        if rows > self.lapack:
            return _inverse_by_halves(a, self.multiply, UNBLOCKED)
        upper = rows <= UNBLOCKED
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(a, upper=upper).L, upper=upper)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """`a b` where that is symmetric: on a CPU strip by strip up to the diagonal, and mirrored."""
        if not self._in_strips(a):
            return self.multiply(a, b)
        rows = a.shape[-2]
        whole = a.new_empty(a.shape[0], rows, rows)
        edges = [rows * i // STRIPS for i in range(STRIPS + 1)]
        for start, end in pairwise(edges):
            strip = self.multiply(a[:, start:end], b[:, :, :end])
            whole[:, start:end, :end] = strip
            whole[:, :start, start:end] = strip[:, :, :start].mT
        return whole

    def _in_strips(self, x: Tensor) -> bool:
        rows, columns = x.shape[-2:]
        return x.device.type == "cpu" and rows * columns >= STRIPS_MIN_ENTRIES and rows >= self.strips


TORCH = Ops(torch.bmm)


def _inverse_by_halves(a: Tensor, multiply: Multiply, leaf: int) -> Tensor:
    """`V Vᵀ` with `V = U⁻¹`, `a = Uᵀ U`, block by block, each a product of the whole batch."""
    half = a.shape[-1] // 2
    first, coupling, last = _inverse_factors(a, half, multiply, leaf)
    whole = torch.empty_like(a)
    whole[:, half:, half:] = multiply(last, last.mT)
    corner = multiply(coupling, last.mT)
    whole[:, :half, half:], whole[:, half:, :half] = corner, corner.mT
    whole[:, :half, :half] = multiply(first, first.mT).add_(multiply(coupling, coupling.mT))
    return whole


def _inverse_factors(a: Tensor, half: int, multiply: Multiply, leaf: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of `V`, the inverse of a's upper Cholesky factor: first, above the diagonal, last."""
    first = _inverse_factor(a[:, :half, :half], multiply, leaf)
    side = multiply(first.mT, a[:, :half, half:])
    last = _inverse_factor(a[:, half:, half:] - multiply(side.mT, side), multiply, leaf)
    return first, multiply(first, multiply(side, last)).neg_(), last


def _inverse_factor(a: Tensor, multiply: Multiply, leaf: int) -> Tensor:
    """The inverse of a's upper Cholesky factor."""
    rows, half = a.shape[-1], a.shape[-1] // 2
    if rows <= leaf:
        one = torch.eye(rows, dtype=a.dtype, device=a.device).expand_as(a)
        factor = torch.linalg.cholesky_ex(a, upper=True).L
        inverse: Tensor = torch.linalg.solve_triangular(factor, one, upper=True, left=False)
        return inverse
    whole = torch.zeros_like(a)
    whole[:, :half, :half], whole[:, :half, half:], whole[:, half:, half:] = _inverse_factors(a, half, multiply, leaf)
    return whole
