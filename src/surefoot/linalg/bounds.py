"""Proven upper bounds on the largest singular value: by repeated squaring, and by Cholesky against a given limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BLOCK = 64
"""Columns summed at a time in a float32 Gram matrix: n/BLOCK + BLOCK roundings an entry instead of n. Sums of 64 take
1.2 times as long as one product of 768 columns, on a CPU."""


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 matrices are float32 products inside: no autocast, no TF32, no bfloat16 passes of oneDNN.

    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    if torch.compiler.is_compiling():  # no graph sets flags: `surefoot.compiled` has set them around it
        yield
        return
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def upper_bound(x: Tensor, squarings: int = 6) -> Tensor:
    """An upper bound on `sigma_max`, proven for the computed number: never below the truth, whatever the matrix.

    With `G = x xᵀ`, on x's smaller side n: `sigma_max <= trace(G**(2**j))**(1/2**(j+1))`, the Schatten norm of exponent
    `2**(j+1)`, plus an allowance for every rounding. At most `n**(1/2**(j+1)) (1 + a)` times the truth, which is 1.053
    at n = 768, j = 6 and 1.0008 at j = 12. For a longer side N the allowance a is below `n (75 + N/64) 2**-24` (.004 at
    768) and that much only where all singular values are equal: a quarter on a square Gaussian, nothing in float64.

    Cost: j products on the smaller side, the first one G itself; the Frobenius norm of the last stands for one more.

    Args:
        x: `(..., out, in)`, floating point; half precision is computed in float32.
        squarings: j >= 1.

    Returns:
        `(...)`, in x's dtype (float32 for half precision); 0 for a zero matrix, not finite where x is not.

    Raises:
        ValueError: fewer than one squaring.

    Source: Schatten norms decrease in their exponent; roundings: N. Higham, "Accuracy and Stability", eq. 3.13.

    >>> upper_bound(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), squarings=8)
    tensor(4.0000)
    """
    if squarings < 1:
        raise ValueError(f"upper_bound takes at least 1 squaring, not {squarings}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=dtype)
    wide = (x if x.shape[-2] <= x.shape[-1] else x.mT).to(dtype)
    wide = wide.reshape(-1, *wide.shape[-2:])
    peak = largest_entry(wide)
    b = wide / peak
    eps, steps = torch.finfo(dtype).eps, []
    with full_precision(x.device):
        for _ in range(squarings):
            # |fl(b bᵀ) - b bᵀ|_F <= gamma |b|_F², whatever the order of summation in a block, and |b|_F² is the trace;
            # 4 roundings and 2 % more for the second order, that trace and underflow.
            gamma = (min(BLOCK, b.shape[-1]) + math.ceil(b.shape[-1] / BLOCK) + 4) * 0.51 * eps
            b = _gram(b)
            trace = b.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)[:, None, None].to(dtype)
            steps.append((trace.double(), gamma))
            b = b / torch.where(trace == 0, 1, trace)
    # Backwards from sigma(b) <= |b|_F (its last term is the rounding of that sum of squares), for b' = fl(b bᵀ)/trace:
    # sigma(b)² <= trace (sigma(b') + eps |b'|_F) + gamma trace, the division rounding every entry once, |b'|_F <= 1.
    # The division by peak rounded likewise.
    bound = torch.linalg.vector_norm(b, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    bound = bound * (1 + b.shape[-1] ** 2 * 2.0**-52)
    for trace, gamma in reversed(steps):
        bound = (trace * (bound + eps + gamma)).sqrt()
    bound = ((bound + eps * steps[0][0].sqrt()) * peak).to(dtype).reshape(x.shape[:-2])
    return torch.where(bound == 0, bound, bound.nextafter(torch.full_like(bound, torch.inf)))


def is_below(x: Tensor, limit: float | Tensor) -> Tensor:
    """Whether `sigma_max <= limit`: True is proven; False also where it is within rounding of the limit, or not finite.

    It holds where the float64 Cholesky factorisation of `limit² I - x xᵀ`, less an allowance for rounding, exists. That
    allowance is `m (m + n + 8) 2**-52` of the limit for m rows and n columns, m <= n: 3e-10 at 768 x 768.

    Cost: one float64 product on the smaller side and a Cholesky factor: half of an `msign`. No synchronisation.

    Args:
        x: `(..., out, in)`, floating point.
        limit: a number or a tensor that broadcasts against x (`(..., 1, 1)`).

    Returns:
        `(...)`, bool.

    Source: S. Rump, "Verification of positive definiteness", 2006.

    >>> is_below(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), 4.1), is_below(torch.tensor([[3.0], [4.0]]), 4.9)
    (tensor(True), tensor(False))
    """
    if x.numel() == 0:
        return x.new_ones(x.shape[:-2], dtype=torch.bool)
    _, gram, peak = unit_gram(x)
    return gram_is_below(gram, limit / peak, max(x.shape[-2:]))


def largest_entry(x: Tensor) -> Tensor:
    """`max |x_ij|` of each matrix, `(..., 1, 1)`; 1 for a zero matrix. Two reductions, since `abs` makes a copy."""
    peak = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    return torch.where(peak == 0, 1, peak)


def unit_gram(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(a, a aᵀ, peak)` in float64: a is x, laid wide, over its largest entry, which is peak (1 for a zero matrix)."""
    wide = (x if x.shape[-2] <= x.shape[-1] else x.mT).double()
    peak = largest_entry(wide)
    unit = wide / peak
    return unit, unit @ unit.mT, peak


def gram_is_below(gram: Tensor, limit: Tensor, columns: int) -> Tensor:
    """`is_below` for float64 Gram matrices `(..., m, m)` of matrices with that many columns; limit `(..., 1, 1)`.

    The factor exists in floating point only if `(limit² - slack) I - gram + E` is positive semidefinite for an error E
    below `(m + 1) u` times the trace `m limit²`; the Gram matrix itself is off by `columns u` times its trace. The
    slack is twice the sum of both.
    """
    m = gram.shape[-1]
    limit = limit.clamp(0, 2 * math.sqrt(m * columns))  # no entry of a is above 1: an infinite limit need not be
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    slack = (m + columns + 8) * 2.0**-52 * (m * limit**2 + trace)
    matrix = -gram
    matrix.diagonal(dim1=-2, dim2=-1).add_((limit**2 - slack)[..., 0])
    proven: Tensor = torch.linalg.cholesky_ex(matrix).info == 0
    return proven & trace.isfinite()[..., 0, 0]


def _gram(b: Tensor) -> Tensor:
    """`b bᵀ` of `(batch, m, n)`, summed over blocks of columns."""
    total = b.new_zeros(())
    for block in torch.split(b, BLOCK, -1):
        total = torch.bmm(block, block.mT).add_(total)
    return total
