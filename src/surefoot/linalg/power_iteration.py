"""Power iteration that starts from the previous step's vectors: leading singular triples, a clip, a matrix sign."""

import torch
from torch import Tensor

from surefoot.linalg.bounds import divisor, max_abs_or_one, plus_diagonal_
from surefoot.linalg.device import full_precision, widened
from surefoot.linalg.small_eigh import small_eigh

# Thin products are written row by row, `vᵀ xᵀ` and `uᵀ x`: on a CPU `x v` takes 4 times as long for 2 to 12 columns,
# `xᵀ u` up to 20 times. Householder QR of (768, 9) takes a quarter of Cholesky-QR's time there, and needs no shift; of
# (768, 768) as much, of (3072, 768) twice as much.


def random_vectors(x: Tensor, k: int, seed: int = 0) -> Tensor:
    """Pseudo-random orthonormal columns to start `power_iteration` from, drawn on the CPU: the same on every device.

    Args:
        x: `(..., out, in)`, floating point; only its shape, dtype and device matter.
        k: number of columns >= 1; at most `in` are returned.
        seed: of the random generator; all matrices of the batch get the same columns.

    Returns:
        `(..., in, min(k, in))`, float32 (float64 for float64).

    >>> random_vectors(torch.zeros(5, 3, 4), 2).shape
    torch.Size([5, 4, 2])
    """
    assert k >= 1, k
    generator = torch.Generator().manual_seed(seed)
    columns = x.shape[-1]
    normal = torch.randn(columns, min(k, columns), generator=generator, dtype=torch.float64, device="cpu")
    v: Tensor = torch.linalg.qr(normal).Q
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

    Source: subspace iteration, G. Golub and C. Van Loan, "Matrix Computations", 8.2; warm starts: "Beyond MuP 4".

    >>> x = torch.diag(torch.tensor([1.0, 5.0, 2.0]))
    >>> v, s = power_iteration(x, random_vectors(x, 2), iterations=8)
    >>> s
    tensor([5., 2.])
    """
    assert iterations >= 1, iterations
    if x.numel() == 0:
        return v, v.new_zeros(*v.shape[:-2], v.shape[-1])
    a, peak = _unit_peak(x)
    dtype = a.dtype
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


def streaming_msign(x: Tensor, basis: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor]:
    """The matrix sign `U Vᵀ` by power iteration on all right singular vectors, from those of a similar matrix.

    On x's smaller side k (x wide is transposed): `U <- orthonormal(x V)`, `V <- orthonormal(xᵀ U)`, which together are
    `V <- orthonormal(xᵀ x V)`; the result is `U Vᵀ`. The first is column norms and a Cholesky factor of the normalised
    Gram matrix plus `4 k eps`, by which no rounding makes a singular value exceed 1, and columns that vanish stay 0;
    the second is Householder's QR, so that V is orthonormal whatever x is.

    The published form stops at column norms: its largest singular value is 1.3 to 2.3 on gradients: columns of `x V`
    are orthogonal only for converged V. Scale-free: `streaming_msign(c x, V)` is the same for all representable `c x`.

    Cost of an iteration: two products with x, one of its Gram matrices, a Cholesky factor, a triangular solve and a QR
    of k x k; at the end one product more. State: k x k numbers a matrix.

    Args:
        x: `(..., out, in)`, floating point; half precision is computed in float32.
        basis: V, `(..., k, k)`, orthogonal: the result for a similar x, or at first the identity.
        iterations: number of iterations >= 1.

    Returns:
        `(direction, basis)`: of x's shape and dtype, largest singular value at most 1 + 1e-4; and the improved V. A
        zero matrix gives zeros and keeps its basis. The error depends on how far x has turned: docs/performance.md.

    Source: "Streaming Power Iteration for Muon", cited in "Beyond MuP 4"; orthonormal columns are ours.

    >>> x, basis = torch.tensor([[3.0, 1.0], [0.0, -2.0]]), torch.eye(2)
    >>> for _ in range(30):
    ...     d, basis = streaming_msign(x, basis)
    >>> torch.allclose(d, torch.linalg.svd(x).U @ torch.linalg.svd(x).Vh, atol=1e-4)
    True
    """
    assert iterations >= 1, iterations
    if x.numel() == 0:
        return torch.zeros_like(x), basis
    tall = x.shape[-2] > x.shape[-1]
    a, _ = _unit_peak(x if tall else x.mT)
    rows = basis.mT.to(a.dtype).contiguous()
    with full_precision(x.device):
        for _ in range(iterations):
            left = _orthonormal_rows(rows @ a.mT)
            q, r = torch.linalg.qr((left @ a).mT)
            rows = (q * torch.where(r.diagonal(0, -2, -1) < 0, -1.0, 1.0)[..., None, :]).mT
        d = left.mT @ rows if tall else rows.mT @ left
    zero = (x == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    return d.to(x.dtype), torch.where(zero, basis, rows.mT)


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


def _unit_peak(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with largest entry 1 (or 0), in float32 or float64, and the divisor."""
    a = widened(x)
    peak = max_abs_or_one(a)
    return a / peak, peak


def _orthonormal_rows(y: Tensor) -> Tensor:
    """Rows `(..., k, n)`, k <= n, orthonormalised in their order, no singular value above 1; rows that vanish are 0.

    With `C + s = L Lᵀ`, C the Gram matrix of the normalised rows u, `L⁻¹ u` has the Gram matrix `1 - s (L Lᵀ)⁻¹`. Where
    rounding leaves no such factor the rows are divided by sqrt(k), which bounds their largest singular value.
    """
    k, eps = y.shape[-2], torch.finfo(y.dtype).eps
    norms = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    there = norms > 4 * eps * y.shape[-1] ** 0.5 * norms.amax(-2, keepdim=True)  # less is rounding
    u = torch.where(there, y / torch.where(there, norms, 1), 0)
    factor, info = torch.linalg.cholesky_ex(plus_diagonal_(u @ u.mT, 4 * k * eps))
    coarse = (k**0.5 * torch.eye(k, dtype=y.dtype, device=y.device)).expand_as(factor)
    factor = torch.where((info == 0)[..., None, None], factor, coarse)
    # a third faster by columns than by u's rows
    columns: Tensor = torch.linalg.solve_triangular(factor.mT, u.mT, upper=True, left=False)
    return columns.mT


def _probe(a: Tensor, rows: Tensor, images: Tensor) -> Tensor:
    """The row of a with the largest part orthogonal to v, less its part in v, `(..., 1, in)`, normalised or zero."""
    outside = torch.linalg.vector_norm(a, dim=-1).square() - images.square().sum(-2)
    index = outside.argmax(-1)[..., None, None]
    probe = torch.take_along_dim(a, index, -2) - torch.take_along_dim(images, index, -1).mT @ rows
    return probe / divisor(torch.linalg.vector_norm(probe, dim=-1, keepdim=True))
