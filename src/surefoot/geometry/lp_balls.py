"""Balls of `l_s` norms of vectors: dual direction and nearest point. Every closed-form geometry is made of them.

All functions act along one dimension of a tensor whose other dimensions are a batch of vectors.
"""

import math

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.linalg.bounds import divisor, max_abs, max_abs_or_one

SAFE = 1e-15
"""Norms between this and its inverse are sums of squares that neither vanish nor overflow in float32."""

SMOOTHING, ROUNDS = 0.01, 20
"""Of `tangent_across`: relative to the root mean square length; rounds."""

BLOCK = 1 << 18
"""Entries that are squared at a time where vectors are columns: a share of the cache."""


def conjugate(s: float) -> float:
    """`s'` with `1/s + 1/s' = 1`.

    >>> conjugate(2.0), conjugate(1.0), conjugate(math.inf)
    (2.0, inf, 1.0)
    """
    if s == 1:
        return math.inf
    return 1.0 if math.isinf(s) else s / (s - 1)


def length(x: Tensor, s: float, dim: int) -> Tensor:
    """`|x|_s` along dim (kept), safe against overflow and underflow of the powers."""
    top = max_abs(x, dim)
    if math.isinf(s) or x.shape[dim] == 0:
        return top
    unit: Tensor = torch.linalg.vector_norm(x / divisor(top), s, dim, keepdim=True)
    return unit * top


