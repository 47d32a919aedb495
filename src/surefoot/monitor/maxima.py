"""Sizes of activations: the root mean square, its largest and smallest of vectors, the largest ratio of differences."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from surefoot.linalg.device import widened

PAIRED = 2048
"""Vectors or samples, at most, whose pairs are compared."""

APART = 1e-5
"""Pairs that are closer, relative to their lengths, are not compared: their distance is not known in float64."""

STORED, SUMMED = 1.0, 16.0
"""Errors that are allowed for, in units of the coarsest dtype's and of float32's distance from 1 to the next number: a
vector that is stored twice, and its sum of products in float32."""


def rms(x: Tensor) -> float:
    """`sqrt(mean(x**2))`, computed at least in float32; 0 for an empty tensor.

    >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    return float(torch.linalg.vector_norm(widened(x.detach()))) / math.sqrt(max(1, x.numel()))


def largest_rms(x: Tensor) -> float:
    """The largest `rms` of a vector along the last dimension; of a sample where x has four dimensions or more.

    >>> largest_rms(torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    2.5
    """
    return float(vector_rms(x).max()) if x.numel() else 0.0


def vector_rms(x: Tensor) -> Tensor:
    """The `rms` of each of the same vectors."""
    vectors = x.detach().flatten(1) if x.ndim > 3 else x.detach().reshape(-1, x.shape[-1] if x.ndim else 1)
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    return lengths / math.sqrt(vectors.shape[-1])


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


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The floating-point dtype that rounds most; float32 if none is coarser.

    >>> coarsest([torch.float64, torch.bfloat16, torch.float16, torch.int64])
    torch.bfloat16
    """
    return max((torch.float32, *(d for d in dtypes if d.is_floating_point)), key=lambda dtype: torch.finfo(dtype).eps)


def largest_ratio(x: Tensor, y: Tensor, by_vector: bool, rounded: torch.dtype = torch.float32) -> float | None:
    """The largest `rms(y1 - y2) / rms(x1 - x2)` over pairs, for discrete x the largest `rms(y1 - y2)`, less rounding.

    With u the relative error that a vector may have, it is `(rms(y1 - y2) - u (rms(y1) + rms(y2))) / (rms(x1 - x2) +
    u (rms(x1) + rms(x2)))`: of a function with Lipschitz constant L whose computed values are within `u |y| + u L |x|`
    of its own, that is at most L, however close two inputs are.

    Args:
        x: inputs.
        y: outputs.
        by_vector: pairs are of vectors along the last dimension, else of entries of the first one.
        rounded: the coarsest dtype in which the function was computed, beside those of x and y.

    Returns:
        The ratio; None where x and y have no pairs in common, or no two inputs differ by more than rounding.

    >>> x = torch.tensor([[1.0], [2.0], [4.0]])
    >>> round(largest_ratio(x, x.square(), by_vector=True), 3)  # (16 - 4) / (4 - 2)
    6.0
    """
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        return None
    continuous, limits = x.is_floating_point(), torch.finfo(coarsest([x.dtype, y.dtype, rounded]))
    error = STORED * limits.eps + SUMMED * torch.finfo(torch.float32).eps
    if by_vector and y.ndim > 1:
        x, y = (x.flatten(0, -2) if continuous else x.flatten()), y.flatten(0, -2)
    chosen = torch.arange(len(x), device=x.device)[:: math.ceil(len(x) / PAIRED)] if len(x) else x
    x, y = (t[chosen].reshape(len(chosen), -1).double() if len(t) else t for t in (x, y))
    if len(x) < 2:
        return None
    (apart, size), (changed, rounding) = (_distances(z, limits.smallest_normal) for z in (x, y))
    differ = apart > max(APART, error) * size if continuous else apart > 0.5
    if not bool(differ.any()):
        return None
    changed = (changed[differ] - error * rounding[differ]).clamp_min(0) / math.sqrt(max(1, y.shape[1]))
    if continuous:
        changed = changed * math.sqrt(x.shape[1]) / (apart[differ] + error * size[differ])
    return float(changed.max())


def _distances(x: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """`|x_i - x_j|` of all pairs of rows, `(n, n)`, and `|x_i| + |x_j|` with entries of at least the smallest number.

    The error of a square is about 1e-16 of the squared lengths.
    """
    squares = x.square().sum(1)
    lengths = squares.sqrt() + smallest * math.sqrt(x.shape[1])
    return (squares[:, None] + squares - 2 * x @ x.mT).clamp_min(0).sqrt(), lengths[:, None] + lengths
