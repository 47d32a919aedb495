"""`msign`: the orthogonal factor of a matrix, by several methods over one set of ops."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from surefoot.linalg import coefficients, onednn_ops
from surefoot.linalg.bounds import max_abs_or_one, plus_diagonal_, squared_norm_bound
from surefoot.linalg.coefficients import Quintic
from surefoot.linalg.device import full_precision, is_plain, may_branch
from surefoot.linalg.ops import TORCH, Ops

Iteration = Callable[[Tensor, Ops], Tensor]
"""A method of `msign`: wide matrices `(b, m, n)`, `m <= n`, to their matrix signs, by the products of an `Ops`."""

SAFE = 1e-7
"""Frobenius norms between this and its inverse have Gram matrices whose norms float32 can represent."""

HALLEY_ROWS, HALLEY_COLUMNS = (32, 128), 2048
"""Fewest and most rows, and most columns, for which one Gram matrix in float32 is accurate enough. More rows cost most
where matrices are wide; few long rows with a large mean exceed norm 1 (1.15 at 2 x 32768)."""

IN_BFLOAT16 = ("newton_schulz", "polar_express", "gram")
"""Methods that multiply half precision in bfloat16 on an accelerator; the others do in float32, or as they say."""

WIDE = 1.5
"""Width over height from which the steps are taken on the Gram matrix: at 24 m³ multiplications against 27 on x."""


def msign(x: Tensor, method: str = "auto") -> Tensor:
    """The matrix sign `U Vᵀ` of the thin SVD `x = U S Vᵀ`: every singular value becomes 1.

    It solves `max <x, o>` over `sigma_max(o) <= 1`; 0 stays 0 in exact arithmetic; `msign(c x) = msign(x)` for c > 0.

    | method | largest singular value (float32) | singular values >= 0.01 sigma_max are within | cost |
    |---|---|---|---|
    | `svd` | 1 + 1e-5 | 1e-5 of 1 | the reference, slowest |
    | `newton_schulz` | 1.22 | 0.4 of 1 | 5 steps of 3 products |
    | `polar_express` | 1 + 5e-4 | 1e-3 of 1 | 8 steps of 3 products |
    | `gram` | 1 + 5e-4 | 1e-3 of 1 | as above on the Gram matrix: for matrices twice as wide as tall |
    | `polar_express_fp16` | 1 + 5e-4 | 0.13 of 1 | 5 steps of at most 3 products in float16, on every device |
    | `qdwh` | 1 + 1e-4 | 1e-3 of 1 | 3 weighted Halley steps, a Cholesky inverse each |
    | `qdwh_2` | 1 + 5e-4 | 0.05 of 1 | 2 of them |
    | `qdwh_2_bf16` | 1 + 5e-4 | 0.06 of 1 | as above, 2 of 4 products with x in bfloat16 |
    | `halley` | 1 + 5e-4 | 0.03 of 1 | 1 Gram matrix, 1 Cholesky inverse, 5 products: for up to 128 rows |

    `auto` takes `polar_express` if gradients of the sign are needed, as the others write in place; else `qdwh` in
    float64, `polar_express_fp16` on an accelerator; on a CPU `halley` for 32 to 128 rows of at least twice that length
    and at most 2048, else `qdwh_2`, with bfloat16 from 192 rows on where that is fast. On gradients the alignment
    `<o, x> / (|o|_2 |x|_*)` is about .98. Half precision is computed in float32 on a CPU, on an accelerator in bfloat16
    by `newton_schulz`, `polar_express` and `gram`; there `gram` can diverge on singular values 1/i. Results in half
    precision are rounded: .003 more in our tests, at most 2**-8 (float16: 2**-11) of their Frobenius norm.

    Args:
        x: `(..., out, in)`, floating point; the leading dimensions are a batch.
        method: a name of the table, or `auto`.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: an unknown method, fewer than two dimensions, or a dtype that is not real floating point.

    >>> msign(torch.tensor([[3.0, 0.0], [0.0, -2.0]]), method="svd").tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    require_matrices(x, "msign")
    require_method(method)
    name = choose(x) if method == "auto" else method
    if x.numel() == 0:
        return torch.zeros_like(x)
    short = torch.bfloat16 if x.device.type != "cpu" and name in IN_BFLOAT16 else torch.float32
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    precise = wide.to(x.dtype if x.dtype in (torch.float32, torch.float64) else short)
    batch = precise.reshape(-1, *wide.shape[-2:])
    batch = batch if name == "polar_express_fp16" else _in_range(batch)  # which scales x itself
    with full_precision(x.device):
        sign = METHODS[name](batch, choose_ops(batch)).reshape(wide.shape).to(x.dtype)
    return sign if wide is x else sign.mT


