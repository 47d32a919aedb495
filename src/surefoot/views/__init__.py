"""Views: a parameter as the blocks that its norm is taken over, and back.

A block has shape `(n, out, in)` for matrices and `(n, size)` for vectors, n being independent problems. Most
parameters are one block; fused projections of unequal size are several. The update, the initialisation, the
projection and the metrics of a parameter all act on the same view.
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
    "AlternatingStack",
    "Convolution",
    "Fused",
    "FusedStack",
    "Grouped",
    "Interleaved",
    "Matrix",
    "OneBlock",
    "PerHead",
    "Projections",
    "Rows",
    "Shape",
    "Stack",
    "Transposed",
    "TransposedConvolution",
    "Vector",
    "View",
]
