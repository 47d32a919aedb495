"""The five operations that every polar iteration consists of, by torch.

The iterations in `polar` are written once over an `Ops`; a faster backend supplies the same five functions.
All matrices are batches `(b, m, n)` with `m <= n`; Gram matrices are `(b, m, m)` and symmetric, and any two of them
that are multiplied are polynomials in the same matrix, so that the product is symmetric too.
"""

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


@dataclass(frozen=True)
class Ops:
    """A backend: five functions on batches of matrices."""

    gram: Callable[[Tensor], Tensor]
    """`x -> x xᵀ`, `(b, m, n) -> (b, m, m)`."""
    quadratic: Callable[[Tensor, float, float], Tensor]
    """`(a, beta, gamma) -> beta a + gamma a²` for symmetric `a`."""
    product: Callable[[Tensor, Tensor], Tensor]
    """`(a, b) -> a b` for symmetric matrices that commute."""
    apply: Callable[[Tensor, Tensor], Tensor]
    """`(a, x) -> a x`, a small square matrix times a wide one."""
    inverse: Callable[[Tensor], Tensor]
    """`a -> a⁻¹` for symmetric positive definite `a`."""


def _in_strips(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.shape[-2] * x.shape[-1] >= STRIPS_MIN_ENTRIES and x.shape[-2] >= STRIPS_MIN_ROWS


def _symmetric(a: Tensor, b: Tensor) -> Tensor:
    """`a b` where that is symmetric: on a CPU strip by strip up to the diagonal, and mirrored."""
    if not _in_strips(a):
        return torch.bmm(a, b)
    rows = a.shape[-2]
    whole = a.new_empty(a.shape[0], rows, rows)
    edges = [rows * i // STRIPS for i in range(STRIPS + 1)]
    for start, end in pairwise(edges):
        strip = torch.bmm(a[:, start:end], b[:, :, :end])
        whole[:, start:end, :end] = strip
        whole[:, :start, start:end] = strip[:, :, :start].mT
    return whole


def _quadratic(a: Tensor, beta: float, gamma: float) -> Tensor:
    if not _in_strips(a):
        return torch.baddbmm(a, a, a, beta=beta, alpha=gamma)
    return _symmetric(a, a).mul_(gamma).add_(a, alpha=beta)


def _inverse(a: Tensor) -> Tensor:
    rows = a.shape[-1]
    if a.device.type == "cpu" and len(a) >= BATCH and LEAF < rows <= UNBLOCKED:
        return _inverse_by_halves(a)
    upper = rows <= UNBLOCKED
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(a, upper=upper).L, upper=upper)


def _inverse_by_halves(a: Tensor) -> Tensor:
    """`V Vᵀ` with `V = U⁻¹`, `a = Uᵀ U`, block by block, each a product of the whole batch."""
    half = a.shape[-1] // 2
    first, coupling, last = _inverse_factors(a, half)
    whole = torch.empty_like(a)
    whole[:, half:, half:] = torch.bmm(last, last.mT)
    corner = torch.bmm(coupling, last.mT)
    whole[:, :half, half:], whole[:, half:, :half] = corner, corner.mT
    whole[:, :half, :half] = torch.bmm(first, first.mT).baddbmm_(coupling, coupling.mT)
    return whole


def _inverse_factors(a: Tensor, half: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of `V`, the inverse of a's upper Cholesky factor: first, above the diagonal, last."""
    first = _inverse_factor(a[:, :half, :half])
    side = torch.bmm(first.mT, a[:, :half, half:])
    last = _inverse_factor(torch.baddbmm(a[:, half:, half:], side.mT, side, alpha=-1))
    return first, torch.bmm(first, torch.bmm(side, last)).neg_(), last


def _inverse_factor(a: Tensor) -> Tensor:
    """The inverse of a's upper Cholesky factor."""
    rows, half = a.shape[-1], a.shape[-1] // 2
    if rows <= LEAF:
        one = torch.eye(rows, dtype=a.dtype, device=a.device).expand_as(a)
        factor = torch.linalg.cholesky_ex(a, upper=True).L
        inverse: Tensor = torch.linalg.solve_triangular(factor, one, upper=True, left=False)
        return inverse
    whole = torch.zeros_like(a)
    whole[:, :half, :half], whole[:, :half, half:], whole[:, half:, half:] = _inverse_factors(a, half)
    return whole


def _apply(a: Tensor, x: Tensor) -> Tensor:
    """`a x` in x's memory layout: a tall matrix is passed transposed, and its sign is added to a tall weight."""
    return torch.bmm(x.mT, a.mT).mT if x.mT.is_contiguous() else torch.bmm(a, x)


def _gram(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.shape[-2] < FLOAT64_ROWS:
        wide = x.double()
        return torch.bmm(wide, wide.mT).to(x.dtype)
    return _symmetric(x, x.mT)


TORCH = Ops(gram=_gram, quadratic=_quadratic, product=_symmetric, apply=_apply, inverse=_inverse)