def require_matrices(x: Tensor, function: str) -> None:
    """Raise ValueError for what is no real matrix, or batch of them."""
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"{function} takes real (..., out, in) matrices, not shape {tuple(x.shape)} of {x.dtype}")


def require_method(method: str) -> None:
    """Raise ValueError, listing the methods of `msign`, unless `method` is one of them."""
    if method != "auto" and method not in METHODS:
        known = f"choose auto or one of {', '.join(METHODS)}; streaming is the geometry surefoot.StreamingSpectral()"
        raise ValueError(f"unknown msign method {method!r}: {known}")


def choose_ops(x: Tensor) -> Ops:
    """oneDNN's products on a CPU where they are much faster; otherwise torch's.

    Args:
        x: `(b, m, n)`, m <= n, on the device on which it will be multiplied.

    Returns:
        `ONEDNN` or `TORCH`.
    """
    fast = _is_large_on_a_cpu(x, onednn_ops.MIN_ROWS) and onednn_ops.is_fast("onednn")
    return onednn_ops.ONEDNN if fast else TORCH


def _is_large_on_a_cpu(x: Tensor, rows: int) -> bool:
    differentiated = x.requires_grad and torch.is_grad_enabled()
    return x.dtype != torch.float64 and min(x.shape[-2:]) >= rows and is_plain(x) and not differentiated


def choose(x: Tensor) -> str:
    """The name of the method that `auto` takes for matrices `(..., out, in)`, by dtype, device and shape."""
    if x.requires_grad and torch.is_grad_enabled():
        return "polar_express"  # the others write in place
    if x.dtype == torch.float64:
        return "qdwh"
    if x.device.type != "cpu":
        return "polar_express_fp16"
    if _is_large_on_a_cpu(x, onednn_ops.BFLOAT16_MIN_ROWS) and onednn_ops.is_fast("bfloat16"):
        return "qdwh_2_bf16"
    rows, length = sorted(x.shape[-2:])
    return "halley" if HALLEY_ROWS[0] <= rows <= HALLEY_ROWS[1] and 2 * rows <= length <= HALLEY_COLUMNS else "qdwh_2"


def _in_range(x: Tensor) -> Tensor:
    """Matrices scaled so that fourth powers of their norms neither overflow nor vanish; those in range are unchanged
    on a CPU, where that can be read; elsewhere all are scaled to largest entry 1.
    """
    if not may_branch(x):
        return x / max_abs_or_one(x)
    size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    safe = (size > SAFE) & (size < 1 / SAFE)
    return x if bool(safe.all()) else torch.where(safe, x, x / max_abs_or_one(x))


def _svd(x: Tensor, ops: Ops) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    rank = s > s[..., :1] * (max(x.shape[-2:]) * torch.finfo(x.dtype).eps)
    return ops.apply(u * rank[..., None, :], vh)


def _iterate(x: Tensor, ops: Ops, steps: tuple[Quintic, ...]) -> Tensor:
    """`x <- a x + (b A + c A²) x` with `A = x xᵀ`, on x itself."""
    gram = ops.gram(x)
    bound = squared_norm_bound(gram)
    x, gram = x / bound.sqrt(), gram / bound
    for index, (a, b, c) in enumerate(steps):
        if index:
            gram = ops.gram(x)
        x = a * x + ops.apply(ops.quadratic(gram, b, c), x)
    return x


