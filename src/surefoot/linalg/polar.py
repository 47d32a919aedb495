"""`msign`: the orthogonal factor of a matrix, by several methods over one set of ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.linalg import coefficients, device
from surefoot.linalg.backend import choose_ops
from surefoot.linalg.bounds import full_precision
from surefoot.linalg.coefficients import Quintic
from surefoot.linalg.ops import Ops
from surefoot.linalg.polar_float16 import express

EXPRESS = coefficients.polar_express(closing=2)
FAST_QDWH = coefficients.qdwh(lowest=1e-3, steps=2)
EXACT_QDWH = coefficients.qdwh(lowest=1e-4, steps=3)

SAFE = 1e-7
"""Frobenius norms between this and its inverse have Gram matrices whose norms float32 can sum up."""

FEWEST, SMALL, LONGEST = 32, 128, 2048
"""Rows, and length of a row, for which one Gram matrix in float32 is enough. More cost most where matrices are wide;
few long rows with a large mean overstep (1.15 at 2 x 32768)."""

ROUNDING = 0.998
"""Takes back what float32 adds to the largest singular value where there is one Gram matrix only: at most 1.3e-3, on
spectra of two values."""


def msign(x: Tensor, method: str = "auto") -> Tensor:
    """The matrix sign `U Vᵀ` of the thin SVD `x = U S Vᵀ`: every singular value becomes 1.

    It solves `max <x, o>` over `sigma_max(o) <= 1`. Singular values that are 0 stay 0 in exact arithmetic, and
    `msign(c x) = msign(x)` for every `c > 0` that keeps `x` representable (no additive epsilon anywhere).

    | method | largest singular value (float32) | singular values >= 0.01 sigma_max are within | cost |
    |---|---|---|---|
    | `svd` | 1 + 1e-5 | 1e-5 of 1 | the oracle, slowest |
    | `newton_schulz` | 1.22 | 0.4 of 1 | 5 steps of 3 products |
    | `polar_express` | 1 + 5e-4 | 1e-3 of 1 | 8 steps of 3 products |
    | `gram` | 1 + 5e-4 | 1e-3 of 1 | as above on the Gram matrix: for matrices twice as wide as tall |
    | `half` | 1 + 5e-4 | 0.1 of 1 | 5 steps of at most 3 products in float16 |
    | `qdwh` | 1 + 1e-4 | 1e-3 of 1 | 3 Cholesky steps |
    | `qdwh2` | 1 + 5e-4 | 0.05 of 1 | 2 Cholesky steps |
    | `halley` | 1 + 5e-4 | 0.03 of 1 | 1 Gram matrix, 1 Cholesky inverse, 4 small products, 1 product: up to 128 rows |
    | `zolotarev` | 1 + 5e-4 | 0.07 of 1 | 1 Gram matrix, 3 Cholesky inverses, 1 product: for wide or tall matrices |

    Judged by the alignment `<o, x> / (|o|_2 |x|_*)`, `qdwh2` keeps .96 where the singular values' sum lies above
    1e-3 sigma_max (Gaussian .99, 1/i .98, i**-1.5 .97), `qdwh` and the iterations .998; `zolotarev`, which takes 2/3 of
    the time where n = 4m, has .98 on a Gaussian, .96 to .97 on momenta of a small GPT, and .79 where one singular value
    is 768 times the others: it is there to be asked for. `halley`, in 3/4 of the time on 128 x 512, has .97 or more on
    all of these with 128 rows, and .75 on the spike with 768; with a few rows of 4096 entries and more it may overstep.

    `auto` takes, on a CPU, `halley` for 32 to 128 rows of at least twice that length and at most 2048, and `qdwh2` for
    all else; the exact `qdwh` in float64; and `half` on an accelerator. Their cost is in `docs/decisions/0007`. Half
    precision is computed in float32 on a CPU; on an accelerator the other iterations run it in bfloat16, for which the
    table's figures have not been measured. Autocast and TF32 are off inside; in bfloat16 `gram` can diverge on
    heavy-tailed spectra (1/i), where `polar_express` does not. `half` is float16 inside, on every device.

    Args:
        x: `(..., out, in)`, floating point; the leading dimensions are a batch.
        method: a name of the table, or `auto`.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: an unknown method, fewer than two dimensions, or a dtype that is not real floating point.

    >>> o = msign(torch.tensor([[3.0, 0.0], [0.0, -2.0]]), method="svd")
    >>> o.tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"msign takes real (..., out, in) matrices, not shape {tuple(x.shape)} of {x.dtype}")
    require_method(method)
    if x.numel() == 0:
        return torch.zeros_like(x)
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    name = choose(wide) if method == "auto" else method
    batch = _in_range(wide.reshape(-1, *wide.shape[-2:]).to(_compute_dtype(x, name)))
    with full_precision(x.device):
        sign = METHODS[name](batch, choose_ops(batch)).reshape(wide.shape).to(x.dtype)
    return sign if wide is x else sign.mT


