"""The four products that every polar iteration is made of.

The iterations in `polar` are written once over an `Ops`; a faster backend supplies the same four names.
All matrices are batches `(b, m, n)` with `m <= n`; Gram matrices are `(b, m, m)` and symmetric, and every
pair of them that is multiplied is a polynomial in one matrix, so the product is symmetric too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ops:
    """A backend: four functions on batches of matrices."""

    gram: Callable[[Tensor], Tensor]
    """`x -> x xᵀ`, `(b, m, n) -> (b, m, m)`."""
    quadratic: Callable[[Tensor, float, float], Tensor]
    """`(a, beta, gamma) -> beta a + gamma a²` for symmetric `a`."""
    product: Callable[[Tensor, Tensor], Tensor]
    """`(a, b) -> a b` for symmetric matrices that commute."""
    apply: Callable[[Tensor, Tensor], Tensor]
    """`(a, x) -> a x`, a small square matrix times a wide one."""


TORCH = Ops(
    gram=lambda x: torch.bmm(x, x.mT),
    quadratic=lambda a, beta, gamma: torch.baddbmm(a, a, a, beta=beta, alpha=gamma),
    product=torch.bmm,
    apply=torch.bmm,
)
