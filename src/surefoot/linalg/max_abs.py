"""`max |x|`: the largest absolute value of a tensor's entries along some dimensions."""

from __future__ import annotations

import torch
from torch import Tensor


def max_abs(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """`max |x|` over the dimensions `dim`, which stay with size 1.

    Two reductions, since `x.abs()` would make a copy; on a CPU many times faster than `vector_norm(x, inf)`.

    Args:
        x: floating point, any shape.
        dim: one dimension or several.

    Returns:
        0 over no entries; NaN where any entry is NaN.

    >>> max_abs(torch.tensor([[1.0, -3.0]]), -1)
    tensor([[3.]])
    """
    if not x.numel():
        return x.sum(dim, keepdim=True)
    return torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))


def max_abs_or_one(x: Tensor) -> Tensor:
    """A divisor that brings each matrix `(..., m, n)` to largest entry 1: its `max |x_ij|`, or 1 for a zero matrix.

    Args:
        x: `(..., m, n)`, floating point.

    Returns:
        `(..., 1, 1)`.

    >>> max_abs_or_one(torch.tensor([[[1.0, -3.0]], [[0.0, 0.0]]])).flatten()
    tensor([3., 1.])
    """
    peak = max_abs(x, (-2, -1))
    return torch.where(peak == 0, 1, peak)


def near_one(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x times the power of two that brings `max |x|` over `dims` into [1/2, 1): sums of products then do not overflow.

    What does not depend on the scale of x is the same from it, bit for bit.

    Args:
        x: floating point, any shape.
        dims: the dimensions.

    Returns:
        x's shape and dtype; zeros stay, and what is below 1e-30 is brought up to 1e30 times itself.

    >>> near_one(torch.tensor([[3e38, -1e37], [0.0, 0.0]]), (-1,))
    tensor([[ 0.8816, -0.0294],
            [ 0.0000,  0.0000]])
    """
    peak = max_abs(x, dims)
    power = torch.frexp(peak).mantissa / peak  # exact, and 0/0 for zeros
    return x * torch.where(peak == 0, 1, power.clamp_max(2.0**100))
