"""Eigenvalues of very small symmetric matrices without asking the host whether they converged."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.linalg import device

SWEEPS = 8
"""How often every pair is turned: to rounding for up to 18 rows, whatever the spectrum (tests/laws/linalg)."""


def small_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`, which reads on the host whether it converged; elsewhere Jacobi's method, which need not.

    Cost: `8 n` rounds of about 30 operations on n x n matrices: for a few rows.

    Args:
        a: `(..., n, n)`, symmetric, float64.

    Returns:
        `(values, vectors)`, values ascending, vectors in columns.

    Source: parallel order of R. Brent and F. Luk, 1985: in n - 1 rounds everybody meets everybody once.

    >>> small_eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))[0]
    tensor([1., 3.], dtype=torch.float64)
    """
    return torch.linalg.eigh(a) if device.on_cpu(a) else jacobi(a)


def jacobi(a: Tensor) -> tuple[Tensor, Tensor]:
    """As `small_eigh`, by rotations alone."""
    n = a.shape[-1]
    odd = n % 2
    a = torch.nn.functional.pad(a, (0, odd, 0, odd))  # a row of zeros takes part, and is never rotated
    rows = torch.eye(n + odd, dtype=a.dtype, device=a.device).expand_as(a)  # `rows a0 rowsᵀ` is a
    for _ in range(SWEEPS * max(1, n + odd - 1)):
        half = a.shape[-1] // 2
        first, second, cross = (
            a.diagonal(0, -2, -1)[..., :half],
            a.diagonal(0, -2, -1)[..., half:],
            a.diagonal(half, -2, -1),
        )
        slope = (second - first) / (2 * torch.where(cross == 0, 1, cross))
        tangent = torch.where(slope < 0, -1.0, 1.0) / (slope.abs() + (1 + slope.square()).sqrt())
        tangent = torch.where(cross == 0, 0, tangent)[..., None]
        cosine = (1 + tangent.square()).rsqrt()
        rows = _turned(rows, cosine, tangent * cosine)
        a = _turned(_turned(a, cosine, tangent * cosine).mT, cosine, tangent * cosine)
    values = a.diagonal(0, -2, -1)
    values = torch.where(rows[..., n:].abs().sum(-1) > 0.5, -torch.inf, values)  # the padding, wherever it has got to
    values, order = values.sort(-1)
    return values[..., odd:], torch.take_along_dim(rows, order[..., None], -2)[..., odd:, :n].mT


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Row i of the upper half turned with row i of the lower half; then everybody but the first moves on by one."""
    top, low = x.chunk(2, -2)
    top, low = cosine * top - sine * low, sine * top + cosine * low
    return torch.cat(
        [top[..., :1, :], low[..., :1, :], top[..., 1:-1, :], low[..., 1:, :], top[..., 1:, :][..., -1:, :]], -2
    )