def require_method(method: str) -> None:
    """Raise ValueError, listing the methods, unless this is one."""
    if method != "auto" and method not in METHODS:
        raise ValueError(f"unknown msign method {method!r}; choose auto or one of {', '.join(METHODS)}")


def choose(x: Tensor) -> str:
    """The method that `auto` takes for wide matrices `(..., m, n)`, `m <= n`."""
    if x.dtype == torch.float64:
        return "qdwh"
    if x.device.type != "cpu":
        return "half"
    rows, length = x.shape[-2:]
    return "halley" if FEWEST <= rows <= SMALL and 2 * rows <= length <= LONGEST else "qdwh2"


def _compute_dtype(x: Tensor, method: str) -> torch.dtype:
    if x.dtype in (torch.float32, torch.float64):
        return x.dtype
    iterates = method in ("newton_schulz", "polar_express", "gram")
    return torch.bfloat16 if iterates and x.device.type != "cpu" else torch.float32


def _in_range(x: Tensor) -> Tensor:
    """Matrices whose squares of squares neither overflow nor vanish: x itself where the host sees that its do not."""
    if not device.may_branch(x):
        return _over_peak(x)
    size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    safe = (size > SAFE) & (size < 1 / SAFE)
    return x if bool(safe.all()) else torch.where(safe, x, _over_peak(x))


def _over_peak(x: Tensor) -> Tensor:
    """Each matrix over its largest entry; zero stays zero."""
    peak = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    return x / torch.where(peak == 0, 1, peak)


def _squared_norm_bound(gram: Tensor) -> Tensor:
    """`sigma_max² <= min(|A|_F, max_i sum_j |A_ij|)` for `A = x xᵀ`, `(b, 1, 1)`; 1 for a zero matrix."""
    frobenius = torch.linalg.matrix_norm(gram, keepdim=True)
    row_sum = gram.abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    bound = torch.minimum(frobenius, row_sum)
    return torch.where(bound == 0, 1, bound)


def _svd(x: Tensor, ops: Ops) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    rank = s > s[..., :1] * (max(x.shape[-2:]) * torch.finfo(x.dtype).eps)
    return ops.apply(u * rank[..., None, :], vh)


def _iterate(x: Tensor, ops: Ops, steps: tuple[Quintic, ...]) -> Tensor:
    """`x <- a x + (b A + c A²) x` with `A = x xᵀ`, on x itself."""
    gram = ops.gram(x)
    bound = _squared_norm_bound(gram)
    x, gram = x / bound.sqrt(), gram / bound
    for index, (a, b, c) in enumerate(steps):
        if index:
            gram = ops.gram(x)
        x = a * x + ops.apply(ops.quadratic(gram, b, c), x)
    return x


def _iterate_gram(x: Tensor, ops: Ops, steps: tuple[Quintic, ...]) -> Tensor:
    """The same steps on the small Gram matrix; restarted from x in the middle.

    Rounding makes the Gram matrix's smallest eigenvalues negative, and the steps amplify them: after four
    steps the product is applied to x and a fresh Gram matrix, now well conditioned, is taken.
    """
    for start in range(0, len(steps), 4):
        gram = ops.gram(x)
        bound = _squared_norm_bound(gram) if start == 0 else gram.new_ones(1, 1, 1)
        gram = gram / bound
        factor = bound.rsqrt() * torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device).expand_as(gram)
        for a, b, c in steps[start : start + 4]:
            polynomial = ops.quadratic(gram, b, c)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = ops.product(polynomial, factor)
            gram = ops.product(ops.product(polynomial, gram), polynomial)
        x = ops.apply(factor, x)
    return x


