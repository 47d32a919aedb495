"""Leading singular triples by power iteration that starts from the previous step's vectors, and a clip by them."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.linalg.matmul_precision import full_precision
from surefoot.linalg.max_abs import max_abs_or_one
from surefoot.linalg.small_eigh import small_eigh

# Thin products are written row by row, `vᵀ xᵀ` and `uᵀ x`: on a CPU `x v` takes 4 times as long for 2 to 12 columns,
# `xᵀ u` up to 20 times. Householder QR of (768, 9) takes a quarter of Cholesky-QR's time there, and needs no shift.


def random_vectors(x: Tensor, k: int, seed: int = 0) -> Tensor:
    """Pseudo-random orthonormal columns to start `power_iteration` from, drawn on the CPU: the same on every device.

    Args:
        x: `(..., out, in)`, floating point; only its shape, dtype and device matter.
        k: number of columns >= 1; at most `in` are returned.
        seed: of the random generator; all matrices of the batch get the same columns.

    Returns:
        `(..., in, min(k, in))`, float32 (float64 for float64).

    Raises:
        ValueError: k below 1.

    >>> random_vectors(torch.zeros(5, 3, 4), 2).shape
    torch.Size([5, 4, 2])
    """
    if k < 1:
        raise ValueError(f"random_vectors takes k >= 1, not {k}")
    generator = torch.Generator().manual_seed(seed)
    columns = x.shape[-1]
    v: Tensor = torch.linalg.qr(torch.randn(columns, min(k, columns), generator=generator, dtype=torch.float64)).Q
    dtype = torch.promote_types(x.dtype, torch.float32)
    v = v.to(x.device, dtype, non_blocking=True)  # a blocking copy would synchronise
    return v.expand(*x.shape[:-2], *v.shape).contiguous()


def power_iteration(x: Tensor, v: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor]:
    """Estimates of the leading right singular vectors: `v <- orthonormal(xᵀ x v)`, then Rayleigh-Ritz on their span.

    The iteration runs on k + 1 vectors, of which the best k are returned: v, and the part orthogonal to v of that row
    of x in which this part is largest. So a dominant direction orthogonal to v is detected, although `xᵀ x v` never
    leaves v's span: that row contains at least `1/sqrt(out)` of it. Deterministic: no random numbers.

    Cost: three thin products and a QR of k + 1 columns, 1 to 3 % of an `msign` at 768 x 768 and at 768 x 3072, 6 to
    20 % at 24 x (128, 512), for k = 1 to 16.

    Args:
        x: `(..., out, in)`, floating point; half precision is computed in float32.
        v: `(..., in, k)`, orthonormal columns: the result for a similar x, or `random_vectors(x, k)`.
        iterations: number of iterations >= 1.

    Returns:
        `(v, s)`: the Ritz vectors `(..., in, k)` and values `(..., k)`, largest first. `x v` has orthogonal columns of
        norm s; `s[..., i]` is a LOWER bound on the i-th singular value, to rounding (1e-6 sigma_max). A zero matrix
        gives s = 0 and some orthonormal v.

    Raises:
        ValueError: fewer than one iteration.

    Source: subspace iteration, G. Golub and C. Van Loan, "Matrix Computations", 8.2; warm starts: "Beyond MuP 4".

    >>> x = torch.diag(torch.tensor([1.0, 5.0, 2.0]))
    >>> v, s = power_iteration(x, random_vectors(x, 2), iterations=8)
    >>> s
    tensor([5., 2.])
    """
    if iterations < 1:
        raise ValueError(f"power_iteration takes at least 1 iteration, not {iterations}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return v, v.new_zeros(*v.shape[:-2], v.shape[-1])
    peak = max_abs_or_one(x).to(dtype)
    a = x.to(dtype) / peak
    rows = v.mT.to(dtype).contiguous()  # one layout, hence one order of summation, also after a checkpoint is loaded
    with full_precision(x.device):
        images = rows @ a.mT  # (..., k, out)
        images = torch.cat([images, _probe(a, rows, images) @ a.mT], -2)
        for _ in range(iterations):
            rows = torch.linalg.qr((images @ a).mT).Q.mT
            images = rows @ a.mT
        values, ritz = small_eigh((images @ images.mT).double())
        ritz = ritz.flip(-1)[..., : v.shape[-1]].to(dtype)
        s = values.flip(-1)[..., : v.shape[-1]].clamp_min(0).sqrt().to(dtype) * peak[..., 0]
        return (ritz.mT @ rows).mT.contiguous(), s


def clip_leading(x: Tensor, v: Tensor, s: Tensor, threshold: float | Tensor) -> Tensor:
    """`x - sum_i (s_i - t)_+ u_i v_iᵀ`: the singular values of the directions in v clipped at t, all others unchanged.

    Exact on v's span, and only there. **It bounds less than `mclip`**: if updates grow more directions than v has
    columns, at every step, the norm settles above t.

    Args:
        x: `(..., out, in)`, floating point.
        v: `(..., in, k)`, Ritz vectors.
        s: `(..., k)`, Ritz values; both as `power_iteration` returned them for this x.
        threshold: t, a number or a tensor that broadcasts against x (`(..., 1, 1)`).

    Returns:
        A new tensor of x's shape and dtype; x bit for bit where every `s_i <= t`.

    >>> x = torch.diag(torch.tensor([1.0, 5.0, 2.0]))
    >>> clip_leading(x, *power_iteration(x, random_vectors(x, 1), iterations=9), 3.0).diagonal()
    tensor([1., 3., 2.])
    """
    s = s[..., None, :]
    share = torch.where(s > threshold, 1 - threshold / s, 0)
    with full_precision(x.device):
        rows = v.mT.contiguous()
        images = rows @ x.mT.to(v.dtype)
        excess = (images.mT * share) @ rows
    return (x - excess.add_(0.0)).to(x.dtype)  # x - 0 is x bit for bit; x - (-0) is not where x is -0


def _probe(a: Tensor, rows: Tensor, images: Tensor) -> Tensor:
    """The row of a with the largest part orthogonal to v, less its part in v, `(..., 1, in)`, normalised or zero."""
    outside = torch.linalg.vector_norm(a, dim=-1).square() - images.square().sum(-2)
    index = outside.argmax(-1)[..., None, None]
    probe = torch.take_along_dim(a, index, -2) - torch.take_along_dim(images, index, -1).mT @ rows
    norm = torch.linalg.vector_norm(probe, dim=-1, keepdim=True)
    return probe / torch.where(norm == 0, 1, norm)
