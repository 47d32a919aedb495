"""How far a step and the way back to a sphere move a weight: upper bounds, whatever the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.geometry.base import Geometry, NormBounds

PIECES = 256
"""Of the interval over which a maximum is bounded piece by piece; the bound exceeds it by about 1/256."""


def back_to_sphere(w: Tensor, reach: float, radius: float | None, ball: Geometry) -> Tensor:
    """Bound on the change by a step of norm reach and a rescaling of the same norm; a zero weight stays."""
    lower, upper, _ = NormBounds.of(ball).bounds(w)
    off = 0.0 if radius is None else torch.maximum(upper - radius, radius - lower)
    return torch.where(upper == 0, 0, off + 2 * reach)


def back_to_other(
    now: Tensor, own: float, along_w: Tensor, target: Tensor, reach: Tensor | float, upper: Tensor
) -> Tensor:
    """Bound in the weight's norm on the change by a step of norm reach and a rescaling of another norm to target.

    In that norm the weight has now, the step own, its part along the weight along_w; in its own the weight has upper.
    """
    least = target / (now + own).minimum((now.square() + 2 * now * along_w + own**2).sqrt())
    most = target / (now - along_w).clamp_min(0)
    return torch.where(now == 0, 0, torch.maximum(1 - least, most - 1) * upper + most * reach)


def back_to_frobenius(values: Tensor, reach: float) -> Tensor:
    """Bound on `|R n(w - x) - w|_2`, `n(y) = y / |y|_F`, `R = |w|_F`, over all x of spectral norm reach or less.

    To first order it is reach times the largest `-a^T d b + (s / R^2) <w, d>`, `s = a^T w b`, over unit vectors and
    `|d|_2 <= 1`, which is the largest sum of the singular values of `(s / R^2) w - a b^T`. Two bounds on that:
    nuclear norms of w's blocks along a, b and across them (`_by_blocks`), and w's leading part by itself, whose
    difference with `a b^T` has rank two (`_by_leading_part`). The less of both exceeds what ascent finds by 3.5 % at
    most for weights of 24 rows and more, Gaussian to rank one, and by 14 % for 5 rows.

    Source: pinching of the nuclear norm, R. Bhatia, "Matrix Analysis", section IV.2; the steps are in the helpers.

    Args:
        values: w's singular values `(..., n)`, decreasing.
        reach: the largest spectral norm of a step.

    Returns:
        Shape `(...)`; inf for steps that could reach the origin, 0 for a zero weight.

    >>> values = torch.tensor([10.0, *[5.0] * 20])  # the leading pair kept: 1 + 10 (110 - 2 * 10) / 600
    >>> round(float(back_to_frobenius(values, 0.01)) / 0.01, 2)
    2.51
    """
    if not values.shape[-1]:
        return values.sum(-1)
    values = values.double()
    square, nuclear = values.square().sum(-1), values.sum(-1)
    unit = torch.where(square == 0, 1, square)
    slope = torch.minimum(_by_blocks(values[..., 0], nuclear, unit), _by_leading_part(values, nuclear, unit))
    inward = 1 - reach * nuclear / unit  # R over the length of w - x is at most the inverse
    inner = torch.where(inward > 0, slope / inward.clamp_min(1e-30), torch.inf)
    outer = slope + values[..., 0] * reach * values.shape[-1] / (2 * unit)
    return torch.where(square == 0, 0, reach * torch.maximum(inner, outer))


def _by_blocks(top: Tensor, nuclear: Tensor, square: Tensor) -> Tensor:
    """With `-a^T d b = cos t`: `<w, d> <= nuclear - s - s cos t + 2 sqrt(top^2 - s^2) sin t`; the maximum over t and s.

    Pinching: the nuclear norm of w without row a and column b is `nuclear - s` at most, what is left of row and column
    has length `sqrt(top^2 - s^2)`. Over t it is `sqrt((1 - x)^2 + 4 x (y - x)) + s (nuclear - s) / R^2` with
    `x = s^2 / R^2`, `y = top^2 / R^2`: two concave functions, each bounded over every piece.
    """
    edges = torch.linspace(0, 1, PIECES + 1, dtype=top.dtype, device=top.device) * top[..., None]
    low, high, nuclear, square = edges[..., :-1], edges[..., 1:], nuclear[..., None], square[..., None]
    y = top[..., None].square() / square
    x = ((2 * y - 1) / 3).maximum(low.square() / square).minimum(high.square() / square)
    s = (nuclear / 2).maximum(low).minimum(high)
    return ((1 + (4 * y - 2) * x - 3 * x.square()).clamp_min(0).sqrt() + s * (nuclear - s) / square).amax(-1)


def _by_leading_part(values: Tensor, nuclear: Tensor, square: Tensor) -> Tensor:
    """The nuclear norm of `z top u v^T - a b^T`, `z = s / R^2`, plus z times the other singular values.

    With `A = (u^T a) (v^T b)` it is at most `sqrt((z top)^2 + 1 - 2 z top (2 A - 1))`, convex in z, so largest at an
    end; and s is at most `top A + second (1 - A)`.
    """
    top, second = values[..., :1], values[..., 1:2] if values.shape[-1] > 1 else torch.zeros_like(values[..., :1])
    edges = torch.linspace(0, 1, PIECES + 1, dtype=values.dtype, device=values.device)
    low, high = edges[:-1], edges[1:]
    z = (top * high + second * (1 - high)) / square[..., None]
    pair = ((z * top).square() + 1 - 2 * z * top * (2 * low - 1)).clamp_min(0).sqrt()
    return (pair + z * (nuclear[..., None] - top)).amax(-1).clamp_min(1)
