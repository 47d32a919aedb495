"""Views: how a parameter is split into the blocks that its norm is taken over, and joined again.

A block has shape `(n, out, in)` for n independent matrices and `(n, size)` for n vectors. Most parameters are one
block; fused projections of unequal size are several. Update, initialisation, projection and metrics of a parameter use
the same view.
"""

from surefoot.views.base import (
    Convolution,
    Matrix,
    OneBlock,
    Rows,
    Shape,
    Stack,
    Transposed,
    TransposedConvolution,
    Vector,
    View,
)
from surefoot.views.fused import AlternatingStack, Fused, FusedStack, Grouped, Interleaved, PerHead, Projections

__all__ = [
    "AlternatingStack", "Convolution", "Fused", "FusedStack", "Grouped", "Interleaved", "Matrix", "OneBlock",
    "PerHead", "Projections", "Rows", "Shape", "Stack", "Transposed", "TransposedConvolution", "Vector", "View",
]  # fmt: skip
