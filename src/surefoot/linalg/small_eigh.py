"""Eigenvalues of very small matrices on an accelerator without synchronisation, and of batches with a NaN in them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.linalg.bounds import divisor

SWEEPS = 8
"""How often every pair of indices is rotated: accurate to rounding for up to 18 rows on every spectrum in
tests/laws/linalg."""


def finite_only(decompose: Callable[[Tensor], Any], a: Tensor) -> Any:
    """Decompose the finite matrices of a batch even where LAPACK fails on others, whose results are then NaN.

    LAPACK fails on most matrices that are not finite, and then on the whole batch. No cost where it does not fail.

    Args:
        decompose: eigh, eigvalsh or svdvals of `torch.linalg`.
        a: `(..., m, n)`.

    Returns:
        What `decompose` returns.

    Raises:
        torch.linalg.LinAlgError: `decompose` fails on a finite matrix.

    >>> finite_only(torch.linalg.eigvalsh, torch.stack([torch.eye(2), torch.full((2, 2), torch.nan)]))
    tensor([[1., 1.],
            [nan, nan]])
    """
    try:
        return decompose(a)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        bad = ~a.isfinite().all(-1).all(-1)
        if not bool(bad.any()):
            raise
    found = decompose(torch.where(bad[..., None, None], 0, a))
    if isinstance(found, Tensor):
        return torch.where(bad[..., None], torch.nan, found)
    return [torch.where(bad[(..., *(None,) * (x.ndim - bad.ndim))], torch.nan, x) for x in found]


def small_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors: on a CPU by `torch.linalg.eigh`, elsewhere by `jacobi`.

    `torch.linalg.eigh` on an accelerator synchronises: the host reads whether it converged.

    Cost of `jacobi`: `8 n` rounds of about 30 operations on n x n matrices: for a few rows.

    Args:
        a: `(..., n, n)`, symmetric, float64.

    Returns:
        `(values, vectors)`, values ascending, vectors in columns.

    >>> small_eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))[0]
    tensor([1., 3.], dtype=torch.float64)
    """
    values, vectors = finite_only(torch.linalg.eigh, a) if device.on_cpu(a) else jacobi(a)
    return values, vectors


def jacobi(a: Tensor) -> tuple[Tensor, Tensor]:
    """`small_eigh` by Jacobi's method: a fixed number of rotations, without branches on values.

    Round-robin ordering: each sweep of n - 1 rounds rotates every index pair once.

    Args:
        a: `(..., n, n)`, symmetric, float64.

    Returns:
        `(values, vectors)`, values ascending, vectors in columns.

    Source: parallel ordering of R. Brent and F. Luk, 1985.
    """
    n = a.shape[-1]
    odd = n % 2
    a = torch.nn.functional.pad(a, (0, odd, 0, odd))  # an odd n gets a row of zeros, whose rotation angle is 0
    rows = torch.eye(n + odd, dtype=a.dtype, device=a.device).expand_as(a)  # `rows a0 rowsᵀ = a`, a0 the initial a
    for _ in range(SWEEPS * max(1, n + odd - 1)):
        first, second = a.diagonal(0, -2, -1).chunk(2, -1)
        cross = a.diagonal(a.shape[-1] // 2, -2, -1)
        slope = (second - first) / (2 * divisor(cross))
        tangent = torch.where(slope < 0, -1.0, 1.0) / (slope.abs() + (1 + slope.square()).sqrt())
        tangent = torch.where(cross == 0, 0, tangent)[..., None]
        cosine = (1 + tangent.square()).rsqrt()
        rows = _rotated(rows, cosine, tangent * cosine)
        a = _rotated(_rotated(a, cosine, tangent * cosine).mT, cosine, tangent * cosine)
    values = a.diagonal(0, -2, -1)
    values = torch.where(rows[..., n:].abs().sum(-1) > 0.5, -torch.inf, values)  # the padding row sorts first
    values, order = values.sort(-1)
    return values[..., odd:], torch.take_along_dim(rows, order[..., None], -2)[..., odd:, :n].mT


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Row i of the upper half rotated with row i of the lower half; then all rows but the first move on by one."""
    top, low = x.chunk(2, -2)
    top, low = cosine * top - sine * low, sine * top + cosine * low
    rows = top[..., :1, :], low[..., :1, :], top[..., 1:-1, :], low[..., 1:, :], top[..., 1:, :][..., -1:, :]
    return torch.cat(rows, -2)
