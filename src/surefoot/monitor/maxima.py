"""Sizes of activations: the root mean square, the largest one of a vector, the largest ratio of two differences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PAIRED = 2048
"""Vectors or samples, at most, whose pairs are compared."""

APART = 1e-5
"""Pairs that are closer, relative to their lengths, differ by rounding."""


def rms(x: Tensor) -> float:
    """`sqrt(mean(x**2))`, computed at least in float32; 0 for an empty tensor.

    >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    if x.numel() == 0:
        return 0.0
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return float(torch.linalg.vector_norm(wide)) / math.sqrt(x.numel())


def largest_rms(x: Tensor) -> float:
    """The largest `rms` of a vector along the last dimension; of a sample where x has four dimensions or more.

    >>> largest_rms(torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    2.5
    """
    if x.numel() == 0:
        return 0.0
    vectors = x.detach().flatten(1) if x.ndim > 3 else x.detach().reshape(-1, x.shape[-1] if x.ndim else 1)
    return float(torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).max()) / math.sqrt(vectors.shape[-1])


def over_vectors(norm: nn.Module) -> bool:
    """Whether a norm layer is over the last dimension alone, not over several whose vectors share one size.

    >>> over_vectors(nn.LayerNorm(4)), over_vectors(nn.LayerNorm((5, 4)))
    (True, False)
    """
    return len(getattr(norm, "normalized_shape", (1,))) == 1


def larger(a: float, b: float) -> float:
    """The larger of two numbers, NaN if one of them is: `max` loses the second.

    >>> larger(1.0, 2.0), larger(math.nan, 2.0), larger(2.0, math.nan)
    (2.0, nan, nan)
    """
    return a if a > b or math.isnan(a) else b


def largest_ratio(x: Tensor, y: Tensor, by_vector: bool) -> float | None:
    """The largest `rms(y1 - y2) / rms(x1 - x2)` over pairs, for discrete x the largest `rms(y1 - y2)`.

    Args:
        x: inputs.
        y: outputs.
        by_vector: pairs are of vectors along the last dimension, else of entries of the first one.

    Returns:
        The ratio; None where x and y have no pairs in common, or no two inputs differ.

    >>> x = torch.tensor([[1.0], [2.0], [4.0]])
    >>> largest_ratio(x, x.square(), by_vector=True)  # (16 - 4) / (4 - 2)
    6.0
    """
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        return None
    continuous = x.is_floating_point()
    if by_vector and y.ndim > 1:
        x, y = (x.flatten(0, -2) if continuous else x.flatten()), y.flatten(0, -2)
    chosen = torch.arange(len(x), device=x.device)[:: math.ceil(len(x) / PAIRED)] if len(x) else x
    x, y = (t[chosen].reshape(len(chosen), -1).double() if len(t) else t for t in (x, y))
    if len(x) < 2:
        return None
    apart, changed = _squared_distances(x), _squared_distances(y)
    lengths = x.square().sum(1)
    differ = apart > APART**2 * (lengths[:, None] + lengths)
    if not bool(differ.any()):
        return None
    squares = changed[differ] / (apart[differ] * (y.shape[1] / x.shape[1]) if continuous else y.shape[1])
    return math.sqrt(float(squares.max()))


def _squared_distances(x: Tensor) -> Tensor:
    """`|x_i - x_j|^2` of all pairs of rows, `(n, n)`; their error is about 1e-16 of the squared lengths."""
    lengths = x.square().sum(1)
    return (lengths[:, None] + lengths - 2 * x @ x.mT).clamp_min(0)