def _iterate_gram(x: Tensor, ops: Ops, steps: tuple[Quintic, ...]) -> Tensor:
    """The steps of `_iterate` accumulated on the small Gram matrix, and applied to x after every four of them.

    Rounding makes the Gram matrix's smallest eigenvalues negative, and the steps amplify them: so after four steps the
    accumulated factor is applied to x and the Gram matrix, now well conditioned, is computed again.
    """
    for start in range(0, len(steps), 4):
        gram = ops.gram(x)
        bound = squared_norm_bound(gram) if start == 0 else gram.new_ones(1, 1, 1)
        x = ops.apply(_factor(gram / bound, steps[start : start + 4], ops, bound.rsqrt()), x)
    return x


def polar_express_fp16(x: Tensor, ops: Ops) -> Tensor:
    """`U Vᵀ` of `(b, m, n)`, m <= n: five steps `x <- (a + b A + c A²) x`, `A = x xᵀ`, in float16.

    float16 has 11 significant bits where bfloat16 has 8, and no number here exceeds its range: entries of x are at most
    1 and `16/sqrt(n)`, of Gram matrices 256, of products of three steps 150. In bfloat16 the Gram form diverges on
    heavy-tailed spectra. Alignment `<o, x> / (|o|_2 |x|_*)` of a Gaussian: .99 on x itself, .98 by the Gram matrix.

    Args:
        x: floating point.
        ops: the products; they sum in float32.

    Returns:
        x's shape, float32; the largest singular value at most 1 + 5e-4, values below 3e-3 of it less than 1.

    Source: the Gram form with restarts, in float16: J. Zhang, N. Amsel, B. Chen, T. Dao, "Gram Newton-Schulz", 2026.
    """
    m, n = x.shape[-2:]
    peak = max_abs_or_one(x) * max(1.0, math.sqrt(n) / 16)
    x = _over(x, peak.clamp(max=torch.finfo(peak.dtype).max), torch.float16)
    gram = ops.gram(x)
    top = squared_norm_bound(gram, torch.float32)
    x, gram = _over(x, top.sqrt(), torch.float16), _over(gram, top, torch.float16)
    every = len(coefficients.POLAR_EXPRESS_FP16)
    for start, end in pairwise((*(range(every) if n < WIDE * m else coefficients.STARTS), every)):
        x = ops.apply(_factor(ops.gram(x) if start else gram, coefficients.POLAR_EXPRESS_FP16[start:end], ops), x)
    return x * x.new_full((1, 1, 1), coefficients.SHRINK, dtype=torch.float32)


