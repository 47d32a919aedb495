"""The matrix sign in float16, for accelerators, whose matrix units multiply half precision: five minimax steps."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor

from surefoot.linalg.bounds import squared_norm_bound
from surefoot.linalg.coefficients import POLAR_EXPRESS_FP16, Quintic
from surefoot.linalg.ops import Ops

STARTS = (0, 1, 3)
"""Steps before which the Gram matrix of x is computed anew. The first step lifts a singular value of a tenth eightfold,
and the rounding of its square 65-fold: a second step on the same Gram matrix can leave the interval in which the
next ones converge (largest singular value 1.3 to 7, on few nonzero rows)."""

WIDE = 1.5
"""Width over height from which the steps are taken on the Gram matrix: at 24 m³ multiplications against 27 on x."""

SHRINK = 0.96
"""Factor that compensates ripple and rounding: without it the largest singular value was at most 1.0075, on a CPU."""


def polar_express_fp16(x: Tensor, ops: Ops) -> Tensor:
    """`U Vᵀ` of `(b, m, n)`, m <= n, largest entry 1: five steps `x <- (a + b A + c A²) x`, `A = x xᵀ`, in float16.

    float16 has 11 significant bits where bfloat16 has 8, and no number here exceeds its range: entries of x are at most
    `16/sqrt(n)`, of Gram matrices 256, of products of three steps 150. In bfloat16 the Gram form diverges on
    heavy-tailed spectra. Alignment `<o, x> / (|o|_2 |x|_*)` of a Gaussian: .99 on x itself, .98 by the Gram matrix.

    Args:
        x: float32 or half precision, largest entry 1.
        ops: the products; they sum in float32.

    Returns:
        x's shape, float32; the largest singular value at most 1 + 5e-4, values below 3e-3 of it less than 1.

    Source: the Gram form with restarts, in float16: J. Zhang, N. Amsel, B. Chen, T. Dao, "Gram Newton-Schulz", 2026.
    """
    m, n = x.shape[-2:]
    x = (x.float() * (16 / math.sqrt(n))).half()
    gram = ops.gram(x)
    top = squared_norm_bound(gram.float())
    x, gram = (x / top.sqrt()).half(), (gram / top).half()
    if n < WIDE * m:
        for index, step in enumerate(POLAR_EXPRESS_FP16):
            x = ops.apply(_polynomial(gram if index == 0 else ops.gram(x), step, ops), x)
        return x.float().mul_(SHRINK)
    for start, end in pairwise((*STARTS, len(POLAR_EXPRESS_FP16))):
        x = ops.apply(_factor(ops.gram(x) if start else gram, POLAR_EXPRESS_FP16[start:end], ops), x)
    return x.float().mul_(SHRINK)


def _polynomial(gram: Tensor, step: Quintic, ops: Ops) -> Tensor:
    """`a + b A + c A²`."""
    a, b, c = step
    polynomial = ops.quadratic(gram, b, c)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
    return polynomial


def _factor(gram: Tensor, steps: tuple[Quintic, ...], ops: Ops) -> Tensor:
    """The product of the steps' polynomials; each step's Gram matrix follows from the one before."""
    factor = polynomial = _polynomial(gram, steps[0], ops)
    for step in steps[1:]:
        gram = ops.product(ops.product(polynomial, gram), polynomial)
        polynomial = _polynomial(gram, step, ops)
        factor = ops.product(polynomial, factor)
    return factor
