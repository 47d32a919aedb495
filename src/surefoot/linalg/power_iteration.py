"""Leading singular triples kept from step to step: one power iteration a step, and the clip of what they see."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.linalg.bounds import full_precision, largest_entry
from surefoot.linalg.small_eigh import small_eigh

# Thin products are written row by row, `vᵀ xᵀ` and `uᵀ x`: on a CPU `x v` takes 4 times as long for 2 to 12 columns,
# `xᵀ u` up to 20 times. Householder QR of (768, 9) takes a quarter of Cholesky-QR's time there, and needs no shift.


def start(x: Tensor, k: int, seed: int = 0) -> Tensor:
    """The first `v` for `refine`: orthonormal pseudo-random columns, drawn on the CPU, hence the same on every device.

    Args:
        x: `(..., out, in)`, floating point; only its shape, dtype and device matter.
        k: number of columns >= 1; at most `in` are returned.
        seed: of the draw, which every matrix of the batch shares.

    Returns:
        `(..., in, min(k, in))`, float32 (float64 for float64).

    Raises:
        ValueError: k below 1.

    >>> start(torch.zeros(5, 3, 4), 2).shape
    torch.Size([5, 4, 2])
    """
    if k < 1:
        raise ValueError(f"start takes k >= 1 vectors, not {k}")
    generator = torch.Generator().manual_seed(seed)
    columns = x.shape[-1]
    v: Tensor = torch.linalg.qr(torch.randn(columns, min(k, columns), generator=generator, dtype=torch.float64)).Q
    v = v.to(x.device, torch.promote_types(x.dtype, torch.float32), non_blocking=True)  # or it would wait
    return v.expand(*x.shape[:-2], *v.shape).contiguous()


def refine(x: Tensor, v: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor]:
    """Better leading right singular vectors: `v <- orthonormal(xᵀ x v)`, then Rayleigh-Ritz on their span.

    Besides v a probe takes part, and the best k of the k + 1 are kept: the row of x with the largest part outside v,
    less its part in v. So a dominant direction orthogonal to v is found although `xᵀ x v` never leaves v's span:
    the row with the largest part contains at least `1/sqrt(out)` of it. No random numbers, no counter.

    Cost: three thin products and a QR of k + 1 columns, 1 to 3 % of an `msign` at 768 x 768 and at 768 x 3072, 6 to
    20 % at 24 x (128, 512), for k = 1 to 16.

    Args:
        x: `(..., out, in)`, floating point; half precision is computed in float32.
        v: `(..., in, k)`, orthonormal columns: the last call's for a similar x, or `start(x, k)`.
        iterations: power iterations >= 1.

    Returns:
        `(v, s)`: the Ritz vectors `(..., in, k)` and values `(..., k)`, largest first. x v has orthogonal columns of
        norm s; `s[..., i]` is at most the i-th singular value, to rounding (1e-6 sigma_max): a bound from BELOW. A
        zero matrix gives s = 0 and some orthonormal v.

    Raises:
        ValueError: no iteration.

    Source: subspace iteration, G. Golub and C. Van Loan, "Matrix Computations", 8.2; warm starts: "Beyond MuP 4".

    >>> x = torch.diag(torch.tensor([1.0, 5.0, 2.0]))
    >>> v, s = refine(x, start(x, 2), iterations=8)
    >>> s
    tensor([5., 2.])
    """
    if iterations < 1:
        raise ValueError(f"refine takes at least 1 iteration, not {iterations}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return v, v.new_zeros(*v.shape[:-2], v.shape[-1])
    peak = largest_entry(x).to(dtype)
    a = x.to(dtype) / peak
    rows = v.mT.to(dtype).contiguous()  # one layout, hence one order of summation, also after a resume
    with full_precision(x.device):
        images = rows @ a.mT  # (..., k, out)
        images = torch.cat([images, _probe(a, rows, images) @ a.mT], -2)
        for _ in range(iterations):
            rows = torch.linalg.qr((images @ a).mT).Q.mT
            images = rows @ a.mT
        values, turn = small_eigh((images @ images.mT).double())
        turn = turn.flip(-1)[..., : v.shape[-1]].to(dtype)
        s = values.flip(-1)[..., : v.shape[-1]].clamp_min(0).sqrt().to(dtype) * peak[..., 0]
        return (turn.mT @ rows).mT.contiguous(), s


def clip_leading(x: Tensor, v: Tensor, s: Tensor, threshold: float | Tensor) -> Tensor:
    """`x - sum_i (s_i - t)_+ u_i v_iᵀ`: the singular values that v sees clipped at t, all others left alone.

    Exact on v's span, and only there: what v has not found stays as it is. **It bounds less than `mclip`**: pulled
    persistently in more directions than v has columns, the norm settles above t.

    Args:
        x: `(..., out, in)`, floating point.
        v: `(..., in, k)` and
        s: `(..., k)`, as `refine` returned them for this x.
        threshold: t, a number or a tensor that broadcasts against x (`(..., 1, 1)`).

    Returns:
        A new tensor of x's shape and dtype; x bit for bit where every `s_i <= t`.

    >>> x = torch.diag(torch.tensor([1.0, 5.0, 2.0]))
    >>> clip_leading(x, *refine(x, start(x, 1), iterations=9), 3.0).diagonal()
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