def _over(x: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x / divisor`, rounded to another dtype while it is in a register."""
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return (x / divisor).to(dtype)
    return torch.div(x, divisor, out=torch.empty_like(x, dtype=dtype))


def _polynomial(gram: Tensor, step: Quintic, ops: Ops) -> Tensor:
    """`a + b A + c A²`."""
    a, b, c = step
    return plus_diagonal_(ops.quadratic(gram, b, c), a)


def _factor(gram: Tensor, steps: tuple[Quintic, ...], ops: Ops, scale: Tensor | None = None) -> Tensor:
    """The product of the steps' polynomials and the scale; each step's Gram matrix follows from the one before."""
    polynomial = _polynomial(gram, steps[0], ops)
    factor = polynomial if scale is None else polynomial * scale
    for step in steps[1:]:
        gram = ops.product(ops.product(polynomial, gram), polynomial)
        polynomial = _polynomial(gram, step, ops)
        factor = ops.product(polynomial, factor)
    return factor


def _qdwh(x: Tensor, ops: Ops, weights: tuple[Quintic, ...]) -> Tensor:
    """Weighted Halley steps `x <- (a + b A)(1 + c A)⁻¹ x` with `A = x xᵀ`.

    Each step computes the Gram matrix of the current x, since rounding hides singular values below 1e-3 in the first
    one: the first step only has to lift them.
    """
    for index, step in enumerate(weights):
        x = ops.apply(_halley_factor(ops.gram(x), step, ops, below_one=index > 0), x)
    return x


def _halley_factor(gram: Tensor, step: Quintic, ops: Ops, below_one: bool = False) -> Tensor:
    """`(a + b A)(1 + c A)⁻¹ / sqrt(bound)`, A the Gram matrix over its bound, or as it is; its diagonal is changed.

    It equals `b/c + (a/c - b/c²) (A + 1/c)⁻¹`: one Cholesky inverse.
    """
    a, b, c = step
    bound = gram.new_ones(1, 1, 1) if below_one else squared_norm_bound(gram)
    factor = ops.inverse(plus_diagonal_(gram, (bound / c)[..., 0])).mul_((a / c - b / c**2) * bound.sqrt())
    return plus_diagonal_(factor, (b / c * bound.rsqrt())[..., 0])


def _qdwh_2_bf16(x: Tensor, ops: Ops) -> Tensor:
    """`qdwh_2`, whose second step, on values in [.25, 1] and with a factor of values in [1, 7], multiplies in bfloat16.

    The rows of the first step's result are scaled by numbers between 1 and 2, which the second step takes back:
    entries that are alike are then rounded to either side, not all to the same (a constant matrix came out as 1.023).
    """
    first, second = coefficients.qdwh(lowest=1e-3, steps=2)
    golden = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device) * ((math.sqrt(5) - 1) / 2)
    scale = torch.exp2(golden.frac()).to(x.dtype)[:, None]
    lifted = ops.apply(_halley_factor(ops.gram(x), first, ops).mul_(scale), x).bfloat16()
    gram = ops.gram(lifted).to(x.dtype).div_(scale * scale.mT)
    factor = _halley_factor(gram, second, ops, below_one=True).mul_(coefficients.SHRINK_BF16 / scale.mT)
    return ops.apply(factor.bfloat16(), lifted).to(x.dtype)


def _halley_polynomial(gram: Tensor, ops: Ops) -> Tensor:
    """The factor of one Halley step and a polynomial of degree 9, on one Gram matrix `A = x xᵀ`.

    With `R = (1 + c A)⁻¹` the step's factor is `F = b/c + (a - b/c) R`; the next Gram matrix `B = F A F` is a linear
    combination of `R²`, A, R and 1; the polynomial's factor is `p0 + p1 B + B² (p2 + p3 B + p4 B²)`.
    """
    bound = squared_norm_bound(gram)
    (a, b, c), (p0, p1, p2, p3, p4) = coefficients.HALLEY
    low, high = b / c, a - b / c
    inverse = ops.inverse(plus_diagonal_(gram * (c / bound), 1))
    lifted = ops.quadratic(inverse, high / c * (high - 2 * low), -high * high / c).addcmul_(gram, low * low / bound)
    plus_diagonal_(lifted, 2 * low * high / c)
    square = ops.product(lifted, lifted)
    polynomial = ops.product(square, plus_diagonal_(torch.add(square, lifted, alpha=p3 / p4), p2 / p4))
    plus_diagonal_(polynomial.add_(lifted, alpha=p1 / p4), p0 / p4)
    scale = coefficients.ROUNDING * p4 * bound.rsqrt()
    return ops.product(polynomial, plus_diagonal_(inverse.mul_(high), low)).mul_(scale)


METHODS: dict[str, Iteration] = {
    "svd": _svd,
    "newton_schulz": partial(_iterate, steps=coefficients.NEWTON_SCHULZ),
    "polar_express": partial(_iterate, steps=coefficients.POLAR_EXPRESS),
    "gram": partial(_iterate_gram, steps=coefficients.POLAR_EXPRESS),
    "polar_express_fp16": polar_express_fp16,
    "qdwh": partial(_qdwh, weights=coefficients.qdwh(lowest=1e-4, steps=3)),
    "qdwh_2": partial(_qdwh, weights=coefficients.qdwh(lowest=1e-3, steps=2)),
    "qdwh_2_bf16": _qdwh_2_bf16,
    "halley": lambda x, ops: ops.apply(_halley_polynomial(ops.gram(x), ops), x),
}
