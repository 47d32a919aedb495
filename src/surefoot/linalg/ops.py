"""The operations that every polar iteration is made of.

The iterations in `polar` are written once over an `Ops`; a faster backend supplies the same five names.
All matrices are batches `(b, m, n)` with `m <= n`; Gram matrices are `(b, m, m)` and symmetric, and every
pair of them that is multiplied is a polynomial in one matrix, so the product is symmetric too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

STRIPS = 4
"""Strips that a symmetric product is computed in on a CPU: 5/8 of the operations; more would be too thin."""

LEAST = 1 << 16, 64
"""Entries and rows of the first factor from which strips win: at 128 x 512 and 256 x 256, not at 128 x 128."""

UNBLOCKED = 128
"""MKL factors up to so many rows without blocks, and then the upper triangle in 3/4 of the lower one's time."""

FEW = 16
"""Rows below which a Gram matrix is summed in float64: few long rows of one sign lose a small singular value."""

LEAF, BATCH = 32, 4
"""Rows up to which LAPACK inverts a block, and matrices of a batch from which products of blocks are the faster way."""


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
    return x.device.type == "cpu" and x.shape[-2] * x.shape[-1] >= LEAST[0] and x.shape[-2] >= LEAST[1]


def _symmetric(a: Tensor, b: Tensor) -> Tensor:
    """`a b`, known to be symmetric: on a CPU strip by strip up to the diagonal, and mirrored."""
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
    """In x's own layout: a tall matrix comes as a transpose, and what it is added to lies as it does."""
    return torch.bmm(x.mT, a.mT).mT if x.mT.is_contiguous() else torch.bmm(a, x)


def _gram(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.shape[-2] < FEW:
        wide = x.double()
        return torch.bmm(wide, wide.mT).to(x.dtype)
    return _symmetric(x, x.mT)


TORCH = Ops(gram=_gram, quadratic=_quadratic, product=_symmetric, apply=_apply, inverse=_inverse)
