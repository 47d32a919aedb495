"""Norms of matrices: the largest entry, and proven bounds on the largest singular value by squaring and Cholesky."""

import math

import torch
from torch import Tensor

from surefoot.linalg.device import full_precision

BLOCK = 64
"""Columns summed at a time in a float32 Gram matrix: n/BLOCK + BLOCK roundings an entry instead of n. Sums of 64 take
1.2 times as long as one product of 768 columns, on a CPU."""


def max_abs(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """`max |x|` over the dimensions `dim`, which stay with size 1.

    Two reductions, since `x.abs()` would make a copy; on a CPU many times faster than `vector_norm(x, inf)`.

    Args:
        x: floating point, any shape.
        dim: one dimension or several.

    Returns:
        0 over no entries; NaN where any entry is NaN.

    >>> max_abs(torch.tensor([[1.0, -3.0]]), -1)
    tensor([[3.]])
    """
    if not x.numel():
        return x.sum(dim, keepdim=True)
    return torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))


def max_abs_or_one(x: Tensor) -> Tensor:
    """A divisor that brings each matrix `(..., m, n)` to largest entry 1: its `max |x_ij|`, or 1 for a zero matrix.

    Args:
        x: `(..., m, n)`, floating point.

    Returns:
        `(..., 1, 1)`.

    >>> max_abs_or_one(torch.tensor([[[1.0, -3.0]], [[0.0, 0.0]]])).flatten()
    tensor([3., 1.])
    """
    return divisor(max_abs(x, (-2, -1)))


def divisor(x: Tensor) -> Tensor:
    """x with 1 in place of zeros: what is 0 stays 0 when it is divided by its size.

    >>> divisor(torch.tensor([2.0, 0.0]))
    tensor([2., 1.])
    """
    return torch.where(x == 0, 1, x)


def near_one(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x times the power of two that brings `max |x|` over `dims` into [1/2, 1): sums of products then do not overflow.

    A result that does not depend on the scale of x stays the same, bit for bit.

    Args:
        x: floating point, any shape.
        dims: the dimensions.

    Returns:
        x's shape and dtype; zeros stay, and what is below 1e-30 is brought up to 1e30 times itself.

    >>> near_one(torch.tensor([[3e38, -1e37], [0.0, 0.0]]), (-1,))
    tensor([[ 0.8816, -0.0294],
            [ 0.0000,  0.0000]])
    """
    peak = max_abs(x, dims)
    power = torch.frexp(peak).mantissa / peak  # exact, and 0/0 for zeros
    return x * torch.where(peak == 0, 1, power.clamp_max(2.0**100))


def upper_bound(x: Tensor, squarings: int = 6) -> Tensor:
    """Upper bound on `sigma_max`, proven for the computed number: rounding cannot bring it below the true value.

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

    Source: Schatten norms decrease in their exponent; roundings: N. Higham, "Accuracy and Stability", eq. 3.13.

    >>> upper_bound(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), squarings=8)
    tensor(4.0000)
    """
    assert squarings >= 1, squarings
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=dtype)
    wide = (x if x.shape[-2] <= x.shape[-1] else x.mT).to(dtype)
    wide = wide.reshape(-1, *wide.shape[-2:])
    peak = max_abs_or_one(wide)
    with full_precision(x.device):
        bound = _schatten_bound(wide / peak, squarings)
    bound = (bound * peak).to(dtype).reshape(x.shape[:-2])
    return torch.where(bound == 0, bound, bound.nextafter(torch.full_like(bound, torch.inf)))


def _schatten_bound(b: Tensor, squarings: int) -> Tensor:
    """`upper_bound` for `b = fl(x / peak)`, `(batch, m, n)` with largest entry 1: `>= sigma_max(x) / peak`.

    Returns `(batch, 1, 1)`, float64.
    """
    eps, steps = torch.finfo(b.dtype).eps, []
    for _ in range(squarings):
        # |fl(b bᵀ) - b bᵀ|_F <= gamma |b|_F², whatever the order of summation in a block, and |b|_F² is the trace;
        # 4 roundings and 2 % more for the second order, that trace and underflow.
        gamma = (min(BLOCK, b.shape[-1]) + math.ceil(b.shape[-1] / BLOCK) + 4) * 0.51 * eps
        b = _gram(b)
        trace = b.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)[:, None, None].to(b.dtype)
        steps.append((trace.double(), gamma))
        b = b / divisor(trace)
    # Backwards from sigma(b) <= |b|_F (its last term is the rounding of that sum of squares), for b' = fl(b bᵀ)/trace:
    # sigma(b)² <= trace (sigma(b') + eps |b'|_F) + gamma trace, the division rounding every entry once, |b'|_F <= 1.
    # The division by peak rounded likewise.
    bound: Tensor = torch.linalg.vector_norm(b, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    bound = bound * (1 + b.shape[-1] ** 2 * 2.0**-52)
    for trace, gamma in reversed(steps):
        bound = (trace * (bound + eps + gamma)).sqrt()
    return bound + eps * steps[0][0].sqrt()


def is_below(x: Tensor, limit: float | Tensor) -> Tensor:
    """Whether `sigma_max <= limit`: True is proven; False also where it is within rounding of the limit, or not finite.

    True where the float64 Cholesky factorisation of `limit² I - x xᵀ`, less an allowance for rounding, exists. The
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
    _, gram, peak = unit_gram(x)
    return gram_is_below(gram, limit / peak, max(x.shape[-2:]))


