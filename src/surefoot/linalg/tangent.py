"""Steepest descent along manifolds of matrices: the spectral sphere, orthogonal matrices, rows of fixed length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.linalg.bounds import divisor, max_abs, max_abs_or_one, upper_bound
from surefoot.linalg.device import full_precision, on_cpu, widened
from surefoot.linalg.polar import msign

TOLERANCE, NEAR, EVALUATIONS = 0.01, 0.995, 10
"""Tolerance on `|h|`; the share of the best at which the search ends; and the most evaluations of h."""

MIXTURE = 0.2
"""Where `|h|` is below this at both ends of the bracket, the mixture of the ends is mostly as good as the root."""

GROWTH = 4.0
"""Factor between successive steps while there is no bracket."""

MARGIN = 0.1
"""Part of the bracket at either end in which h is not evaluated."""

NOISE = 32
"""Roundings of a dtype below which a tangent part is taken as 0: otherwise noise would become a step of norm 1."""

SMOOTHING, LEAST_SMOOTHING, SHARPENING, CONVERGED = 0.03, 1e-3, 4.0, 1.02
"""The smoothing s of `rows_msign`, relative to the root mean square singular value: first and least value, the factor
by which it falls, and the step's norm below which it falls, since smoothing then causes what the best still lacks."""

RELAXATION, SHARE, ITERATIONS, MOST = 1.35, 0.97, 12, 64
"""Factor on each change of the multipliers; share of the best at which they stay; iterations on an accelerator, and the
most on a CPU."""


def tangent_msign(m: Tensor, u: Tensor, v: Tensor, start: Tensor, method: str = "auto") -> tuple[Tensor, Tensor]:
    """The maximiser of `<m, d>` over `|d|_2 <= 1` with `uᵀ d v = 0`: steepest direction that preserves a norm.

    It is `msign(m + x u vᵀ)` for the x that minimises the convex `|m + x u vᵀ|_*`, whose slope is `h(x) = uᵀ d v`. A
    bracketed secant iteration searches for `|h| <= 0.01`, or for a bracket with `|h| <= 0.2` at both ends, and for
    99.5 % of the least `|m + x u vᵀ|_*` seen, which bounds the best. The result is the convex combination of the ends
    that has h = 0; where h jumps past 0 (m of low rank), the maximiser itself.

    Cost: an `msign` per evaluation of h: on a CPU about 2 if `start` is near, at most 10; on an accelerator always 10,
    since stopping early would synchronise.

    Args:
        m: `(..., out, in)`, float32 or float64.
        u: `(..., out)`, the leading left singular vector of the weight, a unit vector.
        v: `(..., in)`, the leading right one.
        start: `(...)`, the first x, in units of `|m - (uᵀ m v) u vᵀ|_F`: 0, or the x returned for a similar m.
        method: of `msign`.

    Returns:
        `(d, x)`: `|uᵀ d v| <= 0.01`, `<m, d>` at least 99.5 % of the best that the method's msign reaches, unless the
        evaluations run out; d = 0 where m has no tangent part. x is the `start` for the next call.

    Source: "Spectral Sphere", 2026; the mixture and the bracket are ours.

    >>> e = torch.tensor([1.0, 0.0])
    >>> d, _ = tangent_msign(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), e, e, torch.tensor(0.0), "svd")
    >>> (d.abs().round(decimals=3) + 0).tolist()
    [[0.0, 0.0], [0.0, 1.0]]
    """
    if m.numel() == 0:
        return m.clone(), start
    a, pair = m / max_abs_or_one(m), u[..., :, None] * v[..., None, :]
    a = _cleared(a - (u[..., None, :] @ a @ v[..., :, None]) * pair, a, (-2, -1))  # <m, d> does not depend on that part
    size = torch.linalg.matrix_norm(a, keepdim=True)
    return _search(a / divisor(size), u, v, torch.where(size[..., 0, 0] == 0, 0, start), method)