def _qdwh(x: Tensor, ops: Ops, weights: tuple[Quintic, ...]) -> Tensor:
    """Weighted Halley steps `x <- (a + b A)(1 + c A)⁻¹ x` with `A = x xᵀ`.

    The factor equals `b/c + (a/c - b/c²) (A + 1/c)⁻¹`: one Cholesky inverse. Each step takes its Gram matrix from x
    anew, since rounding hides singular values below 1e-3 in it: the first step only has to lift them.
    """
    for index, (a, b, c) in enumerate(weights):
        gram = ops.gram(x)
        bound = gram.new_ones(1, 1, 1) if index else _squared_norm_bound(gram)
        gram.diagonal(dim1=-2, dim2=-1).add_((bound / c)[..., 0])
        factor = ops.inverse(gram).mul_((a / c - b / c**2) * bound.sqrt())
        factor.diagonal(dim1=-2, dim2=-1).add_((b / c * bound.rsqrt())[..., 0])
        x = ops.apply(factor, x)
    return x


def _halley(x: Tensor, ops: Ops, first: Quintic, closing: tuple[float, ...]) -> Tensor:
    """One Halley step and a polynomial of degree 9, on one Gram matrix `A = x xᵀ`: with `R = (1 + c A)⁻¹` the step's
    factor is `F = b/c + (a - b/c) R`, the next Gram matrix `B = F A F` is `R²` and multiples of A, R and 1, the
    polynomial's factor is `p0 + p1 B + B² (p2 + p3 B + p4 B²)`, and x is read twice.
    """
    gram = ops.gram(x)
    bound = _squared_norm_bound(gram)
    a, b, c = first
    low, high = b / c, a - b / c
    shifted = gram * (c / bound)
    shifted.diagonal(dim1=-2, dim2=-1).add_(1)
    inverse = ops.inverse(shifted)
    lifted = ops.quadratic(inverse, high / c * (high - 2 * low), -high * high / c).addcmul_(gram, low * low / bound)
    lifted.diagonal(dim1=-2, dim2=-1).add_(2 * low * high / c)
    p0, p1, p2, p3, p4 = closing
    square = ops.product(lifted, lifted)
    inner = torch.add(square, lifted, alpha=p3 / p4)
    inner.diagonal(dim1=-2, dim2=-1).add_(p2 / p4)
    polynomial = ops.product(square, inner).add_(lifted, alpha=p1 / p4)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(p0 / p4)
    factor = inverse.mul_(high)
    factor.diagonal(dim1=-2, dim2=-1).add_(low)
    return ops.apply(ops.product(polynomial, factor).mul_(ROUNDING * p4 * bound.rsqrt()), x)


def _zolotarev(x: Tensor, ops: Ops, scale: float, parts: tuple[tuple[float, float], ...]) -> Tensor:
    """`x <- c (1 + sum_i r_i (A + p_i)⁻¹) x` with `A = x xᵀ`: one Gram matrix, one product, an inverse per part."""
    gram = ops.gram(x)
    bound = _squared_norm_bound(gram)
    factor = torch.zeros_like(gram)
    for pole, residue in parts:
        shifted = gram / (bound * pole)
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        factor.add_(ops.inverse(shifted), alpha=residue / pole)
    factor.diagonal(dim1=-2, dim2=-1).add_(1)
    return ops.apply(factor.mul_(scale * bound.rsqrt()), x)


METHODS: dict[str, Callable[[Tensor, Ops], Tensor]] = {
    "svd": _svd,
    "newton_schulz": lambda x, ops: _iterate(x, ops, coefficients.NEWTON_SCHULZ),
    "polar_express": lambda x, ops: _iterate(x, ops, EXPRESS),
    "gram": lambda x, ops: _iterate_gram(x, ops, EXPRESS),
    "half": lambda x, ops: express(_over_peak(x), ops, _squared_norm_bound),
    "qdwh": lambda x, ops: _qdwh(x, ops, EXACT_QDWH),
    "qdwh2": lambda x, ops: _qdwh(x, ops, FAST_QDWH),
    "halley": lambda x, ops: _halley(x, ops, *coefficients.HALLEY),
    "zolotarev": lambda x, ops: _zolotarev(x, ops, ROUNDING * coefficients.ZOLOTAREV[0], coefficients.ZOLOTAREV[1]),
}