def squared_norm_bound(gram: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Upper bound on `sigma_max(x)²` for `A = x xᵀ`: `min(|A|_F, max_i sum_j |A_ij|)`; 1 for a zero matrix.

    Args:
        gram: A, `(b, m, m)`.
        dtype: in which the norms are summed and returned; by default A's.

    Returns:
        `(b, 1, 1)`.
    """
    frobenius = torch.linalg.matrix_norm(gram, keepdim=True, dtype=dtype)
    row_sum = gram.abs().sum(-1, keepdim=True, dtype=dtype).amax(-2, keepdim=True)
    return divisor(torch.minimum(frobenius, row_sum))


def unit_gram(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Gram matrix of a matrix scaled to largest entry 1, in float64.

    Args:
        x: `(..., out, in)`, floating point.

    Returns:
        `(a, a aᵀ, peak)` with `x = peak a`, a transposed where x is tall, `peak = max |x_ij|` (1 for a zero matrix).
    """
    wide = (x if x.shape[-2] <= x.shape[-1] else x.mT).double()
    peak = max_abs_or_one(wide)
    unit = wide / peak
    return unit, unit @ unit.mT, peak


def gram_is_below(gram: Tensor, limit: Tensor, columns: int) -> Tensor:
    """`is_below` for matrices given by their Gram matrices.

    The factor exists in floating point only if `(limit² - slack) I - gram + E` is positive semidefinite for an error E
    below `(m + 1) u` times the trace `m limit²`; the Gram matrix itself is off by `columns u` times its trace. The
    slack is twice the sum of both.

    Args:
        gram: `a aᵀ`, `(..., m, m)`, float64, with no entry of a above 1.
        limit: `(..., 1, 1)`, float64.
        columns: of a.

    Returns:
        `(...)`, bool.
    """
    m = gram.shape[-1]
    limit = limit.clamp(0, 2 * math.sqrt(m * columns))  # above sigma_max(a); an infinite limit would give NaN
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    slack = (m + columns + 8) * 2.0**-52 * (m * limit**2 + trace)
    proven: Tensor = torch.linalg.cholesky_ex(plus_diagonal_(-gram, (limit**2 - slack)[..., 0])).info == 0
    return proven & trace.isfinite()[..., 0, 0]


def plus_diagonal_(x: Tensor, value: float | Tensor) -> Tensor:
    """Matrices with a number, or `(..., 1)`, added to all entries of their diagonals, in place."""
    x.diagonal(dim1=-2, dim2=-1).add_(value)
    return x


def _gram(b: Tensor) -> Tensor:
    """`b bᵀ` of `(batch, m, n)`, summed over blocks of columns."""
    total = b.new_zeros(())
    for block in torch.split(b, BLOCK, -1):
        total = torch.bmm(block, block.mT).add_(total)
    return total
