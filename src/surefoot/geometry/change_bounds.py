"""Bounds on how far a step moves a weight, whatever its gradient: sizes of steps, the way back to a ball or a sphere.

`ChangeBounds` says how large a norm's directions are, by `Sizes`; stabilisers add how far they bring the weight back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.linalg.bounds import divisor

ROUNDED = 1 + 1e-5
"""Bound on the norm of a direction in float32."""

PIECES = 256
"""Of the interval over which a maximum is bounded piece by piece; the bound exceeds it by about 1/256."""


@dataclass(frozen=True)
class Sizes:
    """Upper bounds on plain norms, without width factors, of matrices or vectors of one shape; inf where unknown.

    Args:
        entry: largest absolute value.
        row: largest Euclidean length of a row (of a vector: its length).
        column: largest Euclidean length of a column.
        whole: root of the sum of squares.
        spectral: largest singular value.
    """

    entry: float = math.inf
    row: float = math.inf
    column: float = math.inf
    whole: float = math.inf
    spectral: float = math.inf

    def within(self, shape: tuple[int, ...]) -> Sizes:
        """The same bounds, and all that follow for this shape.

        Args:
            shape: `(..., out, in)`, or `(size,)` of vectors.

        Returns:
            Bounds at most as large.

        >>> Sizes(entry=0.5).within((4, 9))
        Sizes(entry=0.5, row=1.5, column=1.0, whole=3.0, spectral=3.0)
        >>> Sizes(spectral=1.0).within((4, 9)).whole
        2.0
        """
        rows, columns = shape[-2] if len(shape) > 1 else 1, shape[-1]
        known = self
        for _ in range(2):  # from entries to the whole in two steps
            row = min(known.row, known.entry * math.sqrt(columns), known.spectral)
            column = min(known.column, known.entry * math.sqrt(rows), known.spectral)
            whole = min(row * math.sqrt(rows), column * math.sqrt(columns), known.spectral * math.sqrt(min(shape[-2:])))
            whole = min(known.whole, whole)
            spectral = min(known.spectral, whole)
            known = Sizes(min(known.entry, row, column), min(row, spectral), min(column, spectral), whole, spectral)
        return known


UNKNOWN = Sizes()
"""No bounds at all."""


def clipped_change(excess: Tensor, reach: float) -> Tensor:
    """Bound on `|clip(w + x, s) - w|` for the largest singular value, `|w| <= s + excess` and `|x| <= reach`.

    With c = excess it is `(c + e)/2 + sqrt((c - e)^2/4 + e^2)`, e = reach: near c for c >> e, 1.62 e for c = 0. The sum
    `c + 2 e` of the two movements is not reached, since what is clipped has just grown.

    Proof: let `A = w + x - clip(w + x, s)`, positive on the right singular vectors above s, so that `u^T (w - clip) v =
    u^T A v - u^T x v`. Split u and v into their common part z on these vectors, `|z|^2 = 1 - t^2`, and the rest, of
    squared lengths 2 t^2 together. `<z, A z> <= c |z|^2 + z^T x z` by the norm of w, and the terms with x that remain
    are at most `e (2 t sqrt(1 - t^2) + t^2)`; the largest value over t is the formula.

    Args:
        excess: how far w may be outside the ball that it is clipped to, any shape.
        reach: norm of the step.

    Returns:
        The bound, excess's shape.

    >>> clipped_change(Tensor([0.0, 15.0]), 1.0)
    tensor([ 1.6180, 15.0711])
    """
    return (excess + reach) / 2 + ((excess - reach).square() / 4 + reach**2).sqrt()


def back_to_other(now: Tensor, own: float, along_w: Tensor, target: Tensor, reach: float, upper: Tensor) -> Tensor:
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
    unit = divisor(square)
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
