"""`Sizes`: how large a matrix can be in several plain norms, from which a bound in any other norm follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

ROUNDED = 1 + 1e-5
"""Bound on the norm of a direction in float32."""


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
        """The same bounds, and all that follow from them for this shape.

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