def _search(a: Tensor, u: Tensor, v: Tensor, x: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """`tangent_msign` for matrices of Frobenius norm 1 (or 0)."""
    pair = u[..., :, None] * v[..., None, :]
    zero, least = torch.zeros_like(x), torch.full_like(x, math.inf)
    ends = torch.full_like(x, -math.inf), torch.full_like(x, math.inf)  # infinite until h is known on that side of 0
    low, high = (_End(end, zero, torch.zeros_like(a), zero) for end in ends)
    step = 2 / math.sqrt(min(a.shape[-2:]))  # twice a singular value of a, if all are equal: h changes by about 1
    for _ in range(EVALUATIONS):
        d = msign(a + x[..., None, None] * pair, method)
        h = (u[..., None, :] @ d @ v[..., :, None])[..., 0, 0]
        new = _End(x, h, d, (a * d).sum((-2, -1)))
        least = torch.minimum(least, new.value + x * h)
        low, high = new.where(h <= 0, low), new.where(h > 0, high)
        bracketed = low.x.isfinite() & high.x.isfinite()
        root = torch.where(bracketed, low.h / (low.h - high.h), high.x.isfinite())  # from low to high
        done = (h.abs() <= TOLERANCE) | (bracketed & (torch.maximum(-low.h, high.h) <= MIXTURE))
        done &= torch.lerp(low.value, high.value, root) >= NEAR * least
        if on_cpu(done) and bool(done.all()):
            break
        inside = low.x + (high.x - low.x) * root.clamp(MARGIN, 1 - MARGIN)
        x = torch.where(done, x, torch.where(bracketed, inside, x - step * h))
        step *= GROWTH
    x = torch.where(bracketed, low.x + (high.x - low.x) * root, x)
    return torch.lerp(low.d, high.d, root[..., None, None]), x


class _End(NamedTuple):
    """One end of each matrix's bracket: x, and h, d, `<m, d>` there."""

    x: Tensor
    h: Tensor
    d: Tensor
    value: Tensor

    def where(self, chosen: Tensor, other: _End) -> _End:
        """This end for the chosen matrices, the other elsewhere."""
        masks = (chosen, chosen, chosen[..., None, None], chosen)
        return _End(*(torch.where(mask, a, b) for mask, a, b in zip(masks, self, other, strict=True)))


def stiefel_msign(m: Tensor, w: Tensor, method: str = "qdwh") -> Tensor:
    """The maximiser of `<m, d>` over `|d|_2 <= 1` and `wᵀ d + dᵀ w = 0`, for w with orthonormal columns, exactly.

    It is `d = msign(m wᵀ - w mᵀ) w`, for square and for tall w (a wide one is transposed). Proof: in an orthonormal
    basis that begins with w, d is a column of two blocks of which the first is skew. By the theorem of Davis, Kahan and
    Weinberger it is the first block column of some T of norm 1 whose first block row is `-dᵀ`; the skew part of T has
    the same column and row. So the steps are all `T w` with T skew, of norm 1 at most, and `<m, T w> = <m wᵀ, T>`
    depends on the skew part of `m wᵀ` alone, whose matrix sign is the best T.

    Cost: for k columns of n rows an msign of n x n if n <= 2k; else of 2k x 2k, and a QR decomposition of n x 2k.

    Args:
        m: `(..., out, in)`.
        w: `(..., out, in)`, all singular values 1; else d is `T w`, of norm at most `|w|_2`.
        method: of `msign`.

    Returns:
        d, m's shape and dtype, to the method's accuracy; 0 where m has no tangent part.

    Source: the square case J. Bernstein, "Modular manifolds", 2025, and J. Su, "Steepest descent on manifolds", 2025,
    who take an iteration for the rectangular one; C. Davis, W. Kahan and H. Weinberger, "Norm-preserving dilations and
    their applications to optimal error bounds", 1982.

    >>> stiefel_msign(torch.tensor([[5.0, 2.0], [0.0, 5.0]]), torch.eye(2), "svd").round().tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    if m.numel() == 0:
        return m.clone()
    if m.shape[-2] < m.shape[-1]:
        return stiefel_msign(m.mT, w.mT, method).mT
    a = widened(m / max_abs_or_one(m))
    w = w.to(a.dtype)
    with full_precision(m.device):
        basis = None
        if w.shape[-2] > 2 * w.shape[-1]:
            basis = torch.linalg.qr(torch.cat([w, a], -1)).Q
            a, w = basis.mT @ a, basis.mT @ w
        turn = a @ w.mT
        sign = msign(_cleared(turn - turn.mT, 2 * turn, (-2, -1)), method)
        d = (sign - sign.mT) @ (w / 2)
        return (d if basis is None else basis @ d).to(m.dtype)


def rows_msign(m: Tensor, unit: Tensor, start: Tensor, method: str = "qdwh") -> tuple[Tensor, Tensor]:
    """A near maximiser of `<m, d>` over `|d|_2 <= 1` and `<u_i, d_i> = 0` for each row i. There is no closed form.

    The dual problem is to minimise `|a|_*`, `a = m + diag(x) u`, over x, a multiplier a row. The nuclear norm is the
    smallest `tr(aᵀ P⁻¹ a + P)/2` over P; so in turn P becomes `(a aᵀ + s²)^(1/2)` and x the minimiser of that. Then
    `d = P⁻¹ a` is tangent. P⁻¹ is part of the matrix sign of (a, s 1). x is extrapolated from its last two changes
    (Anderson's mixing), and s falls once d's norm is near 1. Each d is divided by a bound on its norm, if that is above
    1, and the d with the largest `<m, d>` is the result.

    Every `|a|_*` bounds the best `<m, d>`, and `|a|_*² <= tr(aᵀ P⁻¹ a) tr P` by the inequality of Cauchy and Schwarz:
    d and x stay once `<m, d>` is 97 % of the least such bound.

    Cost: an iteration is an `msign` of a matrix with the smaller side appended, `upper_bound` and, for wide ones, a
    Cholesky factor of the row count. On a CPU as many as are needed, in training 3 to 15, and at most 64; on an
    accelerator always 12.

    Args:
        m: `(..., out, in)`, float32 or float64.
        unit: m's shape, rows of length 1, or 0: such a row is not constrained.
        start: `(..., out)`, the first x: 0, or the x returned for a similar m.
        method: of `msign`.

    Returns:
        `(d, x)`: d tangent to rounding, of norm at most 1.001; 0 where m is radial. x is the `start` for the next call.
        `<m, d>` is at least 97 % of the best, rounding aside, unless the iterations run out. From 0 or the x of a
        similar m, 12 are enough for all problems of `tests/laws/promises/test_rows_msign.py`, drawn against them.

    Source: iteratively reweighted least squares, K. Mohan and M. Fazel, "Iterative reweighted algorithms for
    matrix rank minimization", 2012; D. Anderson, "Iterative procedures for nonlinear integral equations", 1965; the
    tangent d is ours.

    >>> eye = torch.eye(2)
    >>> d, _ = rows_msign(torch.tensor([[9.0, 1.0], [-1.0, 9.0]]), eye, torch.zeros(2))
    >>> d.round(decimals=1).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    if m.numel() == 0:
        return m.clone(), start
    with full_precision(m.device):
        a = tangent_part(m / max_abs_or_one(m), unit, -1)
        size = torch.linalg.matrix_norm(a, keepdim=True) / math.sqrt(min(a.shape[-2:]))
        return _reweighted(a / divisor(size), unit, torch.where(size[..., 0] == 0, 0, start), method)


def _reweighted(a: Tensor, unit: Tensor, x: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """`rows_msign` for matrices whose root mean square singular value is 1 (or 0)."""
    batch = a.shape[:-2]
    found, most, least = torch.zeros_like(a), a.new_zeros(batch), a.new_full(batch, math.inf)
    smoothing, at, target, before = a.new_full((*batch, 1, 1), SMOOTHING), x, x, least
    for index in range(MOST if on_cpu(a) else ITERATIONS):
        d, minimiser, bound = _tangent_step(a, unit, x, smoothing, method)
        size = upper_bound(d, 8)[..., None, None]
        d = d / size.clamp_min(1)
        going = most < SHARE * least  # a matrix's step does not depend on how long others of its batch take
        reached = torch.where(going, (a * d).sum((-2, -1)), 0)
        found = torch.where((reached > most)[..., None, None], d, found)
        most, least = torch.maximum(most, reached), torch.where(going, torch.minimum(least, bound), least)
        target = target if index else minimiser
        worse = (bound > before)[..., None]  # the extrapolation is taken back; without it the bound falls
        mixed = torch.where(worse, torch.lerp(at, target, RELAXATION), _mixed(x, minimiser - x, at, target - at))
        at, target = torch.where(worse, at, x), torch.where(worse, target, minimiser)
        before, x = torch.minimum(before, bound), torch.where(going[..., None], mixed, x)
        if on_cpu(a) and not bool((most < SHARE * least).any()):
            break
        smoothing = torch.where(size <= CONVERGED, (smoothing / SHARPENING).clamp_min(LEAST_SMOOTHING), smoothing)
    return found, x


def _mixed(x: Tensor, change: Tensor, last: Tensor, last_change: Tensor) -> Tensor:
    """The next x by Anderson's mixing: x plus the relaxed change, extrapolated from the last two iterations."""
    turn = change - last_change
    part = (turn * change).sum(-1, keepdim=True) / divisor((turn * turn).sum(-1, keepdim=True))
    return x + RELAXATION * change - part * (x - last + RELAXATION * turn)


def _tangent_step(a: Tensor, unit: Tensor, x: Tensor, smoothing: Tensor, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """The tangent d by the P of `a + diag(x) u`, the x that is the minimiser for it, a bound on the best `<a, d>`."""
    rows, columns = a.shape[-2:]
    tall, free = rows > columns, (unit == 0).all(-1)
    shift = smoothing * torch.eye(min(rows, columns), dtype=a.dtype, device=a.device)
    moved = a + x[..., None] * unit
    sign = msign(torch.cat([moved, shift], -2 if tall else -1), method)
    sign, inverse = sign.tensor_split((rows if tall else columns,), -2 if tall else -1)
    inverse = (inverse + inverse.mT) / (2 * smoothing)
    inner = (sign * moved).sum((-2, -1))
    trace = inner + smoothing[..., 0, 0].square() * inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
    if tall:
        weighted = unit @ inverse
        best = -(a * weighted).sum(-1) / torch.where(free, 1, (unit * weighted).sum(-1))
        d = (a + best[..., None] * unit) @ inverse
    else:
        normal = inverse * (unit @ unit.mT) + torch.diag_embed(free.to(a.dtype))
        slope = ((inverse @ a) * unit).sum(-1, keepdim=True)
        best = -torch.cholesky_solve(slope, torch.linalg.cholesky_ex(normal).L)[..., 0]
        d = inverse @ (a + best[..., None] * unit)
    return d, best, (inner * trace).clamp_min(0).sqrt()


def tangent_part(d: Tensor, unit: Tensor, dim: int) -> Tensor:
    """Vectors along dim without their part along those of `unit`, of length 1 or 0; 0 where the rest is rounding."""
    precise = d.to(unit.dtype)
    return _cleared(precise - (precise * unit).sum(dim, keepdim=True) * unit, precise, (dim,)).to(d.dtype)


def _cleared(part: Tensor, whole: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The part, 0 where it is rounding of the whole."""
    least = NOISE * torch.finfo(part.dtype).eps * max_abs(whole, dims)
    return torch.where(max_abs(part, dims) > least, part, 0)