def euclidean(x: Tensor, dim: int) -> Tensor:
    """`|x|_2` along dim (kept), from plain squares."""
    if x.stride(dim) == 1 or not device.may_branch(x):
        length: Tensor = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        return length
    # torch walks down the columns one by one, at a tenth of the speed of what follows
    rows = max(1, BLOCK * x.shape[dim] // max(1, x.numel()))
    return torch.stack([(part * part).sum(dim, keepdim=True) for part in torch.split(x, rows, dim)]).sum(0).sqrt_()


def direction(g: Tensor, s: float, dim: int, radius: float = 1.0) -> Tensor:
    """The maximiser of `<g, d>` over `|d|_s <= radius`: `sign(g) |g|**(p-1) / |g|_p**(p-1)` with `p = s'`; 0 for 0."""
    if math.isinf(s) or g.shape[dim] == 0:
        return g.sign() if radius == 1 else g.sign().mul_(radius)
    if s == 2 and g.numel() and device.may_branch(g):
        size = euclidean(g, dim)
        least, most = torch.aminmax(size)
        if float(least) > SAFE and float(most) < 1 / SAFE:  # the usual case, without a scaled copy
            return g / size.mul_(1 / radius)
    return _direction(g, s, dim).div_(1 / radius)


def _direction(g: Tensor, s: float, dim: int) -> Tensor:
    """At any scale, for radius 1."""
    unit = g / divisor(max_abs(g, dim))
    if s == 1:  # one-hot at the largest entry, ties split
        ties = unit.abs() == 1
        return unit.sign() * ties / ties.sum(dim, keepdim=True).clamp_min(1)
    p = conjugate(s)
    size = torch.linalg.vector_norm(unit, p, dim, keepdim=True).clamp_min(1)  # at least 1, but for g = 0
    unit.div_(size)
    return unit if p == 2 else unit.sign() * unit.abs() ** (p - 1)


def tangent(g: Tensor, unit: Tensor, s: float, dim: int, radius: float = 1.0) -> Tensor:
    """The maximiser of `<g, d>` over `|d|_s <= radius` and `<u, d> = 0` for the unit vectors u along dim; 0 for g = 0.

    It is the direction of `g + x u` for the x that minimises `|g + x u|_s'`: `<u, d>` rises with x, and has its root
    where `|x| |u|_s' <= 2 |g|_s'`. Bisection to 1e-12 of that; the ends are mixed, since for s of 1 and inf it jumps.
    """
    g = g / divisor(max_abs(g, dim))
    high = 2 * length(g, conjugate(s), dim) / divisor(length(unit, conjugate(s), dim))
    low = -high
    for _ in range(40):
        middle = (low + high) / 2
        below = (unit * direction(g + middle * unit, s, dim)).sum(dim, keepdim=True) <= 0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    first, last = direction(g + low * unit, s, dim, radius), direction(g + high * unit, s, dim, radius)
    down, up = ((unit * d).sum(dim, keepdim=True) for d in (first, last))
    share = torch.where(up > down, -down / torch.where(up > down, up - down, 1), 0).clamp(0, 1)
    return torch.where((g != 0).any(dim, keepdim=True), torch.lerp(first, last, share), 0)


def tangent_across(g: Tensor, unit: Tensor, dim: int, across: int) -> Tensor:
    """Nearly the maximiser of `<g, d>` over `|d|_2 <= 1` along dim and `<u, d> = 0` for unit vectors u along across.

    The dual problem, to minimise the sum of the lengths of `g + x u` over x, by 20 rounds of reweighted least squares:
    d is tangent to rounding, `<g, d>` within 2 % of the best on dense g.
    """
    g = g / max_abs_or_one(g)
    least = SMOOTHING * g.square().mean((-2, -1), keepdim=True).sqrt() * math.sqrt(g.shape[dim])
    tiny, moved = torch.finfo(g.dtype).tiny, g
    for _ in range(ROUNDS):
        weight = (moved.square().sum(dim, keepdim=True) + least.square()).clamp_min(tiny).rsqrt()
        weighted = unit * weight
        x = (g * weighted).sum(across, keepdim=True) / (unit * weighted).sum(across, keepdim=True).clamp_min(tiny)
        moved = g - x * unit
    d = moved * weight
    return d / max_abs(length(d, 2, dim), (-2, -1)).clamp_min(1)  # one number: the rows together are tangent


def project(w: Tensor, radius: Tensor, s: float, dim: int) -> Tensor:
    """The nearest point with `|x|_s <= radius`; vectors inside come back bit for bit.

    Radial for s = 2, a clamp for s = inf, else the solution of `x + mu s x**(s-1) = |w|` (soft threshold for s = 1),
    computed in float64 to a relative error of 1e-12.
    """
    if w.numel() == 0:
        return w.clone()
    if math.isinf(s):
        return torch.maximum(torch.minimum(w, radius), -radius)
    size = length(w, s, dim)
    inside = size <= radius
    if s == 2:
        return torch.where(inside, w, w * (radius / torch.where(inside, 1, size)))
    if device.on_cpu(w) and bool(inside.all()):
        return w.clone()
    scale = torch.where(radius > 0, radius, 1).double()
    y = torch.where(inside, 0, w.abs().double() / scale)
    near = _simplex(y, dim) if s == 1 else _newton(y, s, dim)
    near = torch.where(radius > 0, near * scale, 0).to(w.dtype)
    return torch.where(inside, w, w.sign() * near)


def _simplex(y: Tensor, dim: int) -> Tensor:
    """Nearest point of the unit simplex to `y >= 0` with `sum y > 1`: subtract the threshold found by sorting."""
    y = y - (y.amax(dim, keepdim=True) - 1).clamp_min(0)  # it is that of y less any number, and sums stay exact
    ordered = y.sort(dim, descending=True).values
    excess = ordered.cumsum(dim) - 1
    count = torch.arange(1, y.shape[dim] + 1, device=y.device, dtype=y.dtype)
    excess = (excess.movedim(dim, -1) / count).movedim(-1, dim)
    threshold = torch.where(ordered > excess, excess, -math.inf).amax(dim, keepdim=True)
    return (y - threshold).clamp_min(0)


def _newton(y: Tensor, s: float, dim: int) -> Tensor:
    """Nearest point of the unit `l_s` ball to `y >= 0`, by bisection on log mu around a Newton solve for x.

    `|x(mu)|_s` falls in mu and is below 1 at `mu = |y|_{s'} / s`, since `x <= (y / (mu s))**(1/(s-1))`.
    """
    high = (length(y, conjugate(s), dim) / s).log()
    low = high - 80.0
    for _ in range(50):  # to 1e-13 of mu
        middle = (low + high) / 2
        outside = length(_shrunk(y, middle.exp(), s), s, dim) > 1
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    return _shrunk(y, high.exp(), s)


def _shrunk(y: Tensor, mu: Tensor, s: float) -> Tensor:
    """The root `x` in [0, y] of `x + mu s x**(s-1) = y`.

    In `z = x` for `s >= 2`, `z = x**(s-1)` for `s < 2`, the left side `z**u + mu s z**v` is convex and rising, so
    Newton's steps from the right fall to the root and never pass it.
    """
    c, v = mu * s, max(1.0, s - 1)
    u = v / (s - 1)
    z = torch.minimum(y ** ((s - 1) / v), (y / c) ** (1 / v))
    for _ in range(12):
        z = (z - (z**u + c * z**v - y) / (u * z ** (u - 1) + c * v * z ** (v - 1))).clamp_min(0)
    return z**u
