"""The spectral norm of a transposed convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from surefoot.geometry.spectral import ScaledSpectral, Spectral


@dataclass(frozen=True)
class TransposedConvSpectral(ScaledSpectral):
    """`sqrt(d_in / (stride d_out)) sigma_max(W)`: of `d_in` columns an output entry sums over one in `stride`.

    Its fan-in, and so the width factor, is `d_in / stride`; all else is the spectral norm's.

    Args:
        method: how `msign` is computed, see `surefoot.msign`.
        stride: how many disjoint sets of columns make different output entries; `prod(stride)` of a transposed
            convolution whose kernel is no smaller.

    Raises:
        ValueError: an unknown method.

    >>> w = torch.zeros(2, 8); w[0, 0] = 2.0
    >>> TransposedConvSpectral(stride=4).norm(w)
    tensor(2.)
    """

    method: str = "auto"
    stride: int = 1

    def unit(self, shape: torch.Size) -> float:
        """`sqrt(stride d_out/d_in)`."""
        return Spectral().unit(shape) * math.sqrt(self.stride)
